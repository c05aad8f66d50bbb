"""What onefold.lightning does besides its losses: each check gives the sentences of what is wrong.
Called by name on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning_trials import Tuned, as_torchrun, loader, one, strategy_of, trainer
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onefold
import onefold.lightning
from onefold.runtime.hooks import engine_of, is_sharded


class Wrong(list[str]):
    """What is wrong."""

    def unless(self, holds: bool, what: str) -> None:
        if not holds:
            self.append(what)

    def refused(self, call: Callable[[], Any], *words: str) -> None:
        try:
            call()
        except ValueError as error:
            missing = [word for word in words if word not in str(error)]
            self.unless(not missing, f"{error!s} lacks {missing}")
        else:
            self.append(f"nobody refused what should say {words}")


class Pair(L.LightningModule):
    """Two nets with an optimizer each, in turn, by hand: a generator and its judge."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.maker = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7))
        self.judge = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        x = batch[:, :6].float() / 61
        last = batch_idx % 2 == 1
        with makes.toggle_model(sync_grad=last):
            loss = self.judge(self.maker(x)).square().mean()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            if last:
                makes.step()
                makes.zero_grad()
        with judges.toggle_model(sync_grad=last):
            loss = (self.judge(self.maker(x).detach()) - 1).square().mean()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            if last:
                self.clip_gradients(judges, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                judges.step()
                judges.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.maker, self.judge)]


def all_of_it(folder: str) -> dict[str, list[str]]:
    """What is wrong, by check."""
    return {
        check.__name__: check(f"{folder}/{check.__name__}") for check in (by_hand, named, around)
    }


def by_hand(folder: str) -> list[str]:
    """Two optimizers in turn, by manual optimization with accumulation, as under DDP."""
    as_torchrun()
    wrong, seen = Wrong(), {}
    ddp = "ddp_find_unused_parameters_true"
    for strategy in (ddp, {"stage": 1}, {"stage": 2}, {"stage": 3}):
        pair = Pair()
        used = trainer(strategy_of(strategy), folder)
        used.fit(pair, loader())
        seen[str(strategy)] = pair.losses
        if strategy == {"stage": 3}:
            used.save_checkpoint(f"{folder}/pair.ckpt")
            again = trainer(strategy_of(strategy), folder, max_epochs=2)
            again.fit(Pair(), loader(), ckpt_path=f"{folder}/pair.ckpt")
            wrong.unless(len(again.optimizers[1].state) == 4, "a judge without states was resumed")
    expected = torch.tensor(seen.pop(ddp))
    wrong.unless(len(expected) == 8, f"{len(expected)} losses")
    for name, losses in seen.items():
        far = (torch.tensor(losses) - expected).abs().max().item()
        wrong.unless(far < 1e-6, f"{name}: {losses} instead of {expected.tolist()}")
    return wrong


class Averaging(L.Callback):
    """torch's average of the weights, as people write it for DDP."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if not hasattr(self, "average"):
            self.average = AveragedModel(pl_module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.average.update_parameters(pl_module)


def around(folder: str) -> list[str]:
    """Loops, figures, callbacks, collectives, models without memory."""
    as_torchrun()
    wrong = Wrong()
    _loops(wrong, folder)
    _average(wrong, folder)
    _clipped_by_value(wrong, folder)
    _refusals(wrong, folder)
    return wrong


def _loops(wrong: Wrong, folder: str) -> None:
    strategy, logger = onefold.lightning.Strategy(stage=3), CSVLogger(folder)
    best = ModelCheckpoint(f"{folder}/best", filename="{step}", monitor="val_loss", save_top_k=1)
    used = trainer(
        strategy, folder, logger=logger, log_every_n_steps=2, val_check_interval=2,
        callbacks=[best], enable_checkpointing=True, max_epochs=2, enable_model_summary=True,
    )  # fmt: skip
    with used.init_module(empty_init=True):
        tuned = Tuned()
    wrong.unless(all(p.is_meta for p in tuned.parameters()), "init_module(empty_init) took memory")
    used.validate(tuned, loader(4), verbose=False)
    wrong.unless(is_sharded(tuned), "validate() did not shard")
    held = sum({s.data_ptr(): s.nbytes() for s in map(_storage, tuned.parameters())}.values())
    whole = sum(p.numel() * 4 for p in tuned.parameters())
    wrong.unless(held < 0.6 * whole, f"a rank holds {held} of {whole} bytes at stage 3")
    used.fit(tuned, loader(), loader(4))
    wrong.unless(used.global_step == 8, f"{used.global_step} steps")
    kept = sorted(path.name for path in Path(f"{folder}/best").iterdir())
    alone = len(kept) == 1 and kept[0].endswith(".ckpt")
    wrong.unless(alone or not used.is_global_zero, f"save_top_k=1 kept {kept}")  # it removes
    before = [used.callback_metrics["val_loss"].item()]
    used.test(tuned, loader(4), ckpt_path="best", verbose=False)
    best_loss = used.callback_metrics["val_loss"].item()
    wrong.unless(abs(best_loss - best.best_model_score.item()) < 1e-6, f"best is not {before}")
    told = used.predict(tuned, loader(4))
    wrong.unless(told is not None and len(told) == 1 and told[0].ndim == 0, f"predicted {told}")
    used.fit(tuned, loader(), loader(4))  # max_epochs is reached: nothing happens
    wrong.unless(used.global_step == 8, "a second fit went on")
    if used.is_global_zero:
        text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        head, rows = text[0].split(","), [line.split(",") for line in text[1:]]
        for name in ("wire_bytes", "memory_bytes", "memory_peak_bytes", "wire_wait_ms"):
            at = head.index(f"onefold/{name}") if f"onefold/{name}" in head else None
            values = [float(row[at]) for row in rows if at is not None and row[at]]
            wrong.unless(len(values) == 4 and values[-1] > 0, f"{name}: {values}")
        sent = [float(r[head.index("onefold/wire_bytes")]) for r in rows if r[head.index("onefold/wire_bytes")]]  # fmt: skip
        most = 4 * whole / 2  # three times half of the model, and the losses that are logged
        wrong.unless(whole / 2 < sent[-1] < most, f"{sent} bytes a step of {whole}")
    rank = used.global_rank
    wrong.unless(strategy.broadcast(f"from {rank}") == "from 0", "broadcast")
    summed = strategy.reduce(torch.tensor(float(rank + 1)), reduce_op="sum").item()
    wrong.unless(summed == 3.0, f"reduce gave {summed}")
    strategy.barrier("here")
    strategy.root_device  # noqa: B018
    wrong.unless(strategy.reduce_boolean_decision(rank == 0, all=False), "any")


def _storage(p: Tensor) -> torch.UntypedStorage:
    return p.untyped_storage()


def _average(wrong: Wrong, folder: str) -> None:
    """EMA, beside torch's under DDP; and through a checkpoint."""
    theirs, plain = Averaging(), Tuned()
    used = trainer(L.strategies.DDPStrategy(), folder, callbacks=[theirs], max_epochs=2)
    used.fit(plain, loader())
    expected = theirs.average.module.state_dict()
    for form in ("folder", "file"):
        ema, tuned = onefold.lightning.EMA(decay=0.5), Tuned()
        made = onefold.lightning.Strategy(stage=3, checkpoint=form)
        path = f"{folder}/average {form}.ckpt"
        saves = ModelCheckpoint(folder, filename=f"average {form}")
        used = trainer(made, folder, callbacks=[ema, saves], enable_checkpointing=True)
        used.fit(tuned, loader())
        again, tuned = onefold.lightning.EMA(decay=0.5), Tuned()
        used = trainer(strategy_of({"stage": 2}), folder, callbacks=[again], max_epochs=2)
        used.fit(tuned, loader(), loader(4), ckpt_path=path)
        state = onefold.full_state_dict(tuned)  # the averages, once it has ended
        if used.is_global_zero:
            far = max((state[k] - expected[k]).abs().max().item() for k in expected)
            wrong.unless(far < 1e-6, f"EMA through a {form} is {far} from torch's")


def _clipped_by_value(wrong: Wrong, folder: str) -> None:
    seen = [
        one(strategy, folder, gradient_clip_val=1e-3, gradient_clip_algorithm="value")["loss"]
        for strategy in ("ddp", {"stage": 3})
    ]
    wrong.unless(seen[0] == seen[1], f"clipped by value: {seen}")


def _refusals(wrong: Wrong, folder: str) -> None:
    made = onefold.lightning.Strategy

    def fit(strategy: Any, tuned: Any = None, **options: Any) -> None:
        trainer(strategy, folder, **options).fit(tuned or Tuned(), loader())

    wrong.refused(lambda: made(), "no recipe", "stage=3")
    wrong.refused(lambda: made(3), "Recipe.zero", "Strategy(stage=3)")
    wrong.refused(lambda: made(onefold.Recipe.zero(2), stage=3), "besides", "stage=3")
    wrong.refused(lambda: made(stage=3, checkpoint="one"), "'one'", '"file"')
    wrong.refused(lambda: made(stage=3, start_method="spawn"), "'spawn'", "torchrun")
    swa = StochasticWeightAveraging(swa_lrs=1e-2)
    wrong.refused(lambda: fit(made(stage=3), callbacks=[swa]), "StochasticWeight", "EMA")
    plugin = AsyncCheckpointIO()
    wrong.refused(lambda: fit(made(stage=3), plugins=[plugin]), "AsyncCheckpointIO", "file")
    narrow = made(stage=3, precision="bf16")
    wrong.refused(lambda: fit(narrow, precision="bf16-mixed"), "autocast", "bfloat16")
    wrong.refused(lambda: fit(made(stage=3), precision="16-true"), "16-mixed")
    wrong.refused(lambda: fit(made(stage=3, precision="fp16"), precision="bf16-true"), "float16")
    named = L.plugins.precision.Precision
    other = type("Other", (named,), {"precision": "other"})
    wrong.refused(lambda: fit(made(stage=3), plugins=[other()]), "Other", "32-true")
    tuned = Tuned()
    fit(made(stage=3), tuned)
    wrong.refused(lambda: fit(made(stage=2), tuned), "another recipe", "ckpt_path")
    # The Trainer that has one knows what it holds; the hook is the user's
    tuned.on_save_checkpoint = lambda checkpoint: checkpoint["state_dict"].update(x=1)
    wrong.refused(lambda: tuned.trainer.save_checkpoint(f"{folder}/no.ckpt"), "on_save", "file")
    onefold.save(f"{folder}/bare", model=tuned)
    again = trainer(made(stage=3), folder)
    wrong.refused(
        lambda: again.fit(Tuned(), loader(), ckpt_path=f"{folder}/bare"),
        "lightning.pt",
        "onefold.load",
    )
    wrong.refused(lambda: tuned.trainer.save_checkpoint("s3://bucket/x.ckpt"), "s3://", "file")


def named(folder: str) -> list[str]:
    """By the names that importing onefold.lightning registers."""
    as_torchrun()
    wrong, seen = Wrong(), {}
    for name in (
        "onefold",
        "onefold_stage_1",
        "onefold_stage_2_offload",
        "onefold_stage_3_offload",
    ):
        tuned = Tuned()
        used = trainer(name, folder)
        used.fit(tuned, loader())
        seen[name] = tuned.losses
        stage = 3 if name == "onefold" else int(name.split("_")[2])
        expected = onefold.Recipe.zero(stage, offload_optimizer="cpu" if "off" in name else None)
        wrong.unless(engine_of(tuned).recipe == expected, f"{name} is {engine_of(tuned).recipe}")
    for name, losses in seen.items():
        wrong.unless(losses == seen["onefold"], f"{name}: {losses}")
    return wrong
