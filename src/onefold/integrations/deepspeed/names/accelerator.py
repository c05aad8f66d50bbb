"""`get_accelerator` and `OnDevice`: the device, over onefold.device."""

from __future__ import annotations

from typing import Any

import torch

from onefold.device import available, backend_name, default_device, device_count
from onefold.integrations.deepspeed.names.communication import local_rank


class Accelerator:
    """What scripts ask of `get_accelerator()`, over onefold.device."""

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

    def synchronize(self, device_index: int | None = None) -> None:
        if available():
            torch.accelerator.synchronize()

    def empty_cache(self) -> None:
        if available():
            torch.accelerator.memory.empty_cache()

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def get_accelerator() -> Accelerator:
    return Accelerator()


class OnDevice:
    """Inside, modules are made on the device: "meta" for a model that `initialize` fills."""

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
