"""Runs of Lightning's Trainer on the ranks of a test. A LightningModule is a class of this file, as
Lightning trains no other.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from onefold.runtime.hooks import is_sharded
from others.runs import Seen, launched
from reference import built, weights
from zoo import TinyGPT, tokens_of

_numbers = itertools.count()


class Tuned(L.LightningModule):
    """A small GPT with AdamW and a schedule; remembers each loss."""

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.model: nn.Module | None = None
        #: A parameter of the root itself, used by the step and by no submodule
        self.scale = nn.Parameter(torch.ones(1))
        if not meta:
            self.model = built(TinyGPT, 3)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = built(TinyGPT, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.model is not None
        return self.model(tokens) * self.scale.sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
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


def loader(rows: int = 16, size: int = 2) -> DataLoader[Any]:
    return DataLoader([tokens_of(i, 1)[0] for i in range(rows)], batch_size=size)


def trainer(strategy: Any, folder: Path, **options: Any) -> L.Trainer:
    """`strategy`: Lightning's, or arguments of Onefold's."""
    launched()
    warnings.filterwarnings("ignore")
    if isinstance(strategy, dict):
        import onefold.lightning

        strategy = onefold.lightning.Strategy(**strategy)
    given = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": str(folder / f"lit-{next(_numbers)}"), "strategy": strategy,
    }  # fmt: skip
    return L.Trainer(**{**given, **options})


def fitted(
    folder: Path, strategy: Any, path: Any = None, validate: bool = False, module: Any = None,
    **options: Any,
) -> Seen:  # fmt: skip
    """One run; four steps an epoch on any number of ranks."""
    tuned, used = module or Tuned(), trainer(strategy, folder, **options)
    rows = loader(16, 4 // used.world_size)
    used.fit(tuned, rows, loader(4) if validate else None, ckpt_path=path and str(path))
    rates = [used.optimizers[0].param_groups[0]["lr"]]
    whole = weights(tuned) if is_sharded(tuned) else tuned.state_dict()
    if options.get("precision") == "bf16-true" or not isinstance(strategy, (dict, str)):
        whole = {}
    return Seen(tuned.losses, tuned.evaluated, rates, [], whole, used)


def deepspeeds(**options: Any) -> Any:
    """Lightning's DeepSpeedStrategy without its question for CUDA."""
    from lightning.fabric.utilities.seed import reset_seed

    class OnHost(L.strategies.DeepSpeedStrategy):
        def setup_environment(self) -> None:
            L.strategies.ParallelStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    return OnHost(**options)
