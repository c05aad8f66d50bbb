"""DeepSpeed's five learning-rate schedules, for any torch optimizer, with DeepSpeed's rates.

A schedule is a function from the iteration to one rate per parameter group. The iteration is -1
when the schedule is made and 0 after the first `step()`, so the first optimizer step runs at the
rate of iteration -1.

| name           | rate at iteration i                                                                     |
|----------------|-----------------------------------------------------------------------------------------|
| WarmupLR       | min + (max - min) x rise(i), then max                                                   |
| WarmupDecayLR  | as WarmupLR, but falls linearly from max to 0 at `total_num_steps`                      |
| WarmupCosineLR | the optimizer's rate x rise, then x a half cosine down to `cos_min_ratio`               |
| OneCycle       | up from min to max and down again, then decays; momentum goes the other way             |
| LRRangeTest    | grows by `step_rate` every `step_size` iterations (Smith 2018, arXiv:1803.09820)        |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onefold.deepspeed.config import SchedulerSpec

logger = logging.getLogger("onefold")
Rates = Callable[[int], list[float]]


class Schedule:
    """A schedule with the methods that DeepSpeed's and torch's schedules share.

    Attributes:
        kind: its name in the table of this module.
        min_lrs, max_lrs: the lowest and the highest rate of each group, where the schedule has them.
        warmup_num_steps, warmup_type: of a warm-up; 0 and "" otherwise.

    Args:
        optimizer: the optimizer whose parameter groups get the rates.
        rates: iteration -> one rate per group.
        betas: iteration -> one (beta1, beta2) per group; None leaves the betas unchanged.
        last_batch_iteration: the iteration to resume at. -1 starts anew, and sets the rates of
            iteration -1 at once.
    """

    kind = ""
    min_lrs: Sequence[float] = ()
    max_lrs: Sequence[float] = ()
    warmup_num_steps = 0
    warmup_type = ""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Rates,
        betas: Callable[[int], list[tuple[float, float]]] | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer, self._rates, self._betas = optimizer, rates, betas
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the one given, and set the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def get_lr(self) -> list[float]:
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        return self.get_lr()

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
        if self._betas is not None:
            for group, pair in zip(
                self.optimizer.param_groups, self._betas(self.last_batch_iteration), strict=True
            ):
                group["betas"] = pair


def build_schedule(spec: SchedulerSpec, optimizer: torch.optim.Optimizer) -> Any:
    """Make the schedule that a configuration names: one of DeepSpeed's, or one of
    torch.optim.lr_scheduler.
    """
    make = _SCHEDULES.get(spec.name)
    if make is None:
        return getattr(torch.optim.lr_scheduler, spec.name)(optimizer, **spec.params)
    made = make(optimizer, **spec.params)
    made.kind = spec.name
    return made


def _per_group(
    optimizer: torch.optim.Optimizer, name: str, value: float | Sequence[float]
) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        # As in DeepSpeed, also beside `muon_lr`
        if name.endswith("_max_lr") and len(set(_current(optimizer))) > 1:
            logger.warning(
                "scheduler.params.%s is one rate, %s, for %d parameter groups, whose own rates %s it"
                " replaces: write one each, or use WarmupLR without it, which takes their own.",
                name,
                value,
                groups,
                ", ".join(f"{rate:g}" for rate in _current(optimizer)),
            )
        return [value] * groups
    if len(value) != groups:
        raise ValueError(
            f"scheduler.params.{name} has {len(value)} values for {groups} parameter groups: write"
            " one each."
        )
    return list(value)


def _current(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _warmup_steps(given: Any) -> int:
    """Return the number of steps of a warm-up: 2 or more, as in DeepSpeed."""
    if not isinstance(given, int) or given < 0:
        raise ValueError(f"warmup_num_steps={given!r}: expected a whole number, 0 or more.")
    return max(2, given)


def _warmup_type(given: str) -> str:
    """Return "log" or "linear". Of anything else DeepSpeed makes "log"; here a message says so."""
    if given in ("log", "linear"):
        return given
    logger.warning("warmup_type=%r: expected 'log' or 'linear'; it counts as 'log'.", given)
    return "log"


def _rise(steps: int, kind: str) -> Callable[[int], float]:
    inverse = 1.0 / math.log(steps)  # rounded as DeepSpeed rounds it
    return lambda i: inverse * math.log(i + 1) if kind == "log" else i / steps


def _warmup(
    optimizer: torch.optim.Optimizer,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
    total_num_steps: int | None = None,
) -> Schedule:
    low = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
    high = (
        _current(optimizer)
        if warmup_max_lr is None
        else _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
    )
    steps, warmup_type = _warmup_steps(warmup_num_steps), _warmup_type(warmup_type)
    rise = _rise(steps, warmup_type)

    def share(i: int) -> float:
        if i < steps:
            return rise(i)
        return (
            1.0
            if total_num_steps is None
            else max(0.0, (total_num_steps - i) / max(1.0, total_num_steps - steps))
        )

    def rates(i: int) -> list[float]:
        return low if i < 0 else [a + (b - a) * share(i) for a, b in zip(low, high, strict=True)]

    made = Schedule(optimizer, rates, last_batch_iteration=last_batch_iteration)
    made.min_lrs, made.max_lrs = low, high
    made.warmup_num_steps, made.warmup_type = steps, warmup_type
    return made


def _warmup_decay(optimizer: torch.optim.Optimizer, **params: Any) -> Schedule:
    return _warmup(optimizer, **{"warmup_max_lr": 0.001, **params})


def _warmup_cosine(
    optimizer: torch.optim.Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    peak = _current(optimizer)
    steps, warmup_type = _warmup_steps(warmup_num_steps), _warmup_type(warmup_type)
    rise = _rise(steps, warmup_type)

    def ratio(i: int) -> float:
        if i < 0:
            return 0.0
        if i < steps:
            return warmup_min_ratio + (1.0 - warmup_min_ratio) * rise(i)
        progress = min(1.0, (i - steps + 1) / max(1, total_num_steps - steps))
        return max(
            0.0, cos_min_ratio + (1.0 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )

    made = Schedule(
        optimizer,
        lambda i: [rate * ratio(i) for rate in peak],
        last_batch_iteration=last_batch_iteration,
    )
    made.max_lrs = peak
    made.warmup_num_steps, made.warmup_type = steps, warmup_type
    return made


def _one_cycle(
    optimizer: torch.optim.Optimizer,
    cycle_min_lr: float | Sequence[float],
    cycle_max_lr: float | Sequence[float],
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float | Sequence[float] = 0.8,
    cycle_max_mom: float | Sequence[float] = 0.9,
    decay_mom_rate: float = 0.0,
    last_batch_iteration: int = -1,
) -> Schedule:
    low, high = (
        _per_group(optimizer, "cycle_min_lr", cycle_min_lr),
        _per_group(optimizer, "cycle_max_lr", cycle_max_lr),
    )
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    if not (first > 0 and second >= 0):
        raise ValueError(
            f"cycle_first_step_size={first} and cycle_second_step_size={second}: expected a whole"
            " number above 0, and one of 0 or more."
        )
    stairs = [cycle_first_stair_count] * 2
    if cycle_second_stair_count is not None:
        stairs[1] = cycle_second_stair_count

    def height(i: int) -> float:
        """Return the position in the cycle, 0 at its lowest and 1 at its highest point, in stairs
        if asked for. DeepSpeed uses the next iteration, i + 1.
        """
        at = (i + 1) % (first + second)
        climbed, length, count = (
            (at, first, stairs[0]) if at <= first else (first + second - at, second, stairs[1])
        )
        return climbed * count // length / count if count else climbed / length

    def decayed(i: int, rate: float) -> float:
        return (
            1 + rate * (i - first - second + 1) / decay_step_size
            if decay_step_size and rate
            else 1.0
        )

    def rates(i: int) -> list[float]:
        if i < 0:
            return low
        if i < first + second:
            return [a + (b - a) * height(i) for a, b in zip(low, high, strict=True)]
        return [a / decayed(i, decay_lr_rate) for a in low]

    weak, strong = (
        _per_group(optimizer, "cycle_min_mom", cycle_min_mom),
        _per_group(optimizer, "cycle_max_mom", cycle_max_mom),
    )

    def betas(i: int) -> list[tuple[float, float]]:
        if i < 0:
            first_betas = weak
        elif i < first + second:
            first_betas = [b - (b - a) * height(i) for a, b in zip(weak, strong, strict=True)]
        else:
            first_betas = [b * decayed(i, decay_mom_rate) for b in strong]
        # DeepSpeed always sets beta2 to 0.99
        return [(beta, 0.99) for beta in first_betas]

    has_betas = cycle_momentum and "betas" in optimizer.defaults
    made = Schedule(optimizer, rates, betas if has_betas else None, last_batch_iteration)
    made.min_lrs, made.max_lrs = low, high
    return made


def _range_test(
    optimizer: torch.optim.Optimizer,
    lr_range_test_min_lr: float | Sequence[float] = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> Schedule:
    low = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
    if lr_range_test_step_size <= 0:
        raise ValueError(
            f"lr_range_test_step_size={lr_range_test_step_size}: expected a whole number above 0."
        )

    def rates(i: int) -> list[float]:
        interval = (i + 1) / lr_range_test_step_size
        grown = 1 + lr_range_test_step_rate * (
            math.floor(interval) if lr_range_test_staircase else interval
        )
        return [rate * grown for rate in low]

    made = Schedule(optimizer, rates, last_batch_iteration=last_batch_iteration)
    made.min_lrs = low
    return made


_SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
