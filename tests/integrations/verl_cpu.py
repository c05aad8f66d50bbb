"""The CPU as a platform of verl, by its registry: VERL_USE_EXTERNAL_MODULES=verl_cpu
VERL_PLATFORM=cpu. And no trl for verl, which knows older ones and needs none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import import_utils

import_utils.is_trl_available = lambda: False
_joined = torch.distributed.init_process_group


def _join(backend: Any = None, **given: Any) -> None:
    """verl's command asks for gloo, and for NCCL on the device, which is the CPU here."""
    _joined(backend="gloo" if backend == "cpu:gloo,cpu:nccl" else backend, **given)


torch.distributed.init_process_group = _join


def _nothing(*_: Any, **__: Any) -> int:
    return 0


_COUNTS = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_CALLS = ("empty_cache", "ipc_collect", "synchronize", "set_device")
MODULE = SimpleNamespace(
    **dict.fromkeys(_COUNTS + _CALLS, _nothing),
    mem_get_info=lambda *_: (0, 0),
    is_available=lambda: True,
    current_device=lambda: "cpu",
    get_device_name=lambda *_: "CPU",
)


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformCUDA):  # type: ignore[misc, unused-ignore]
    """Says "cpu" where verl asks for a device."""

    device_name, vendor_name, device_module = "cpu", "none", MODULE

    def current_device(self) -> Any:
        return "cpu"

    def is_available(self) -> bool:
        return True
