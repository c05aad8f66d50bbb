"""Runs of Lightning's Trainer on two ranks: under DDP, and under onefold.lightning. What ranks call
by name.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from zoo import TinyGPT

VOCABULARY = 61


class Texts(Dataset[Tensor]):
    """Rows of tokens, each a function of its number."""

    def __init__(self, rows: int = 16) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randint(0, VOCABULARY, (rows, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Tuned(L.LightningModule):
    """A small GPT with AdamW and a schedule; remembers each loss."""

    def __init__(self, meta: bool = False, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters("meta")
        self.options, self.losses, self.evaluated = options, [], []
        self.model: nn.Module | None = None
        #: A parameter of the root itself, used by the step and by no submodule
        self.scale = nn.Parameter(torch.ones(1))
        if not meta:
            self.model = self._made()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def _made(self) -> nn.Module:
        torch.manual_seed(3)
        return TinyGPT(**self.options)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = self._made()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) * self.scale.sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self(batch)
        self.evaluated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def as_torchrun() -> None:
    """The environment that torchrun would give this rank: Lightning starts no processes then."""
    warnings.filterwarnings("ignore")
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "tests"}
    world = os.environ["WORLD_SIZE"]
    os.environ.update(names, GROUP_RANK="0", LOCAL_WORLD_SIZE=world)


def trainer(strategy: Any, folder: str, **options: Any) -> L.Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "strategy": strategy,
    }
    return L.Trainer(**{**given, **options})


def loader(rows: int = 16, size: int = 2) -> DataLoader[Tensor]:
    return DataLoader(Texts(rows), batch_size=size)


def strategy_of(given: Any) -> Any:
    if given == "ddp":
        return L.strategies.DDPStrategy()
    import onefold.lightning

    return onefold.lightning.Strategy(**given) if isinstance(given, dict) else given


def whole(module: L.LightningModule) -> dict[str, Tensor]:
    import onefold
    from onefold.runtime.hooks import is_sharded

    return onefold.full_state_dict(module) if is_sharded(module) else module.state_dict()


def runs(cases: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """What each case came to, by its name."""
    as_torchrun()
    out = {}
    for case in cases:
        case = dict(case)
        name = case.pop("name")
        out[name] = one(folder=str(Path(folder) / name), **case)
    return out


def one(
    strategy: Any,
    folder: str,
    module: dict[str, Any] | None = None,
    validate: bool = False,
    **options: Any,
) -> dict[str, Any]:
    tuned = Tuned(**(module or {}))
    if options.pop("scaled", False):  # Trainer(precision="16-mixed") takes bf16 on a CPU
        scaler = torch.amp.GradScaler("cpu")
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    used = trainer(strategy_of(strategy), folder, **options)
    used.fit(tuned, loader(), loader(4) if validate else None)
    weights = whole(tuned)
    return {
        "loss": tuned.losses,
        "val_loss": tuned.evaluated,
        "logged": {k: v.item() for k, v in used.logged_metrics.items()},
        "weights": {k: v.double() for k, v in weights.items()} if used.is_global_zero else {},
        "rate": used.optimizers[0].param_groups[0]["lr"],
    }


# -- checkpoints -----------------------------------------------------------------------------------


def fitted(
    strategy: Any, folder: str, epochs: int, path: str | None = None, **options: Any
) -> tuple[Tuned, L.Trainer]:
    tuned = Tuned(**options.pop("module", {}))
    used = trainer(strategy_of(strategy), folder, max_epochs=epochs, **options)
    # The same rows in a step on any number of ranks
    used.fit(tuned, loader(16, 4 // used.world_size), ckpt_path=path)
    return tuned, used


def saved(folder: str) -> dict[str, Any]:
    """Two epochs at once, and a checkpoint after the first, in each form."""
    as_torchrun()
    out: dict[str, Any] = {}
    for name, strategy in {
        "folder": {"stage": 3},
        "file": {"stage": 3, "checkpoint": "file"},
        "ddp": "ddp",
    }.items():
        keeps = L.callbacks.ModelCheckpoint(
            f"{folder}/{name}",
            filename="{epoch}",
            save_top_k=-1,
            save_last="link" if name == "folder" else None,
        )
        given = {"callbacks": [keeps], "enable_checkpointing": True}
        tuned, used = fitted(strategy, folder, 2, **given)
        out[name] = tuned.losses
        out[f"{name} last"] = used.checkpoint_callback.best_model_path
        used.save_checkpoint(f"{folder}/{name}/weights.ckpt", weights_only=True)
    return out


def resumed(folder: str) -> dict[str, Any]:
    """From each of them, at other stages; the second epoch's losses."""
    as_torchrun()
    out: dict[str, Any] = {}
    for name, strategy in {
        "folder": {"stage": 1},
        "file": {"stage": 3},
        "ddp": {"stage": 2, "checkpoint": "file"},
    }.items():
        path = f"{folder}/{name}/epoch=0.ckpt"
        tuned, used = fitted(strategy, folder, 2, path)
        out[name] = tuned.losses
        out[f"{name} steps"] = used.global_step
        # Evaluated by the weights of a checkpoint, on a module that was made without memory
        fresh = Tuned(meta=True)
        tests = trainer(strategy_of({"stage": 3}), folder)
        tests.test(fresh, loader(4), ckpt_path=f"{folder}/{name}/weights.ckpt", verbose=False)
        out[f"{name} tested"] = fresh.evaluated
    tuned, used = fitted("ddp", folder, 2, f"{folder}/file/epoch=0.ckpt")
    out["by ddp"] = tuned.losses
    return out
