"""What tests of the choice of a stage ask."""

from __future__ import annotations

from typing import Any

import torch

from onefold.processes.ranks import Ranks
from onefold.train.config import TrainConfig

Asked = tuple[TrainConfig, Ranks, int]


def asked(stage: str = "auto", **changes: Any) -> Asked:
    """What `choose` takes beside a model: four ranks with room for everything; `changes` are of the
    machine, or of the configuration.
    """
    here: dict[str, Any] = {"ranks": 4, "local_ranks": 4, "free": 1 << 34}
    here |= {name: changes.pop(name) for name in here if name in changes}
    ranks = Ranks(0, here["ranks"], 0, here["local_ranks"], torch.device("cpu"), "gloo", None)
    given = {"stage": stage, "micro_batch": 2, "seq": 32, "precision": "fp32", **changes}
    return TrainConfig(**given), ranks, here["free"]
