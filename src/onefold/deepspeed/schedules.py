"""DeepSpeed's five learning-rate schedules, for any torch optimizer, with DeepSpeed's rates.

The iteration is -1 when a schedule is made and 0 after the first `step()`, so the first optimizer
step runs at the rate of iteration -1.

| name           | rate at iteration i                                                                     |
|----------------|-----------------------------------------------------------------------------------------|
| WarmupLR       | min + (max - min) x rise(i), then max                                                   |
| WarmupDecayLR  | as WarmupLR, but falls linearly from max to 0 at `total_num_steps`                      |
| WarmupCosineLR | the optimizer's rate x rise, then x a half cosine down to `cos_min_ratio`               |
| OneCycle       | up from min to max and down again, then decays; momentum goes the other way             |
| LRRangeTest    | grows by `step_rate` every `step_size` iterations (Smith 2018, arXiv:1803.09820)        |
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

logger = logging.getLogger("onefold")
Several = float | Sequence[float]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


class Schedule:
    """A schedule with the methods that DeepSpeed's and torch's schedules share.

    Attributes:
        min_lrs, max_lrs: the lowest and the highest rate of each group, where the schedule has them.
        warmup_num_steps, warmup_type: of a warm-up; 0 and "" otherwise.

    Args:
        optimizer: the optimizer whose parameter groups get the rates.
        last_batch_iteration: the iteration to resume at. -1 starts anew, and sets the rates of
            iteration -1 at once.
    """

    min_lrs: Sequence[float] = ()
    max_lrs: Sequence[float] = ()
    warmup_num_steps, warmup_type = 0, ""

    optimizer: torch.optim.Optimizer
    last_batch_iteration: int

    def _begin(self, last_batch_iteration: int) -> None:
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def rates(self, i: int) -> Sequence[float]:
        """Return the rate of each parameter group at iteration `i`."""
        raise NotImplementedError

    def betas(self, i: int) -> list[tuple[float, float]] | None:
        """Return the betas of each group; None leaves them unchanged."""
        return None

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and set the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        return list(self.rates(self.last_batch_iteration))

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step(int(state["last_batch_iteration"]))

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        betas = self.betas(self.last_batch_iteration)
        for group, pair in zip(groups, betas, strict=True) if betas is not None else ():
            group["betas"] = pair

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

    def _own(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _highest(self, name: str, value: Several) -> Sequence[float]:
        if not isinstance(value, Sequence) and len(set(self._own())) > 1:  # as in DeepSpeed
            logger.warning(
                "scheduler.params.%s is one rate, %s, for parameter groups whose own rates %s it"
                " replaces: write one each, or use WarmupLR without it, which takes their own.",
                name,
                value,
                ", ".join(f"{rate:g}" for rate in self._own()),
            )
        return self._each(value)


def _whole(name: str, value: float, low: int) -> int:
    if not isinstance(value, (int, float)) or value != int(value) or value < low:
        raise ValueError(
            f"scheduler.params.{name}={value!r}: expected a whole number, {low} or more."
        )
    return int(value)


class WarmupLR(Schedule):
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
        self.min_lrs, self.max_lrs = self._each(warmup_min_lr), self._own()
        if warmup_max_lr is not None:
            self.max_lrs = self._highest("warmup_max_lr", warmup_max_lr)
        self._warm(warmup_num_steps, warmup_type)
        self._begin(last_batch_iteration)

    def _warm(self, steps: int, kind: str) -> None:
        # 2 steps or more, and "log" for any other type, as in DeepSpeed
        self.warmup_num_steps = max(2, _whole("warmup_num_steps", steps, 0))
        self.warmup_type = kind if kind == "linear" else "log"
        if kind != self.warmup_type:
            logger.warning("warmup_type=%r: expected 'log' or 'linear'; it counts as 'log'.", kind)

    def rise(self, i: int) -> float:
        steps = self.warmup_num_steps
        # rounded as DeepSpeed rounds it
        return 1.0 / math.log(steps) * math.log(i + 1) if self.warmup_type == "log" else i / steps

    def share(self, i: int) -> float:
        """Return the place between the lowest and the highest rate at an iteration from 0 on."""
        return self.rise(i) if i < self.warmup_num_steps else 1.0

    def rates(self, i: int) -> Sequence[float]:
        if i < 0:
            return self.min_lrs
        share = self.share(i)
        return [a + (b - a) * share for a, b in zip(self.min_lrs, self.max_lrs, strict=True)]


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
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

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
        self.optimizer = optimizer
        self.max_lrs, self.total = self._own(), total_num_steps
        self.low, self.least = warmup_min_ratio, cos_min_ratio
        self._warm(warmup_num_steps, warmup_type)
        self._begin(last_batch_iteration)

    def share(self, i: int) -> float:
        steps = self.warmup_num_steps
        if i < steps:
            return self.low + (1.0 - self.low) * self.rise(i)
        progress = min(1.0, (i - steps + 1) / max(1, self.total - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.least + (1.0 - self.least) * cosine)

    def rates(self, i: int) -> Sequence[float]:
        share = 0.0 if i < 0 else self.share(i)
        return [rate * share for rate in self.max_lrs]


class OneCycle(Schedule):
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Several,
        cycle_max_lr: Several,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Several = 0.8,
        cycle_max_mom: Several = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._each(cycle_min_lr)
        self.max_lrs = self._highest("cycle_max_lr", cycle_max_lr)
        self.weak, self.strong = self._each(cycle_min_mom), self._each(cycle_max_mom)
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self.first = _whole("cycle_first_step_size", first, 1)
        self.second = _whole("cycle_second_step_size", second, 0)
        self.stairs = (
            stairs,
            stairs if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay_step, self.lr_decay, self.mom_decay = (
            decay_step_size,
            decay_lr_rate,
            decay_mom_rate,
        )
        self.moves = cycle_momentum and "betas" in optimizer.defaults
        self._begin(last_batch_iteration)

    def height(self, i: int) -> float | None:
        """Return the position in the cycle, 0 at its lowest and 1 at its highest point, in stairs if
        asked for; None outside of it. DeepSpeed uses the next iteration, i + 1.
        """
        whole, at = self.first + self.second, i + 1
        if not 0 <= i < whole:
            return None
        at %= whole
        climbed, length, count = (
            (at, self.first, self.stairs[0])
            if at <= self.first
            else (whole - at, self.second, self.stairs[1])
        )
        return climbed * count // length / count if count else climbed / length

    def decayed(self, i: int, rate: float) -> float:
        if i < 0 or not self.decay_step or not rate:
            return 1.0
        return 1 + rate * (i - self.first - self.second + 1) / self.decay_step

    def rates(self, i: int) -> Sequence[float]:
        height = self.height(i)
        if height is None:
            return [a / self.decayed(i, self.lr_decay) for a in self.min_lrs]
        return [a + (b - a) * height for a, b in zip(self.min_lrs, self.max_lrs, strict=True)]

    def betas(self, i: int) -> list[tuple[float, float]] | None:
        if not self.moves:
            return None
        height = self.height(i)
        if height is not None:
            first = [b - (b - a) * height for a, b in zip(self.weak, self.strong, strict=True)]
        else:
            first = [
                b * self.decayed(i, self.mom_decay) for b in (self.weak if i < 0 else self.strong)
            ]
        return [(beta, 0.99) for beta in first]  # DeepSpeed always sets beta2 to 0.99


class LRRangeTest(Schedule):
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Several = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.min_lrs = self._each(lr_range_test_min_lr)
        self.size = _whole("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.rate, self.stairs = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(last_batch_iteration)

    def rates(self, i: int) -> Sequence[float]:
        at = (i + 1) / self.size
        grown = 1 + self.rate * (math.floor(at) if self.stairs else at)
        return [rate * grown for rate in self.min_lrs]


SCHEDULES: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
VALID_LR_SCHEDULES = list(SCHEDULES)
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
#: The params of all schedules
KEYS = {key for kind in SCHEDULES.values() for key in inspect.signature(kind).parameters}
__all__ = [
    *("LR_RANGE_TEST", "ONE_CYCLE", "VALID_LR_SCHEDULES", "WARMUP_COSINE_LR", "WARMUP_DECAY_LR"),
    *("WARMUP_LINEAR_RATE", "WARMUP_LOG_RATE", "WARMUP_LR"),
    *(key.upper() for key in KEYS),
    *SCHEDULES,
]


def __getattr__(name: str) -> str:
    """Return the key that DeepSpeed's constant names: `CYCLE_MIN_LR` is "cycle_min_lr"."""
    if name.isupper() and name.lower() in KEYS:
        return name.lower()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
