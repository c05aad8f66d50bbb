"""Onefold as an engine of verl: what ranks call by name. verl's own training worker and its loss for
supervised fine-tuning, on CPU, by its engine for FSDP2 and by Onefold's.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, ROWS = 3, 4


def start(folder: str) -> None:
    """As torchrun sets it, a model to load, and the CPU as a platform of verl's."""
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,onefold.integrations.verl",
    }
    import trainer_script
    from transformers import LlamaConfig, LlamaForCausalLM

    if dist.get_rank() == 0 and not (Path(folder) / "model").exists():
        torch.manual_seed(0)
        config = LlamaConfig(**trainer_script.CONFIG | {"tie_word_embeddings": False})
        LlamaForCausalLM(config).save_pretrained(Path(folder) / "model")
    dist.barrier()


def worker(folder: str, engine: dict[str, Any], model: Any = None, checkpoint: Any = None) -> Any:
    """verl's training worker with an engine by these keys."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import sft_loss

    from onefold.integrations.verl import EngineConfig

    # verl's engine for FSDP is registered for CUDA; it runs on the CPU, too
    os.environ["VERL_ENGINE_DEVICE"] = "cpu" if engine["strategy"] == "onefold" else "cuda"
    kind = EngineConfig if engine["strategy"] == "onefold" else FSDPEngineConfig
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=f"{folder}/model",
                load_tokenizer=False,
                use_remove_padding=False,
                override_config={"attn_implementation": "eager"},
                **(model or {}),
            ),
            engine_config=kind(
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                infer_micro_batch_size_per_gpu=2,
                use_torch_compile=False,
                **engine,
            ),
            optimizer_config=FSDPOptimizerConfig(
                lr=1e-2, total_training_steps=10, lr_scheduler_type="cosine", clip_grad=0.5
            ),
            checkpoint_config=CheckpointConfig(**(checkpoint or {})),
            profiler_config=None,
        )
    )
    made.set_loss_fn(partial(sft_loss, config=None))
    torch.manual_seed(0)  # adapters are drawn
    made.reset()
    return made


def batch(step: int) -> Any:
    """Rows of different lengths, others on each rank."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    rows = [
        torch.randint(
            1, 64, (int(torch.randint(5, 12, (), generator=generator)),), generator=generator
        )
        for _ in range(ROWS)
    ]
    masks = [torch.arange(len(row)) >= 2 for row in rows]

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "loss_mask": nested([mask.long() for mask in masks]),
    }
    said = {"temperature": 1.0, "pad_mode": "no_padding", "pad_token_id": 0}
    data = tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=said)
    tu.assign_non_tensor(data, update_lr_scheduler=True)
    return data


def train(made: Any, first: int, last: int) -> list[dict[str, float]]:
    from verl.utils import tensordict_utils as tu

    seen = []
    for step in range(first, last):
        metrics = tu.get(made.train_batch(data=batch(step)), "metrics")
        seen.append({name: metrics[name] for name in ("loss", "grad_norm", "lr")})
    return seen


FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def by_verl(folder: str) -> dict[str, Any]:
    """Losses, norms and rates by verl's FSDP2 and by Onefold, in fp32 and in bf16, with adapters."""
    start(folder)
    out: dict[str, Any] = {}
    for name, precision, model in (("fp32", FP32, {}), ("bf16", None, {}), ("lora", FP32, LORA)):
        engine = {"strategy": "fsdp2", "mixed_precision": precision}
        out[f"{name} fsdp2"] = train(worker(folder, engine, model), 0, STEPS)
        for stage in (1, 3) if name == "fp32" else (3,):
            engine = {"strategy": "onefold", "recipe": stage, "mixed_precision": precision}
            out[f"{name} {stage}"] = train(worker(folder, engine, model), 0, STEPS)
    return out


def states(folder: str) -> dict[str, Any]:
    """What an engine saves, loads, and hands to an inference engine."""
    start(folder)  # before verl is imported
    from transformers import LlamaForCausalLM
    from verl.utils import tensordict_utils as tu

    import onefold

    out: dict[str, Any] = {}
    contents = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    three = {"strategy": "onefold", "recipe": {"stage": 3}, "mixed_precision": FP32}
    made = worker(folder, three, checkpoint=contents)
    out["before"] = tu.get(made.infer_batch(data=batch(7)), "metrics")["loss"]
    reference = worker(folder, three | {"forward_only": True})
    out["reference"] = tu.get(reference.infer_batch(data=batch(7)), "metrics")["loss"]
    train(made, 0, 2)
    made.save_checkpoint(f"{folder}/global_step_1", global_step=1, max_ckpt_to_keep=1)
    made.save_checkpoint(f"{folder}/global_step_2", global_step=2, max_ckpt_to_keep=1)
    whole = onefold.full_state_dict(made.engine.module)
    streamed = dict(made.engine.get_per_tensor_param()[0])
    out["names"] = [sorted(whole), sorted(streamed)]
    out["equal"] = [torch.equal(streamed[name], value) for name, value in whole.items()]
    out["kept"] = sorted(path.name for path in Path(folder).glob("global_step_*"))
    if dist.get_rank() == 0:
        again = LlamaForCausalLM.from_pretrained(f"{folder}/global_step_2/huggingface")
        out["exported"] = [torch.equal(again.state_dict()[n], value) for n, value in whole.items()]
    out["evaluated"] = tu.get(made.infer_batch(data=batch(7)), "metrics")["loss"]
    out["second"] = train(made, 2, 4)

    one = {"strategy": "onefold", "recipe": 1, "mixed_precision": FP32}
    resumed = worker(folder, one, checkpoint=contents)
    resumed.load_checkpoint(f"{folder}/global_step_2")
    out["evaluated again"] = tu.get(resumed.infer_batch(data=batch(7)), "metrics")["loss"]
    out["again"] = train(resumed, 2, 4)

    tuned = worker(folder, three, LORA | {"lora": {"merge": True}})
    train(tuned, 0, 2)
    whole = onefold.full_state_dict(tuned.engine.module)
    merged = dict(tuned.engine.get_per_tensor_param()[0])
    out["merged"] = {"names": sorted(merged), "off": 0.0, "moved": 0.0}
    if dist.get_rank() == 0:
        for name, value in merged.items():
            path = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{path}.weight" in whole:  # has no adapter
                expected = whole[f"{path}.weight"]
            else:
                a, b = (whole[f"{path}.lora_{which}.default.weight"] for which in "AB")
                base = whole[f"{path}.base_layer.weight"]
                expected = base + 2.0 * b @ a
                out["merged"]["moved"] += (expected - base).abs().max().item()
            out["merged"]["off"] = max(out["merged"]["off"], (expected - value).abs().max().item())
    return out


def interface() -> dict[str, Any]:
    """How the engine fits verl's classes, and what its keys raise."""
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "onefold.integrations.verl"}
    import inspect

    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    from onefold.integrations.verl import Engine, EngineConfig

    def names(function: Any) -> set[str]:
        return {
            name
            for name, p in inspect.signature(function).parameters.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        }

    unknown = []
    for name, ours in vars(Engine).items():
        if not inspect.isfunction(ours):
            continue
        theirs = getattr(FSDPEngineWithLMHead, name, None)
        if theirs is None or (
            name != "get_per_tensor_param_delta_shard" and names(ours) != names(theirs)
        ):
            unknown.append(name)

    def raised(**keys: Any) -> str:
        try:
            EngineConfig(**{"recipe": 3} | keys)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    refused: dict[str, Any] = {
        "param_offload": True, "optimizer_offload": True, "offload_policy": True, "fsdp_size": 2,
        "reshard_after_forward": False, "ulysses_sequence_parallel_size": 2,
        "forward_prefetch": True, "use_orig_params": True, "wrap_policy": {"min_num_params": 7},
    }  # fmt: skip
    bf16, fp32 = EngineConfig(recipe={"stage": 3}).read(), {"param_dtype": "fp32"}
    computes = [bf16.compute_dtype, bf16.gradients.wire]
    computes.append(EngineConfig(recipe=3, mixed_precision=fp32).read().compute_dtype)
    return {
        "composed": composed(),
        "registered": sorted(EngineRegistry._engines["language_model"]["onefold"]),
        "unknown": unknown,
        "refused": {key: raised(**{key: value}) for key, value in refused.items()},
        "no recipe": raised(recipe=None),
        "precision twice": raised(recipe={"stage": 3, "precision": "bf16"}, mixed_precision=fp32),
        "computes": [str(dtype) for dtype in computes],
    }


def composed() -> list[str]:
    """The engines that verl's own configuration files give, with the keys of docs/launchers.md."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    target = "_target_=onefold.integrations.verl.EngineConfig"
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    keys = ["strategy=onefold", f"fsdp_config.{target}", "ppo_micro_batch_size_per_gpu=1"]
    more = [f"+{place}.fsdp_config.recipe={{stage: 3}}" for place in (actor, ref)]
    more += [f"{actor}.{key}" for key in keys] + [f"{ref}.{key}" for key in keys[:2]]
    with initialize_config_module("verl.trainer.config", version_base=None):
        given = [f"engine.{target}", "engine.strategy=onefold", "+engine.recipe={stage: 3}"]
        tuned = compose("sft_trainer_engine", overrides=given)
        acted = compose("ppo_trainer", overrides=more).actor_rollout_ref
    acted.ref.fsdp_config.strategy = "onefold"
    engines = [
        omega_conf_to_dataclass(tuned.engine),
        omega_conf_to_dataclass(acted.actor).engine,
        omega_conf_to_dataclass(acted.ref.fsdp_config),
    ]
    return [f"{made.strategy} {made.read().parameters.placement.name}" for made in engines]
