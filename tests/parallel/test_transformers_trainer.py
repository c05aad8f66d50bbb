"""`onefold.hf.Trainer` on a model that transformers has parallelized: the same as one process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import tokens_of
from ranks import run_ranks

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


def trained(folder: Path, kind: str, sizes: dict[str, int] | None, stage: int) -> dict[str, Any]:
    """Train three steps of 8 samples with accumulation of 2; without `sizes` in one process."""
    import transformers
    from accelerate import ParallelismConfig
    from transformers.distributed import DistributedConfig

    import onefold
    import onefold.hf

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
    data_ranks = sizes["fsdp_size"] if sizes else 1
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
    }
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    if sizes is None:
        model = model_class.from_pretrained(folder, dtype=torch.float32)
        trainer: Any = transformers.Trainer(
            model, transformers.TrainingArguments(**args), train_dataset=samples()
        )
    else:
        model = onefold.hf.from_pretrained(
            folder, model_class, torch.float32, distributed_config=DistributedConfig(**sizes)
        )
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        trainer = onefold.hf.Trainer(
            model, transformers.TrainingArguments(**args), train_dataset=samples(), recipe=recipe
        )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs],
        "norms": [float(log["grad_norm"]) for log in logs],
        "weights": onefold.full_state_dict(trainer.model) if sizes else dict(model.state_dict()),
    }


CASES = {
    "Qwen3, tp 2": ("Qwen3", {"fsdp_size": 1, "tp_size": 2}),
    "Qwen3, fsdp 2 and tp 2": ("Qwen3", {"fsdp_size": 2, "tp_size": 2}),
    "Qwen3-MoE, fsdp 2, tp 2, ep 4": ("Qwen3Moe", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_trainer_on_a_parallelized_model_trains_as_one_process(name: str, tmp_path: Path) -> None:
    import transformers

    kind, sizes = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(MOE if "Moe" in kind else OPTIONS))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.save_pretrained(tmp_path)
    expected = run_ranks(1, trained, tmp_path, kind, None, 0)[0]
    ranks = sizes["fsdp_size"] * sizes["tp_size"]
    for stage in (1, 3):
        for seen in run_ranks(ranks, trained, tmp_path, kind, sizes, stage):
            for what in ("losses", "norms"):
                assert seen[what] == pytest.approx(expected[what], rel=1e-3), (what, seen, expected)
            for key, value in seen["weights"].items():
                torch.testing.assert_close(value, expected["weights"][key], rtol=1e-4, atol=1e-4)


def test_what_a_trainer_cannot_do_with_a_parallelized_model_is_told(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    import onefold.hf
    from onefold.integrations.hf.refusals import refuse_model

    pipeline = DistributedConfig(tp_size=2, pp_size=2)
    with pytest.raises(ValueError, match="pp_size=2: transformers' pipelines do not train"):
        onefold.hf.from_pretrained(tmp_path, distributed_config=pipeline)
    alone = {"fsdp_size": 2, "ep_size": 2}
    with pytest.raises(ValueError, match="ep_size=2 without tp_size"):
        onefold.hf.from_pretrained(tmp_path, distributed_config=alone)
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
