"""A callback that averages weights. The averages are sharded as the model is."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import onefold
from onefold.ema import EMA as Average
from onefold.runtime.hooks import is_sharded


class EMA(Callback):
    """Average the weights after each optimizer step, and run validation on the averages.

    A checkpoint of the Trainer has the whole averages, which are gathered in rank 0's host memory.

    Args:
        decay: the decay of the average for each step; None weighs all steps equally.
        keep: whether the averages become the module's weights at the end of the fit.

    Raises:
        ValueError: the module is not sharded by Onefold; raised when the fit starts.
    """

    def __init__(self, decay: float | None = 0.999, keep: bool = True) -> None:
        self.decay, self.keep = decay, keep
        self.average: Average | None = None
        self._applied = contextlib.ExitStack()
        self._seen = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not is_sharded(pl_module):
            raise ValueError(
                "onefold.lightning.EMA averages a module that Onefold shards: use it with"
                " Trainer(strategy=onefold.lightning.Strategy(stage=3))."
            )
        self.average, self._seen = Average(pl_module, self.decay), trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self._seen and self.average is not None:
            self.average.update()
            self._seen = trainer.global_step

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if self.average is not None and not trainer.sanity_checking:
            self._applied.enter_context(self.average.applied())

    def on_validation_end(self, *_: Any) -> None:
        self._applied.close()

    def on_exception(self, *_: Any) -> None:
        self._applied.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average is None:
            return
        if self.keep:
            with self.average.applied():
                state = onefold.full_state_dict(pl_module)
            onefold.load_full_state_dict(pl_module, state)
        self.average = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else {"average": self.average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.average is not None and "average" in state_dict:
            self.average.load_state_dict(state_dict["average"])
