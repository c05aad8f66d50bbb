"""What lies off the device, and on which tier an optimizer's states are.

tier     held by the engine    an optimizer's states
device   engine.memory         of parameters that rest on the device
host     engine.transfers.host    of parameters that are stepped on the host
nvme     engine.transfers.disk    entered there by the engine; `optimizer.state` has only places on the meta device
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from onefold.memory import MemoryLedger
from onefold.observe.process import storage_bytes
from onefold.plan.schema import MOVED
from onefold.runtime.engine import Engine
from onefold.runtime.parameter import disable_torch_function

__all__ = ["DEVICE", "HOST", "MOVED", "NVME", "ledgers_of", "moments_by_tier", "moments_of"]

DEVICE, HOST, NVME = "device", "host", "nvme"


def ledgers_of(engine: Engine) -> dict[str, MemoryLedger]:
    """The memory ledgers of the tiers off the device."""
    return {HOST: engine.transfers.host, NVME: engine.transfers.disk}


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of memory behind all tensors in the optimizer's state, each storage once, whatever tier
    they are on.
    """
    with disable_torch_function():
        return _bytes(optimizer.state.values())


def moments_by_tier(optimizer: torch.optim.Optimizer, engine: Engine) -> dict[str, int]:
    """The same on the device and on the host; none is 0."""
    away = {id(e.param) for e in engine.entries if e.flat.storage.offloaded}
    with disable_torch_function():
        states = list(optimizer.state.items())
    parts = {
        DEVICE: [s for p, s in states if id(p) not in away],
        HOST: [s for p, s in states if id(p) in away],
    }
    return {tier: nbytes for tier, found in parts.items() if (nbytes := _bytes(found))}


def _bytes(states: Iterable[Any]) -> int:
    with disable_torch_function():
        return storage_bytes(t for state in list(states) for t in _tensors(state) if not t.is_meta)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
