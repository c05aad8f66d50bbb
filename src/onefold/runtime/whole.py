"""All masters of a flat buffer in one tensor, outside a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.runtime.interval import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Flat
    from onefold.runtime.unit import Unit


def place_of(engine: Engine, unit: Unit) -> CollectiveContext:
    return CollectiveContext("state", unit.name, engine.step, "state")


def whole_masters(engine: Engine, unit: Unit, flat: Flat) -> torch.Tensor:
    """A new buffer [numel] with all masters of `flat`, the same on every rank."""
    full = torch.empty(flat.layout.numel, dtype=flat.dtypes.master, device=engine.device)
    with disable_torch_function(), torch.no_grad():
        if flat.whole_master:
            return full.copy_(flat.storage.load())
        full[flat.owned[0] : flat.owned[1]].copy_(flat.storage.load())
        flat.owners_group.all_gather(full, place_of(engine, unit), flat.index, move="state").wait()
    return full
