"""A whole model in one file, written by rank 0, while every rank learns whether it worked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.integrations.deepspeed.facts import EngineFacts


class WholeSaves(EngineFacts):
    """The part of `DeepSpeedEngine` that gathers the model."""

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model, parameters in the compute dtype, at every stage; every rank must
        call it.

        A name in `.safetensors` gets that format, any other `torch.save`. The file appears whole or
        not at all.

        Returns:
            True, on every rank, when the file is there.

        Raises:
            RuntimeError: rank 0 could not write it (raised on every rank).
        """
        save_whole(
            self.module,
            Path(save_dir) / save_filename,
            self.compute_dtype(),
            exclude_frozen_parameters,
            self.global_rank,
            self.world_size,
        )
        return True

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """The former name of `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """The whole model on rank 0's host, parameters in the compute dtype; empty elsewhere, where
        `save_pretrained` would take None for "ask the model". Every rank must call it.
        """
        whole = whole_in(self.module, self.compute_dtype(), exclude_frozen_parameters)
        return whole if self.global_rank == 0 else {}

    def module_state_dict(self) -> dict[str, Tensor]:
        """`onefold.full_state_dict(module)`: whole, on rank 0, fp32; empty elsewhere. Every rank
        must call it.
        """
        return onefold.full_state_dict(self.module)


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
