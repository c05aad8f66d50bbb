"""`deepspeed.get_accelerator` and `deepspeed.OnDevice`, built on onefold.device."""

from __future__ import annotations

from typing import Any

import torch

from onefold.deepspeed.communication import local_rank
from onefold.device import (
    MemoryFigures,
    available,
    backend_name,
    default_device,
    device_count,
    free_memory,
    memory_figures,
    rng_state,
    set_rng_state,
)
from onefold.memory import free_host_memory, total_host_memory


class Accelerator:
    """The object that `get_accelerator()` returns: the methods that scripts use most."""

    def is_available(self) -> bool:
        return available()

    def device_name(self, device_index: int | str | None = None) -> str:
        kind = default_device().type if available() else "cpu"
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int | str:
        return local_rank() % device_count() if available() else "cpu"

    def current_device_name(self) -> str:
        return self.device_name(local_rank() % device_count()) if available() else "cpu"

    def set_device(self, device_index: int) -> None:
        if available():
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        return device_count() if available() else 0

    def communication_backend_name(self) -> str:
        return backend_name(default_device())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"get_accelerator() has no {name!r} here: the name deepspeed is served by Onefold, whose"
            " accelerator answers what scripts ask most. Use torch.accelerator."
        )

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def synchronize(self, device_index: int | None = None) -> None:
        if available():
            torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        if available():
            torch.accelerator.memory.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._figures().allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._figures().allocated_peak

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._figures().reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._figures().reserved_peak

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def _figures(self) -> MemoryFigures:
        """Return the memory figures of this rank's device; zeros without an accelerator."""
        return memory_figures(self.device(_index())) or MemoryFigures(0, 0, 0, 0)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if available():
            torch.accelerator.memory.reset_peak_memory_stats()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def available_memory(self, device_index: int | None = None) -> int:
        return free_memory() if available() else free_host_memory()

    def total_memory(self, device_index: int | None = None) -> int:
        if available():
            return int(torch.accelerator.get_memory_info()[1])
        return total_host_memory()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if available() else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return available() and tensor.is_pinned()

    def range_push(self, msg: str) -> None:
        """Do nothing: torch's profiler already names the operators."""

    def range_pop(self) -> None:
        """Do nothing; see `range_push`."""

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state = rng_state(self.device(_index()))
        return torch.get_rng_state() if state is None else state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if available():
            set_rng_state(new_state, self.device(_index()))
        else:
            torch.set_rng_state(new_state)


def _index() -> int:
    """Return the index of this rank's device on its machine."""
    return local_rank() % max(device_count(), 1) if available() else 0


def get_accelerator() -> Accelerator:
    return Accelerator()


class OnDevice:
    """Make modules on `device`, with `dtype` as the default dtype. "meta" allocates no memory."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.enabled = dtype, enabled
        self._device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)
