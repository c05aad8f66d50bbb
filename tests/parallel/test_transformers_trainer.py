"""`onefold.hf.Trainer` on a model that transformers has parallelized: the same as one process."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ranks import run_ranks
from zoo import tokens_of

pytestmark = pytest.mark.one_in(3)

SERVER = "libraries"

OPTIONS: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
MOE = {**OPTIONS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("sizes", "instead"),
    [
        ({"tp_size": 2}, "In place of tp_size=2, load the model with onefold.hf.from_pretrained"),
        ({"cp_size": 4}, "In place of cp_size=4, call onefold.shard(model, recipe, mesh=..."),
        ({"sp_size": 2}, "In place of sp_size=2, call onefold.shard(model, recipe, mesh=..."),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, "In place of dp_replicate_size=2, give"),
    ],
)
def test_a_parallelism_config_is_refused_by_what_stands_in_its_place(
    sizes: dict[str, int], instead: str
) -> None:
    from accelerate import ParallelismConfig

    import onefold
    from onefold.integrations.hf.refusals import refuse_arguments

    args = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes))
    with pytest.raises(NotImplementedError) as told:
        refuse_arguments(args, onefold.Recipe.zero(3))
    assert instead in str(told.value) and str(told.value).count("In place of") == len(sizes)


def test_a_recipe_that_sums_gradients_is_refused_beside_a_loss_that_is_made_for_means() -> None:
    import onefold
    from onefold.integrations.hf.refusals import refuse_arguments

    with pytest.raises(ValueError, match="that many times too large"):
        refuse_arguments(SimpleNamespace(), onefold.Recipe.zero(3, gradients="sum"))


def samples() -> list[dict[str, torch.Tensor]]:
    rows = tokens_of(5, batch=24, length=8, vocabulary=64)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(
    folder: Path, kind: str, sizes: dict[str, int] | None, stage: int, **more: Any
) -> tuple[Any, Any]:
    """A Trainer of three steps of 8 samples with accumulation of 2, and its model; without `sizes` in
    one process by transformers alone. `more`: training arguments, and further ones of Trainer.
    """
    import transformers
    from accelerate import ParallelismConfig
    from transformers.distributed import DistributedConfig

    import onefold
    import onefold.hf

    given = {name: more.pop(name) for name in ("eval_dataset", "compute_metrics") if name in more}
    # accelerate takes it on devices, and refuses it on CPUs
    ParallelismConfig._validate_accelerator = lambda *_: None
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {  # as a launcher sets it
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    data_ranks = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1) if sizes else 1
    args: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 4 // data_ranks,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        **more,
    }
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    if sizes is None:
        model = model_class.from_pretrained(folder, dtype=torch.float32)
        trainer: Any = transformers.Trainer(
            model, transformers.TrainingArguments(**args), train_dataset=samples(), **given
        )
    else:
        model = onefold.hf.from_pretrained(
            folder, model_class, torch.float32, distributed_config=DistributedConfig(**sizes)
        )
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        trainer = onefold.hf.Trainer(
            model,
            transformers.TrainingArguments(**args),
            train_dataset=samples(),
            recipe=recipe,
            **given,
        )
    return trainer, model


def trained(folder: Path, kind: str, sizes: dict[str, int] | None, stage: int) -> dict[str, Any]:
    """The losses, norms and weights of a Trainer."""
    import onefold

    trainer, model = trainer_of(folder, kind, sizes, stage)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [float(log["grad_norm"]) for log in logs],
        "weights": onefold.full_state_dict(trainer.model) if sizes else dict(model.state_dict()),
        "groups": sizes and onefold.engine_of(model).group.topology.inner,
    }


CASES = {
    "Qwen3, tp 2": ("Qwen3", {"fsdp_size": 1, "tp_size": 2}),
    "Qwen3, fsdp 2 and tp 2": ("Qwen3", {"fsdp_size": 2, "tp_size": 2}),
    "Qwen3-MoE, fsdp 2, tp 2, ep 4": ("Qwen3Moe", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
    "Qwen3-MoE, fsdp 4, ep 2": ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 2}),
    "Qwen3, two replicas of tp 2": ("Qwen3", {"dp_replicate_size": 2, "tp_size": 2}),
    "Qwen3, two replicas of fsdp 2": ("Qwen3", {"dp_replicate_size": 2, "fsdp_size": 2}),
}


def saved(kind: str, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(MOE if "Moe" in kind else OPTIONS))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", CASES)
def test_trainer_on_a_parallelized_model_trains_as_one_process(name: str, tmp_path: Path) -> None:
    kind, sizes = CASES[name]
    saved(kind, tmp_path)
    expected = run_ranks(1, trained, tmp_path, kind, None, 0)[0]
    ranks = prod(size for axis, size in sizes.items() if axis != "ep_size")
    for stage in (1, 3):
        for seen in run_ranks(ranks, trained, tmp_path, kind, sizes, stage):
            if "dp_replicate_size" in sizes:  # divided inside each replica
                assert seen["groups"] == ranks // 2
            for what in ("losses", "norms"):
                assert seen[what] == pytest.approx(expected[what], rel=1e-3), (what, seen, expected)
            for key, value in seen["weights"].items():
                torch.testing.assert_close(value, expected["weights"][key], rtol=1e-4, atol=1e-4)


def lives(folder: Path, kind: str, sizes: dict[str, int] | None, again: Any) -> dict[str, Any]:
    """Train with evaluations and checkpoints, load the best, save; go on from the first checkpoint as
    `again` (kind of mesh), and evaluate.
    """
    import numpy as np
    import torch.distributed as dist

    import onefold

    def metrics(seen: Any) -> dict[str, float]:
        return {"rows": len(seen.label_ids), "of": float(np.asarray(seen.label_ids).sum())}

    data_ranks = sizes["fsdp_size"] if sizes else 1
    more: dict[str, Any] = {
        "eval_dataset": samples()[:7], "compute_metrics": metrics, "eval_strategy": "steps", "eval_steps": 1,
        "per_device_eval_batch_size": 4 // data_ranks, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    trainer, _ = trainer_of(folder, kind, sizes, 3, **more)
    trainer.train()
    evals = [log for log in trainer.state.log_history if "eval_loss" in log]
    best = trainer.evaluate()
    trainer.save_model(str(folder / "saved"))
    dist.barrier()
    out = {
        "eval": [log["eval_loss"] for log in evals],
        "counted": [(log["eval_rows"], log["eval_of"]) for log in evals],
        "best": best["eval_loss"],
        "best step": trainer.state.best_model_checkpoint.rpartition("-")[2],
    }
    if sizes:
        weights = onefold.full_state_dict(trainer.model)
        whole = dict(type(trainer.model).from_pretrained(folder / "saved").state_dict())
        out["saved"] = all(torch.equal(whole[name], value) for name, value in weights.items())
        for name, axes in again.items():
            other = {"output_dir": str(folder / name), "save_strategy": "no"}
            resumed, _ = trainer_of(folder, kind, axes, 1, **other)
            resumed.train(resume_from_checkpoint=str(folder / "out/checkpoint-1"))
            logs = [log for log in resumed.state.log_history if "loss" in log]
            out[name] = [log["loss"] for log in logs if log["step"] > 1]
    out["losses"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return out


LIVES: dict[str, tuple[str, dict[str, int], dict[str, dict[str, int]]]] = {
    "fsdp 2 and tp 2": (
        "Qwen3",
        {"fsdp_size": 2, "tp_size": 2},
        {"the same": {"fsdp_size": 2, "tp_size": 2}, "four of data": {"fsdp_size": 4}},
    ),
    "fsdp 4 and ep 2": (
        "Qwen3Moe",
        {"fsdp_size": 4, "ep_size": 2},
        {"beside tensors": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVES)
def test_trainer_evaluates_saves_takes_the_best_and_resumes_on_another_mesh(
    name: str, tmp_path: Path
) -> None:
    kind, sizes, again = LIVES[name]
    saved(kind, tmp_path)
    expected = run_ranks(1, lives, tmp_path, kind, None, None)[0]
    for seen in run_ranks(4, lives, tmp_path, kind, sizes, again):
        for what in ("losses", "eval"):
            assert seen[what] == pytest.approx(expected[what], rel=1e-3), what
        # Each sample is counted once, in a last batch of 3 too
        assert seen["counted"] == expected["counted"] and seen["counted"][0][0] == 7
        # The worst loss is taken for the best: the weights went back to the first step's
        assert seen["best step"] == expected["best step"] == "1"
        assert seen["best"] == pytest.approx(seen["eval"][0], rel=1e-6)
        assert seen["saved"]
        for mesh in again:
            assert seen[mesh] == pytest.approx(expected["losses"][1:], rel=1e-3), mesh


@pytest.mark.slow
def test_what_a_trainer_cannot_do_with_a_parallelized_model_is_told(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    import onefold.hf
    from onefold.integrations.hf.refusals import refuse_model

    pipeline = DistributedConfig(tp_size=2, pp_size=2)
    with pytest.raises(ValueError, match="pp_size=2: transformers' pipelines do not train"):
        onefold.hf.from_pretrained(tmp_path, distributed_config=pipeline)
    with pytest.raises(ValueError, match="names cp_size, which transformers' DistributedConfig"):
        onefold.hf.from_pretrained(tmp_path, distributed_config={"tp_size": 2, "cp_size": 2})
    model = LlamaForCausalLM(LlamaConfig(**OPTIONS))
    refuse_model(model)
    model._is_fsdp_managed_module = True
    with pytest.raises(ValueError, match="transformers has applied its FSDP"):
        refuse_model(model)
    del model._is_fsdp_managed_module
    model._tp_size = 2  # by tp_plan=, without the meshes of a DistributedConfig
    with pytest.raises(ValueError, match="load it with distributed_config="):
        refuse_model(model)
