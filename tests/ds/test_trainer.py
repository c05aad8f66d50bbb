"""Scripts of libraries that ask for DeepSpeed (transformers' trainers, Lightning), beside
themselves under DDP; and a loop under the command. Every feature of these libraries at every stage
is in the matrix of tools.

The Lightning module is a class here, since Lightning trains no other.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from ds.engines import served
from needed import skip_without
from on_ranks import on_ranks
from reference import built, differences
from zoo import tokens_of

skip_without("accelerate")
AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "steps_per_print": float("inf"),
}  # fmt: skip
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
SAVES = {"save_strategy": "steps", "save_steps": 2}


def ds(stage: int) -> dict[str, Any]:
    """A configuration as it stands in transformers' documentation, with "auto"."""
    return {**AUTO, "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}}


def tokens(rows: int = 64, words: int = 64) -> list[dict[str, Any]]:
    ids = [tokens_of(i, 1, 16, words)[0] for i in range(rows)]
    return [{"input_ids": row, "labels": row} for row in ids]


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """As in a process that a launcher has started, and that has run nothing yet."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    yield
    dist.barrier()


def saved_llama(folder: Path) -> None:
    import transformers as hf

    if dist.get_rank() == 0:
        config = hf.LlamaConfig(**LLAMA, vocab_size=64, tie_word_embeddings=True)
        built(lambda: hf.LlamaForCausalLM(config)).save_pretrained(folder / "model")
    dist.barrier()


def llama_of(folder: Path) -> Any:
    import transformers as hf

    return hf.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def trained(
    folder: Path, name: str, stage: int | None = None, *, resume: str | None = None, kinds: Any = None,
    make: Any = None, options: Any = None, **arguments: Any,
) -> tuple[Any, dict[str, list[float]]]:  # fmt: skip
    """A trainer after its run, and what it has logged; under DDP without a stage. The model of
    `folder` is saved as `folder`/of-`name`.
    """
    import transformers as hf

    trainer_kind, arguments_kind = kinds or (hf.Trainer, hf.TrainingArguments)
    with fresh():
        given = arguments_kind(
            output_dir=str(folder / name), use_cpu=True, per_device_train_batch_size=2, learning_rate=1e-2,
            logging_steps=1, report_to=[], disable_tqdm=True, seed=1, deepspeed=None if stage is None else ds(stage),
            **{"max_steps": 4, "save_strategy": "no", **arguments},
        )  # fmt: skip
        model = make() if make else llama_of(folder)
        torch.manual_seed(0)
        more = options or {"train_dataset": tokens(), "eval_dataset": tokens()}
        trainer = trainer_kind(model, given, **more)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(folder / f"of-{name}"))
    wanted = "DistributedDataParallel" if stage is None else "DeepSpeedEngine"
    assert type(trainer.model_wrapped).__name__ == wanted
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return trainer, {
        key: [row[key] for row in trainer.state.log_history if key in row] for key in names
    }


def same(ours: dict[str, list[float]], ddp: dict[str, list[float]], rel: float = 1e-6) -> None:
    assert len(ddp["loss"]) >= 4
    for key in ("loss", "grad_norm", "eval_loss"):
        assert ours[key] == pytest.approx(ddp[key], rel=rel), key


def same_model(folder: Path, ours: str, ddp: str) -> None:
    dist.barrier()
    mine, theirs = (load_file(folder / f"of-{n}" / "model.safetensors") for n in (ours, ddp))
    assert not differences(theirs, mine, 0, 1e-4)


# -- transformers' trainers ------------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_trainer_trains_saves_and_goes_on_as_under_ddp(folder: Path) -> None:
    served()
    saved_llama(folder)
    asks = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    _, ddp = trained(folder, "ddp", **asks)
    _, ours = trained(folder, "three", 3, **asks, **SAVES)
    same(ours, ddp)
    assert ours["learning_rate"] == ddp["learning_rate"]
    same_model(folder, "three", "ddp")
    _, again = trained(folder, "two", 2, resume=f"{folder}/three/checkpoint-2", **asks)
    assert again["loss"][-2:] == pytest.approx(ours["loss"][-2:], rel=1e-6)
    same_model(folder, "two", "three")


# -- Lightning -------------------------------------------------------------------------------------


# -- the command -----------------------------------------------------------------------------------

LOOP = """
import deepspeed, sys, torch
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64))
engine, *_ = deepspeed.initialize(model=model, config=config)
local = deepspeed.utils.safe_get_local_fp32_param
own = sum(local(p).numel() for p in engine.module.parameters())
losses = []
for _ in range(3):
    loss = engine(torch.ones(2, 4) * (engine.global_rank + 1)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open(f"{sys.argv[1]}-{engine.global_rank}", "w") as file:
    print(type(engine).__name__, own < 4000, losses[-1] < losses[0], file=file)
"""


def test_torchrun_starts_a_script_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "onefold.deepspeed", str(tmp_path / "train.py"), str(tmp_path / "said"),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("onefold serves the name deepspeed") == 1
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text() == "DeepSpeedEngine True True\n"
