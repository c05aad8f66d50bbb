"""`init_distributed`, ranks, and the names of `deepspeed.comm` that torch.distributed lacks."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from onefold.device import backend_name, default_device

__all__ = [
    "configure",
    "get_all_ranks_from_group",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "log_summary",
]
get_all_ranks_from_group = dist.get_process_group_ranks
inference_all_reduce = dist.all_reduce


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
        dist_backend: None takes the accelerator's backend, or gloo without an accelerator.
        dist_init_required: False joins none, and needs one that exists.

    Raises:
        RuntimeError: `dist_init_required` is false, and there is no process group.
    """
    if dist_init_required is False:
        needs_group()
    if dist.is_initialized():
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


def needs_group() -> None:
    """Raise RuntimeError if there is no process group."""
    if not dist.is_initialized():
        raise RuntimeError(
            "dist_init_required=False, and there is no process group: call"
            " torch.distributed.init_process_group() before, or leave dist_init_required out."
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
        logging.getLogger("DeepSpeed").warning(
            "log_summary: collectives are not logged under Onefold. `onefold plan` tells what a"
            " step sends; docs/observe.md how a run is looked at."
        )


def local_rank() -> int:
    """Return this rank's number on its machine, from the launcher's `LOCAL_RANK`."""
    return int(os.environ.get("LOCAL_RANK", 0))


get_local_rank = local_rank
