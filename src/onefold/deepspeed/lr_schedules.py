"""DeepSpeed's schedules as classes, for scripts that make one without a configuration."""

from __future__ import annotations

from typing import Any

import torch

from onefold.deepspeed.config import SchedulerSpec
from onefold.deepspeed.config.classes import SCHEDULES
from onefold.deepspeed.schedules import Schedule, build_schedule

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [*SCHEDULES]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


def __getattr__(name: str) -> str:
    """Return the key of a configuration that DeepSpeed's constant names: `CYCLE_MIN_LR` is
    "cycle_min_lr".
    """
    key = name.lower()
    if name.isupper() and any(key in section for section in SCHEDULES.values()):
        return key
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Named(type):
    """A class whose instances are the schedules of its name, also those of a configuration."""

    def __call__(cls, optimizer: torch.optim.Optimizer, **params: Any) -> Any:
        return build_schedule(SchedulerSpec(cls.__name__, params), optimizer)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Schedule) and instance.kind == cls.__name__


class WarmupLR(metaclass=_Named):
    """The schedule of this name, over any torch optimizer."""


class WarmupDecayLR(metaclass=_Named):
    """The schedule of this name, over any torch optimizer."""


class WarmupCosineLR(metaclass=_Named):
    """The schedule of this name, over any torch optimizer."""


class OneCycle(metaclass=_Named):
    """The schedule of this name, over any torch optimizer."""


class LRRangeTest(metaclass=_Named):
    """The schedule of this name, over any torch optimizer."""
