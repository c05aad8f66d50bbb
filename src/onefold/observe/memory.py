"""Memory by tier, as the ledgers count it and as the operating system and the CUDA allocator do.

tier     the engine's ledger      where the optimizer's states are counted
device   engine.memory            `optimizer.state` of parameters that are stored on the device
host     engine.transfers.host    `optimizer.state` of parameters that are stepped on the host
a disk   engine.transfers.disk    in this ledger, by the engine; `optimizer.state` has only meta tensors
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.device import memory_figures
from onefold.memory import MemoryLedger
from onefold.plan.schema import MOVED
from onefold.recipe.rows import OFF_DEVICE, Tier
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function

_STATUS = Path("/proc/self/status")


def resident_memory() -> tuple[int, int]:
    """Return (resident bytes now, at peak) of this process. Without /proc both are the peak, or 0
    if the system does not tell.
    """
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
        now, peak = (
            re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE) for key in ("VmRSS", "VmHWM")
        )
        if now and peak:
            return int(now.group(1)) * 1024, int(peak.group(1)) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 0, 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return highest, highest


@dataclass(frozen=True)
class Reconciliation:
    """The ledgers compared with the machine's own counters, in bytes of this rank.

    Attributes:
        device: the type of its device: "cpu", "cuda", ...
        ledger, ledger_peak: bytes of the engine, the optimizer and (if watched) autograd, now and
            at peak.
        allocated, allocated_peak, reserved, reserved_peak: counters of the CUDA caching allocator;
            0 on a CPU, whose allocator has none.
        resident, resident_peak: resident memory of the process, including its libraries and
            interpreter.
    """

    device: str
    ledger: int
    ledger_peak: int
    allocated: int = 0
    allocated_peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    resident: int = 0
    resident_peak: int = 0

    @property
    def fragmentation(self) -> int:
        """The allocator's peak of reserved bytes less its peak of allocated bytes; 0 on a CPU."""
        return max(0, self.reserved_peak - self.allocated_peak)

    @property
    def unaccounted(self) -> int:
        """Bytes in use that are in no ledger. Bytes in use are the allocated ones on CUDA, and the
        resident ones on a CPU, including interpreter and libraries.
        """
        return (self.resident if self.device == "cpu" else self.allocated) - self.ledger

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "fragmentation": self.fragmentation,
            "unaccounted": self.unaccounted,
        }


def reconcile(device: torch.device, ledger: int, ledger_peak: int) -> Reconciliation:
    """Read the machine's counters. Nothing is synchronized."""
    resident, resident_peak = resident_memory()
    figures = memory_figures(device)
    if figures is None:
        return Reconciliation(
            device.type, ledger, ledger_peak, resident=resident, resident_peak=resident_peak
        )
    return Reconciliation(device.type, ledger, ledger_peak, *figures, resident, resident_peak)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind `tensors`, each storage once."""
    seen: dict[int, int] = {}
    for t in tensors:
        storage = t.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


__all__ = ["DEVICE", "HOST", "MOVED", "NVME", "ledgers_of", "moments_by_tier", "moments_of"]

DEVICE, HOST, NVME = Tier.DEVICE.value, Tier.HOST.value, Tier.NVME.value


def ledgers_of(engine: Engine) -> dict[str, MemoryLedger]:
    """Return the memory ledgers of the offload tiers."""
    return {tier.value: engine.transfers.ledgers[tier] for tier in OFF_DEVICE}


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in the optimizer's state on all tiers, each storage once."""
    with disable_torch_function():
        return _bytes(optimizer.state.values())


def moments_by_tier(optimizer: torch.optim.Optimizer, engine: Engine) -> dict[str, int]:
    """Return the bytes of the optimizer's state on the device and on the host, without zeros."""
    offloaded = {id(e.param) for e in engine.entries if e.flat.storage.offloaded}
    with disable_torch_function():
        states = list(optimizer.state.items())
    parts = {
        DEVICE: [s for p, s in states if id(p) not in offloaded],
        HOST: [s for p, s in states if id(p) in offloaded],
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
