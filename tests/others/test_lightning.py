"""onefold.lightning.Strategy beside Lightning's DDPStrategy; and Lightning's own DeepSpeedStrategy
with the name deepspeed served.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import looks
from needed import skip_without
from on_ranks import on_ranks, slow
from others.matrix import TOOLS, check
from ranks import absolute_path
from reference import on_each_rank

skip_without("lightning")
SERVER = "libraries"
# Lightning takes seconds to import, so ranks do it and not this module: all workers collect it


@on_ranks(2)
@pytest.mark.parametrize(
    "feature",
    [f if "validation" in f else pytest.param(f, marks=slow) for f in TOOLS["lightning"].features],
)
def test_every_stage_trains_as_ddp_does(feature: str, folder: Path) -> None:
    check("lightning", feature, folder)


@slow
@on_ranks(2, server="served")
@pytest.mark.parametrize("feature", TOOLS["lightning by name"].features)
def test_every_stage_of_deepspeeds_strategy_trains_as_ddp_does(feature: str, folder: Path) -> None:
    check("lightning by name", feature, folder)


def kept(folder: Path, name: str, strategy: Any) -> tuple[list[float], Path]:
    """The losses of two epochs, and the folder of their checkpoints."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from others.lit import fitted

    link = "link" if name == "folder" else None
    keeps = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1, save_last=link)
    options = {"callbacks": [keeps], "enable_checkpointing": True, "max_epochs": 2}
    run = fitted(folder, strategy, **options)
    run.trainer.save_checkpoint(folder / name / "weights.ckpt", weights_only=True)
    return run.losses, folder / name


@slow
@on_ranks(2)
def test_checkpoints_go_on_at_other_stages_and_by_ddp(folder: Path) -> None:
    """A folder of shards, and DDP's own file."""
    from others.lit import Tuned, fitted, loader, trainer

    saves = {"folder": {"stage": 3}, "ddp": "ddp"}
    losses, places = zip(*(kept(folder, *save) for save in saves.items()), strict=True)
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert (places[0] / "epoch=0.ckpt" / "rank-00001.safetensors").exists()
    assert (places[0] / "last.ckpt").resolve().name == "epoch=1.ckpt"
    tested = []
    for place, strategy in zip(places, ({"stage": 1}, {"stage": 2}), strict=True):
        again = fitted(folder, strategy, place / "epoch=0.ckpt", max_epochs=2)
        assert again.losses == losses[0][4:] and again.trainer.global_step == 8
        # Evaluated by the weights of a checkpoint, on a module that was made without memory
        fresh, path = Tuned(meta=True), str(place / "weights.ckpt")
        trainer({"stage": 3}, folder).test(fresh, loader(4), ckpt_path=path, verbose=False)
        tested.append(fresh.evaluated)
    assert tested[0] == tested[1]


@slow
@on_ranks(2)
def test_its_loops_callbacks_and_models_without_memory(folder: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from others.lit import Tuned, fitted, loader, trainer

    best = ModelCheckpoint(folder / "best", filename="{step}", monitor="val_loss", save_top_k=1)
    used = trainer(
        {"stage": 3}, folder, val_check_interval=2, callbacks=[best],
        enable_checkpointing=True, max_epochs=2, enable_model_summary=True,
    )  # fmt: skip
    with used.init_module(empty_init=True):
        tuned = Tuned()
    assert all(p.is_meta for p in tuned.parameters())
    used.validate(tuned, loader(4), verbose=False)
    nbytes = 4 * sum(p.numel() for p in tuned.parameters())
    assert sum(looks.held(tuned)["device"].values()) < 0.6 * nbytes
    used.fit(tuned, loader(), loader(4))
    assert used.global_step == 8
    dist.barrier()
    assert [path.suffix for path in (folder / "best").iterdir()] == [".ckpt"]
    used.test(tuned, loader(4), ckpt_path="best", verbose=False)
    score = used.callback_metrics["val_loss"].item()
    assert score == pytest.approx(best.best_model_score.item(), abs=1e-6)
    (told,) = used.predict(tuned, loader(4))
    assert told.ndim == 0
    used.fit(tuned, loader(), loader(4))  # max_epochs is reached: nothing happens
    assert used.global_step == 8
    strategy = used.strategy
    assert strategy.broadcast(f"from {used.global_rank}") == "from 0"
    assert strategy.reduce(torch.tensor(used.global_rank + 1.0), reduce_op="sum").item() == 3.0
    assert strategy.reduce_boolean_decision(used.global_rank == 0, all=False)
    plain = Tuned()
    plain.to = lambda *where: pytest.fail(
        f"all of the model moved to {where} before it was divided"
    )
    fitted(folder, {"stage": 3}, module=plain)


@slow
@on_ranks(2)
def test_two_optimizers_in_turn_by_hand_train_as_under_ddp(folder: Path) -> None:
    import lightning.pytorch as L

    from others.lit import loader, trainer
    from zoo import TinyMLP

    class Pair(L.LightningModule):
        """A generator and its judge."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.maker, self.judge = TinyMLP(6, 5, 1, 7), TinyMLP(7, 5, 1, 1)
            self.losses: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            x, last = batch[:, :6].float() / 61, batch_idx % 2 == 1
            for i, (optimizer, target) in enumerate(zip(self.optimizers(), (0, 1), strict=True)):
                with optimizer.toggle_model(sync_grad=last):
                    made = self.maker(x)
                    loss = (self.judge(made if i == 0 else made.detach()) - target).square().mean()
                    self.manual_backward(loss)
                    self.losses.append(loss.item())
                    if last:
                        if i == 1:
                            self.clip_gradients(optimizer, 0.5, "norm")
                        optimizer.step()
                        optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (self.maker, self.judge)]

    found: list[list[float]] = []
    for strategy in ("ddp_find_unused_parameters_true", *({"stage": s} for s in (1, 2, 3))):
        pair, used = Pair(), trainer(strategy, folder)
        used.fit(pair, loader())
        found.append(pair.losses)
    assert len(found[0]) == 8
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-6)
    used.save_checkpoint(folder / "pair.ckpt")
    again = trainer({"stage": 3}, folder, max_epochs=2)
    again.fit(Pair(), loader(), ckpt_path=str(folder / "pair.ckpt"))
    assert again.optimizers[1].state, "a judge without states was resumed"


@slow
@on_ranks(2)
def test_what_cannot_be_is_refused_in_words(folder: Path) -> None:
    import lightning.pytorch as L
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    import onefold.lightning
    from others.lit import Tuned, fitted, loader, trainer

    made, named = onefold.lightning.Strategy, L.plugins.precision.Precision
    other = type("Other", (named,), {"precision": "other"})
    swa = L.callbacks.StochasticWeightAveraging(swa_lrs=1e-2)
    three = {"stage": 3}
    tuned = Tuned()
    fitted(folder, three, module=tuned)
    onefold.save(folder / "bare", model=tuned)

    def saves(place: str) -> None:
        # The Trainer that has it knows what it holds; the hook is the user's
        tuned.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].update(x=1)
        tuned.trainer.save_checkpoint(place)

    for words, call in {
        "recipe=None.*stage=3": lambda: made(),
        r"Strategy\(stage=3\)": lambda: made(3),
        "besides": lambda: made(onefold.Recipe.zero(2), stage=3),
        "checkpoint": lambda: made(stage=3, checkpoint="file"),
        "'spawn'": lambda: made(stage=3, start_method="spawn"),
        "StochasticWeight": lambda: fitted(folder, three, callbacks=[swa]),
        "AsyncCheckpointIO": lambda: fitted(folder, three, plugins=[AsyncCheckpointIO()]),
        "autocast": lambda: fitted(folder, {"stage": 3, "precision": "bf16"}, precision="bf16-mixed"),
        "16-mixed": lambda: fitted(folder, three, precision="16-true"),
        "float16": lambda: fitted(folder, {"stage": 3, "precision": "fp16"}, precision="bf16-true"),
        "Other": lambda: fitted(folder, three, plugins=[other()]),
        "another recipe": lambda: trainer({"stage": 2}, folder).fit(tuned, loader()),
        "on_save": lambda: saves(f"{folder}/no.ckpt"),
        "lightning.pt": lambda: fitted(folder, three, folder / "bare"),
        "s3://": lambda: tuned.trainer.save_checkpoint("s3://bucket/x.ckpt"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"(?s){words}"):
            call()
    assert on_each_rank("all refused") == ["all refused"] * 2


@slow
@on_ranks(2)
def test_the_pages_callback_evaluates_averages(folder: Path) -> None:
    from others.lit import fitted

    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    block = re.search(r'```python title="Lightning"\n(.*?)```', page, re.DOTALL)
    assert block is not None
    made: dict[str, Any] = {}
    exec(block[1], made)
    averages = made["Averages"]()
    plain = fitted(folder, {"stage": 3}, validate=True)
    averaged = fitted(folder, {"stage": 3}, validate=True, callbacks=[averages])
    assert averaged.losses == plain.losses and averaged.evaluated != plain.evaluated


@slow
def test_the_example_runs_in_ranks_that_lightning_starts(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "lightning_gpt.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": absolute_path()},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("30 steps, loss ") and f"28 tensors in {tmp_path}" in said, done.stdout
    names = {path.name for path in (tmp_path / "last.ckpt").iterdir()}
    assert {f"rank-{rank:05}.safetensors" for rank in range(2)} <= names
