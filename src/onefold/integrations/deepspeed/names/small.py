"""Communication, accelerator, logger, activation checkpointing: small names, over torch's."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from onefold.checkpoint.loading import source_of
from onefold.device import available, backend_name, default_device, device_count
from onefold.integrations.deepspeed.config import SchedulerSpec
from onefold.integrations.deepspeed.config.keys import SCHEDULES
from onefold.integrations.deepspeed.names.table import VERSION
from onefold.integrations.deepspeed.names.zero import local_rank
from onefold.integrations.deepspeed.schedules import build_schedule

__all__ = ["VERSION"]
logger = logging.getLogger("DeepSpeed")
VALID_LR_SCHEDULES = [*SCHEDULES]
#: A file of `NAME=value` lines that launchers of several nodes read.
ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


# -- communication ---------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group that the launcher's environment describes, unless there is one.

    Args:
        dist_backend: None takes the one of the accelerator, gloo without one.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
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
    """0 before there is a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_local_rank() -> int:
    return local_rank()


# -- accelerator -----------------------------------------------------------------------------------


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


# -- logger, data ----------------------------------------------------------------------------------


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None or -1 is all of them."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


class RepeatingLoader:
    """A loader that begins anew when it ends."""

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
    """Tensors in lists, tuples and dicts, on the device."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(x, device, criterion_func) for x in item)
    if isinstance(item, Mapping):
        return {k: move_to_device(v, device, criterion_func) for k, v in item.items()}
    return item


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Tensors in lists, tuples and dicts, copied to memory of their own. What is one tensor under
    two names, tied weights for instance, is one copy.
    """
    copies: dict[int, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone().to(device)
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(copied(x) for x in value)
        if isinstance(value, Mapping):
            return {k: copied(v) for k, v in value.items()}
        return value

    return copied(item)


# -- schedules, made by hand -----------------------------------------------------------------------


def _schedule(name: str) -> Any:
    def make(optimizer: torch.optim.Optimizer, **params: Any) -> Any:
        return build_schedule(SchedulerSpec(name, params), optimizer)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"The schedule {name}, over any torch optimizer."
    return make


WarmupLR, WarmupDecayLR, WarmupCosineLR = map(
    _schedule, ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
)
OneCycle, LRRangeTest = map(_schedule, ("OneCycle", "LRRangeTest"))


# -- activation checkpointing ----------------------------------------------------------------------

_configured = [False]


def configure_checkpointing(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Noted, no more: `checkpoint` is torch's, and activations are offloaded by the recipe."""
    _configured[0] = True


def checkpointing_is_configured() -> bool:
    return _configured[0]


def reset_checkpointing() -> None:
    """Nothing: no buffers are kept between steps."""


def checkpoint(function: Any, *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` of the function, non-reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


# -- checkpoints, without an engine ----------------------------------------------------------------


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The whole model in fp32 from a checkpoint folder, Onefold's or DeepSpeed's, without ranks.

    Args:
        lazy_mode: accepted; everything is read.

    Raises:
        CheckpointError: nothing there that can be read.
        NotImplementedError: `exclude_frozen_parameters`.
    """
    if exclude_frozen_parameters:
        raise NotImplementedError(
            "exclude_frozen_parameters: the whole model is read here; leave it out, and drop the"
            " names that you do not want."
        )
    source = source_of(Path(checkpoint_dir) / tag if tag is not None else Path(checkpoint_dir))
    try:
        out: dict[str, torch.Tensor] = {}
        for item, stored in source.items().items():
            if item.kind not in ("parameter", "buffer"):
                continue
            whole = torch.empty(math.prod(stored.shape), dtype=torch.float32)
            source.read(item, 0, whole.numel(), whole)
            out[item.name] = whole.view(stored.shape)
        return out | {alias: out[name] for alias, name in source.aliases().items()}
    finally:
        source.close()


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load that whole model into a plain one, on the host; returns it."""
    model = model.cpu()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model
