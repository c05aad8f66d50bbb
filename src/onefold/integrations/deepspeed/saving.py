"""A whole model in one file, written by rank 0, while every rank learns whether it worked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold


def save_whole(
    module: nn.Module,
    path: Path,
    dtype: torch.dtype | None,
    without_frozen: bool,
    rank: int,
    world_size: int,
) -> None:
    """Gather the model on rank 0 and write it there, floating-point parameters as `dtype` (None: as
    they compute). Every rank must call it.

    Raises:
        RuntimeError: writing failed on rank 0; raised on every rank, so that none waits for the
            others.
    """
    whole = whole_in(module, dtype, without_frozen)
    error: str | None = None
    if rank == 0:
        try:
            _write(whole, path)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    if world_size > 1:
        message: list[Any] = [error]
        dist.broadcast_object_list(message, src=0)
        error = message[0]
    if error is not None:
        raise RuntimeError(f"rank 0 could not write {path}: {error}.")


def whole_in(
    module: nn.Module, dtype: torch.dtype | None, without_frozen: bool
) -> dict[str, Tensor]:
    """The whole model on rank 0's host, floating-point parameters as `dtype` (None: as they
    compute); empty on other ranks. Every rank must call it.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    computed = {
        name: e.flat.dtypes.compute
        for e in onefold.engine_of(module).entries
        for name in e.part.names
    }
    cast: dict[int, Tensor] = {}  # tied names stay one tensor
    out: dict[str, Tensor] = {}
    for name, whole in onefold.full_state_dict(module).items():
        known = parameters.get(name)
        if without_frozen and known is not None and not known.requires_grad:
            continue
        if known is not None and whole.is_floating_point():
            wanted = dtype or computed.get(name, whole.dtype)
            whole = cast.setdefault(id(whole), whole.to(wanted))
        out[name] = whole
    return out


def _write(state: dict[str, Tensor], path: Path) -> None:
    """Under another name first: the file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # The format holds no two names of one memory: tied weights are written twice.
            save_file({name: t.clone().contiguous() for name, t in state.items()}, partial)
        else:
            torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
