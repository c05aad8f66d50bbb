"""DeepSpeed's schedules as constructors, for scripts that make one without a configuration."""

from __future__ import annotations

from typing import Any

import torch

from onefold.integrations.deepspeed.config import SchedulerSpec
from onefold.integrations.deepspeed.config.classes import SCHEDULES
from onefold.integrations.deepspeed.schedules import build_schedule

VALID_LR_SCHEDULES = [*SCHEDULES]


def _schedule(name: str) -> Any:
    def make(optimizer: torch.optim.Optimizer, **params: Any) -> Any:
        return build_schedule(SchedulerSpec(name, params), optimizer)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"The schedule {name}, over any torch optimizer."
    return make


WarmupLR, WarmupDecayLR, WarmupCosineLR = map(
    _schedule, ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
)
OneCycle, LRRangeTest = map(_schedule, ("OneCycle", "LRRangeTest"))
