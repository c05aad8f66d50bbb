"""What else scripts import from `deepspeed`: the version, the accelerator, logs, loaders, functions over
tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed import is_initialized
from torch.utils._pytree import tree_map

from onefold.deepspeed.comm import get_rank, local_rank
from onefold.deepspeed.serving import VERSION as __version__
from onefold.device import (
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

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "OnDevice",
    "RepeatingLoader",
    "ZeRORuntimeException",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "_orig_torch_arange",
    "clone_tensors_for_torch_save",
    "get_accelerator",
    "instrument_w_nvtx",
    "is_initialized",
    "is_moe_param",
    "log_dist",
    "logger",
    "move_to_device",
    "see_memory_usage",
    "split_params_into_different_moe_groups_for_optimizer",
]
__git_branch__ = __git_hash__ = "onefold"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger("DeepSpeed")
#: A file of `NAME=value` lines that launchers of several nodes read.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_orig_torch_arange = torch.arange


class ZeRORuntimeException(RuntimeError):
    """DeepSpeed's error of its ZeRO optimizers. Onefold raises none."""


class Accelerator:
    """The object that `get_accelerator()` returns: the methods that scripts use most, torch.random's,
    and torch.accelerator's of memory and waiting, which answer 0 without an accelerator.
    """

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
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return device_count() if available() else 0

    def communication_backend_name(self) -> str:
        return backend_name(default_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def set_device(self, device_index: int) -> None:
        if available():
            torch.accelerator.set_device_index(device_index)

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

    def range_push(self, msg: str = "") -> None:
        """Do nothing: torch's profiler already names the operators."""

    range_pop = range_push

    def is_bf16_supported(self) -> bool:
        return True

    is_fp16_supported = is_bf16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def random(self) -> Any:
        return torch.random

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state = rng_state(torch.device(self.current_device_name()))
        return torch.get_rng_state() if state is None else state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if available():
            set_rng_state(new_state, torch.device(self.current_device_name()))
        else:
            torch.set_rng_state(new_state)

    def __getattr__(self, name: str) -> Any:
        name = _FORMER.get(name, name)
        if name in torch.random.__all__:
            return getattr(torch.random, name)
        if name in (*torch.accelerator.memory.__all__, "synchronize"):
            return getattr(torch.accelerator, name) if available() else lambda *_: 0
        raise AttributeError(
            f"get_accelerator() has no {name!r} here: the name deepspeed is served by Onefold, whose"
            " accelerator answers what scripts ask most. Use torch.accelerator."
        )


#: {former name of one of torch.accelerator's functions: its name}
_FORMER = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


def get_accelerator() -> Accelerator:
    return Accelerator()


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Make modules on `device`, with `dtype` as the default dtype. "meta" allocates no memory."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class RepeatingLoader:
    """A data loader that starts again when it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._items = iter(loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            self._items = iter(self.loader)
            return next(self._items)


def move_to_device(item: Any, device: Any, criterion_func: Any = lambda _: True) -> Any:
    """Move the tensors in containers to a device, but those for which `criterion_func` is false."""

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) and criterion_func(x) else x

    return tree_map(moved, item)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy the tensors in containers to memory of their own.

    A tensor that occurs twice (tied weights) is copied once, so that it stays tied.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone().to(device)
        return copies[id(x)]

    return tree_map(copied, item)


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None, or a list with -1 in it, means all ranks."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the message and the memory in use, in GiB, on the first rank, if `force` is true."""
    if not force or get_rank():
        return
    used = total_host_memory() - free_host_memory()
    parts = [f"host {used / 2**30:.2f} of {total_host_memory() / 2**30:.2f} GiB"]
    if (held := memory_figures(default_device())) is not None:
        parts.insert(
            0,
            f"allocated {held.allocated / 2**30:.2f}, at most {held.allocated_peak / 2**30:.2f} GiB;"
            f" reserved {held.reserved / 2**30:.2f}, at most {held.reserved_peak / 2**30:.2f} GiB",
        )
    print(f"{message}: {'; '.join(parts)}", flush=True)


def instrument_w_nvtx(func: F) -> F:
    """Return the function unchanged: torch's profiler already names the operators."""
    return func


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | list[Any] | tuple[Any, ...], max_group_size: Any = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list, as DeepSpeed's examples ask for every model.

    Raises:
        NotImplementedError: a parameter is an expert's of DeepSpeed's own layer.
    """
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    made = [{**group, "params": list(group["params"])} for group in groups]
    if any(is_moe_param(param) for group in made for param in group["params"]):
        raise NotImplementedError(
            "a parameter belongs to an expert (its `allreduce` is false): give"
            " onefold.shard(mesh=...) the axis of experts."
        )
    return made


def is_moe_param(param: Any) -> bool:
    """Whether the parameter is an expert's of DeepSpeed's own layer."""
    return getattr(param, "allreduce", True) is False
