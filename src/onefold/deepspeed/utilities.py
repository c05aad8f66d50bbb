"""What else scripts import from `deepspeed`: the version, the accelerator, ranks, logs, loaders,
functions over tensors, and what they ask about compiled operators.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import is_initialized
from torch.utils._pytree import tree_map_only

from onefold.deepspeed.serving import VERSION as __version__
from onefold.device import (
    available,
    backend_name,
    default_device,
    device_count,
    free_memory,
    memory_figures,
)
from onefold.memory import free_host_memory, total_host_memory

#: {DeepSpeed's operator: its name, where what it is for is served}, and others
_OPERATORS = {
    "AsyncIO": "async_io",
    "CPUAdagrad": "cpu_adagrad",
    "CPUAdam": "cpu_adam",
    "CPULion": "cpu_lion",
    "FusedAdam": "fused_adam",
    "FusedLion": "fused_lion",
}
_OTHERS = (
    "EvoformerAttn", "FPQuantizer", "FusedLamb", "GDS", "Inference", "Quantizer", "RandomLTD", "SpatialInference",
    "StochasticTransformer", "Transformer",
)  # fmt: skip
__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "OnDevice",
    "RepeatingLoader",
    "ZeRORuntimeException",
    "__compatible_ops__",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "_orig_torch_arange",
    "clone_tensors_for_torch_save",
    "configure",
    "get_accelerator",
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "instrument_w_nvtx",
    "is_initialized",
    "log_dist",
    "log_summary",
    "logger",
    "move_to_device",
    "see_memory_usage",
    *(f"{name}Builder" for name in (*_OPERATORS, *_OTHERS)),
]
__git_branch__ = __git_hash__ = "onefold"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
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

    def __getattr__(self, name: str) -> Any:
        if (method := _METHODS.get(name)) is not None:
            return method
        name = _FORMER.get(name, name)
        if name in torch.random.__all__:
            return getattr(torch.random, name)
        if name in (*torch.accelerator.memory.__all__, "synchronize"):
            return getattr(torch.accelerator, name) if available() else lambda *_: 0
        raise AttributeError(
            f"get_accelerator() has no {name!r} here: the name deepspeed is served by Onefold, whose"
            " accelerator answers what scripts ask most. Use torch.accelerator."
        )


def _name(device_index: int | str | None = None) -> str:
    kind = default_device().type if available() else "cpu"
    return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"


def _current() -> int | str:
    return get_local_rank() % device_count() if available() else "cpu"


def _module() -> Any:
    return torch.get_device_module(default_device()) if available() else torch


_METHODS: Mapping[str, Callable[..., Any]] = {
    "is_available": available,
    "device_name": _name,
    "device": lambda device_index=None: torch.device(_name(device_index)),
    "current_device": _current,
    "current_device_name": lambda: _name(_current()),
    "device_count": lambda: device_count() if available() else 0,
    "communication_backend_name": lambda: backend_name(default_device()),
    "on_accelerator": lambda tensor: tensor.device.type == _name(),
    "set_device": lambda device_index: (
        torch.accelerator.set_device_index(device_index) if available() else None
    ),
    "available_memory": lambda device_index=None: (
        free_memory() if available() else free_host_memory()
    ),
    "total_memory": lambda device_index=None: (
        int(torch.accelerator.get_memory_info()[1]) if available() else total_host_memory()
    ),
    "pin_memory": lambda tensor, align_bytes=1: tensor.pin_memory() if available() else tensor,
    "is_pinned": lambda tensor: available() and tensor.is_pinned(),
    # torch's profiler already names the operators
    "range_push": lambda *_: None,
    "range_pop": lambda *_: None,
    "is_bf16_supported": lambda: True,
    "is_fp16_supported": lambda: True,
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "random": lambda: torch.random,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": lambda device_index=None: _module().get_rng_state(),
    "set_rng_state": lambda new_state, device_index=None: _module().set_rng_state(new_state),
}
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
    return tree_map_only(Tensor, lambda x: x.to(device) if criterion_func(x) else x, item)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copy the tensors in containers to memory of their own.

    A tensor that occurs twice (tied weights) is copied once, so that it stays tied.
    """
    return tree_map_only(Tensor, cache(lambda x: x.detach().clone().to(device)), item)


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None, or a list with -1 in it, means all ranks."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the message and the memory in use, in GiB, on the first rank, if `force` is true."""
    if not force or get_rank():
        return
    said = f"{message}: host {(total_host_memory() - free_host_memory()) / 2**30:.2f} GiB"
    if (held := memory_figures(default_device())) is not None:
        peak = held.allocated_peak / 2**30
        said += f"; allocated {held.allocated / 2**30:.2f}, at most {peak:.2f} GiB"
    print(said, flush=True)


def instrument_w_nvtx(func: Any) -> Any:
    """Return the function unchanged: torch's profiler already names the operators."""
    return func


# -- ranks ---------------------------------------------------------------------------------------

get_all_ranks_from_group = dist.get_process_group_ranks
inference_all_reduce = dist.all_reduce


def init_distributed(
    dist_backend: str | None = None,
    *ignored: Any,
    distributed_port: int = 29500,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
    **others: Any,
) -> None:
    """Join the process group that the launcher's environment describes, unless there is one.

    Args:
        dist_backend: None takes the accelerator's backend, or gloo without an accelerator.
        dist_init_required: False joins none, and needs one that exists.
        ignored, others: auto_mpi_discovery, verbose and config are accepted without effect.

    Raises:
        RuntimeError: `dist_init_required` is false, and there is no process group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required=False, and there is no process group: call"
            " torch.distributed.init_process_group() before, or leave dist_init_required out."
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    os.environ.setdefault("RANK", str(max(rank, 0)))
    os.environ.setdefault("WORLD_SIZE", str(max(world_size, 1)))
    dist.init_process_group(
        dist_backend or backend_name(default_device()),
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
    )


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 before there is a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 before there is a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def configure(*arguments: Any, **options: Any) -> None:
    """Do nothing: the collectives are torch's, and are not logged."""


def log_summary(*arguments: Any, **options: Any) -> None:
    """Warn on the first rank that there is no log of collectives to summarize."""
    if get_rank() == 0:
        logger.warning(
            "log_summary: collectives are not logged under Onefold. `onefold plan` tells what a"
            " step sends; docs/observe.md how a run is looked at."
        )


def get_local_rank() -> int:
    """Return this rank's number on its machine, from the launcher's `LOCAL_RANK`."""
    return int(os.environ.get("LOCAL_RANK", 0))


def join(required: bool | None, port: int = 29500) -> None:
    """Join the process group that the launcher's environment variables describe.

    torchrun, Slurm wrappers and others set these variables.
    """
    if required is False or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        init_distributed(distributed_port=port, dist_init_required=required)
    elif required and not dist.is_initialized():
        raise ValueError(
            "dist_init_required=True, but RANK and WORLD_SIZE are not set: start with torchrun."
        )


# -- compiled operators --------------------------------------------------------------------------

#: {DeepSpeed's name of an operator: whether what it is for is served}; false for any other name.
__compatible_ops__: Any = defaultdict(bool, dict.fromkeys(_OPERATORS.values(), True))


class _Builder:
    """Answers whether what an operator of DeepSpeed's is for can be used: the optimizers of its name
    are served by torch's, and state on NVMe by Onefold's own reads and writes.
    """

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return bool(__compatible_ops__[self.NAME])

    def load(self, verbose: bool = False) -> Any:
        """Raise NotImplementedError: there is no compiled operator."""
        raise NotImplementedError(
            f"{type(self).__name__}.load(): Onefold has no compiled operators. The optimizers of"
            " deepspeed.ops are torch's own, and state on NVMe needs none: leave the call out."
        )


def __getattr__(name: str) -> type[_Builder]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (_Builder,), {"NAME": _OPERATORS.get(name.removesuffix("Builder"), name)})
