"""Allocated and free bytes of a device, and which devices there are."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onefold.device.place import available, with_index


class MemoryFigures(NamedTuple):
    """Bytes of torch's allocator on a device: allocated to tensors, and reserved from the system,
    now and at peak.
    """

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int


def memory_figures(device: torch.device) -> MemoryFigures | None:
    """Return the figures of torch's allocator on `device`; None on a CPU. Reads counters without
    synchronizing.
    """
    if device.type in ("cpu", "meta"):
        return None
    where = with_index(device)
    a = torch.accelerator
    return MemoryFigures(
        a.memory_allocated(where),
        a.max_memory_allocated(where),
        a.memory_reserved(where),
        a.max_memory_reserved(where),
    )


def free_memory(device: torch.device | None = None) -> int:
    """Return the free bytes of an accelerator's memory: of `device`, or of the current one.

    Raises:
        RuntimeError: there is no accelerator.
    """
    return int(torch.accelerator.get_memory_info(device)[0])


def device_count() -> int:
    """Return the number of accelerators that torch can use."""
    return torch.accelerator.device_count() if available() else 0


def device_names() -> tuple[str, ...]:
    """Return the name of each accelerator."""
    found = torch.accelerator.current_accelerator() if available() else None
    if found is None:
        return ()
    module = torch.get_device_module(found)
    named = getattr(module, "get_device_name", None)
    return tuple(
        str(named(i)) if named is not None else f"{found.type}:{i}" for i in range(device_count())
    )
