"""DeepSpeed's warm-up schedules, for any torch optimizer, with DeepSpeed's rates.

The iteration is -1 when a schedule is made and 0 after the first `step()`, so the first optimizer
step runs at the rate of iteration -1.

| name           | rate at iteration i                                                                     |
|----------------|-----------------------------------------------------------------------------------------|
| WarmupLR       | min + (max - min) x rise(i), then max                                                   |
| WarmupDecayLR  | as WarmupLR, but falls linearly from max to 0 at `total_num_steps`                      |
| WarmupCosineLR | the optimizer's rate x rise, then x a half cosine down to `cos_min_ratio`               |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["VALID_LR_SCHEDULES", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
logger = logging.getLogger("onefold")
Several = float | Sequence[float]


class WarmupLR:
    """The schedules' methods are those that DeepSpeed's and torch's schedules share.

    Attributes:
        min_lrs, max_lrs: the lowest and the highest rate of each group.

    Args:
        optimizer: the optimizer whose parameter groups get the rates.
        warmup_max_lr: None takes the rates that the groups have.
        last_batch_iteration: the iteration to resume at. -1 starts anew, and sets the rates of
            iteration -1 at once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Several = 0.0,
        warmup_max_lr: Several | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs: Sequence[float] = self._each(warmup_min_lr)
        self.max_lrs: Sequence[float] = own
        if warmup_max_lr is not None:
            self.max_lrs = self._each(warmup_max_lr)
            if not isinstance(warmup_max_lr, Sequence) and len(set(own)) > 1:  # as in DeepSpeed
                logger.warning(
                    "scheduler.params.warmup_max_lr is one rate, %s, for parameter groups whose own"
                    " rates %s it replaces: write one each, or use WarmupLR without it, which takes"
                    " their own.",
                    warmup_max_lr,
                    ", ".join(f"{rate:g}" for rate in own),
                )
        whole = isinstance(warmup_num_steps, (int, float)) and warmup_num_steps % 1 == 0
        if not whole or warmup_num_steps < 0:
            raise ValueError(
                f"scheduler.params.warmup_num_steps={warmup_num_steps!r}: expected a whole number, 0"
                " or more."
            )
        # 2 steps or more, and "log" for any other type, as in DeepSpeed
        self.warmup_num_steps = max(2, int(warmup_num_steps))
        self.warmup_type = "linear" if warmup_type == "linear" else "log"
        if warmup_type != self.warmup_type:
            logger.warning(
                "warmup_type=%r: expected 'log' or 'linear'; it counts as 'log'.", warmup_type
            )
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def share(self, i: int) -> float:
        """Return the place between the lowest and the highest rate at an iteration from 0 on."""
        return self.rise(i) if i < self.warmup_num_steps else 1.0

    def rise(self, i: int) -> float:
        steps = self.warmup_num_steps
        # rounded as DeepSpeed rounds it
        return 1.0 / math.log(steps) * math.log(i + 1) if self.warmup_type == "log" else i / steps

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and set the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        i = self.last_batch_iteration
        share = 0.0 if i < 0 else self.share(i)
        return [a + (b - a) * share for a, b in zip(self.min_lrs, self.max_lrs, strict=True)]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step(int(state["last_batch_iteration"]))

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, value: Several) -> Sequence[float]:
        """Return one value for each parameter group."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(
                f"a schedule's param has {len(value)} values for {groups} parameter groups: write"
                " one each."
            )
        return value


class WarmupDecayLR(WarmupLR):
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Several = 0.0,
        warmup_max_lr: Several = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        warmup = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, *warmup, last_batch_iteration)

    def share(self, i: int) -> float:
        steps = self.warmup_num_steps
        left = (self.total - i) / max(1.0, self.total - steps)
        return self.rise(i) if i < steps else max(0.0, left)


class WarmupCosineLR(WarmupLR):
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total, self.low, self.least = total_num_steps, warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def share(self, i: int) -> float:
        steps = self.warmup_num_steps
        if i < steps:
            return self.low + (1.0 - self.low) * self.rise(i)
        progress = min(1.0, (i - steps + 1) / max(1, self.total - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.least + (1.0 - self.least) * cosine)


SCHEDULES: Mapping[str, type[WarmupLR]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)  # accelerate reads it
