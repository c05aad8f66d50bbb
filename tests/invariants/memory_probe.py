"""Bytes of tensors that are alive in this process, seen from outside of Onefold's own ledger."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

MIB = 1 << 20
M_MMAP_THRESHOLD = -3


def living_bytes() -> int:
    """The memory behind every tensor that Python can reach, each storage once."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            is_tensor = issubclass(type(thing), torch.Tensor)
        except Exception:
            continue
        if is_tensor and thing.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def give_memory_back_at_once() -> None:
    """Let malloc return every freed block of 64 KiB or more to the system, so that resident memory
    follows what is alive.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)


def resident_bytes() -> int:
    """Memory of this process that is its own (RssAnon of Linux)."""
    return _status("RssAnon")


def peak_resident_bytes() -> int:
    """The largest resident size since `reset_peak`, all kinds of pages."""
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
