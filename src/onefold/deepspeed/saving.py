"""Save the whole model in one file. Rank 0 writes it, and every rank learns whether that worked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.deepspeed.facts import EngineFacts
from onefold.pretrained.adapters import embedding_layers


class WholeSaves(EngineFacts):
    """The part of `DeepSpeedEngine` that gathers the model."""

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model, with parameters in the compute dtype, at any stage. Every rank
        must call it.

        A name that ends in `.safetensors` is written in that format, any other with `torch.save`.
        An error never leaves an incomplete file of that name.

        Returns:
            True, on every rank, once the file is complete.

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
        """Return the whole model on rank 0's host, with parameters in the compute dtype. Every rank
        must call it.

        Other ranks get an empty dict: with None, `save_pretrained` would call `state_dict()`.
        Without frozen parameters it has those that peft writes beside adapters.
        """
        whole = whole_in(self.module, self.compute_dtype(), exclude_frozen_parameters, True)
        return whole if self.global_rank == 0 else {}

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return the whole model in fp32 on rank 0, and an empty dict elsewhere. Every rank must
        call it. See `onefold.full_state_dict`.
        """
        whole = onefold.full_state_dict(self.module)
        if exclude_frozen_parameters:
            for name, p in self.module.named_parameters(remove_duplicate=False):
                if not p.requires_grad:
                    whole.pop(name, None)
        return whole


def save_whole(
    module: nn.Module,
    path: Path,
    dtype: torch.dtype | None,
    without_frozen: bool,
    rank: int,
    world_size: int,
) -> None:
    """Gather the model on rank 0 and write it there. Every rank must call it.

    Args:
        dtype: of floating-point parameters; None takes the dtype in which each computes.

    Raises:
        RuntimeError: writing failed on rank 0. Every rank raises, so that none goes on and waits.
    """
    whole = whole_in(module, dtype, without_frozen)
    error: str | None = None
    if rank == 0:
        try:
            write_tensors(whole, path, safe=path.suffix == ".safetensors")
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    if world_size > 1:
        message: list[Any] = [error]
        dist.broadcast_object_list(message, src=0)
        error = message[0]
    if error is not None:
        raise RuntimeError(f"rank 0 could not write {path}: {error}.")


def whole_in(
    module: nn.Module,
    dtype: torch.dtype | None,
    without_frozen: bool,
    beside_adapters: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model on rank 0's host, and an empty dict elsewhere. Collective.

    Args:
        dtype: of floating-point parameters; None takes the dtype in which each computes.
        beside_adapters: `without_frozen` keeps embedding layers that peft writes beside adapters.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    computed = {
        name: e.flat.dtypes.compute for e in onefold.engine_of(module).entries for name in e.names
    }
    cast: dict[int, Tensor] = {}  # tied names stay one tensor
    out: dict[str, Tensor] = {}
    wholes = onefold.full_state_dict(module)
    kept = embedding_layers(module) if without_frozen and beside_adapters else []
    for name, whole in wholes.items():
        known = parameters.get(name)
        frozen = known is not None and not known.requires_grad
        if without_frozen and frozen and name not in kept:
            continue
        if known is not None and whole.is_floating_point():
            wanted = dtype or computed.get(name, whole.dtype)
            whole = cast.setdefault(id(whole), whole.to(wanted))
        out[name] = whole
    return out


def write_tensors(state: dict[str, Tensor], path: Path, safe: bool) -> None:
    """Write to a temporary name and rename it, so that the file is complete or absent.

    Args:
        safe: write safetensors, instead of a pickle for `torch.load`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if safe:
            from safetensors.torch import save_file

            # safetensors refuses tensors that share memory: tied weights are written twice
            save_file({name: t.clone().contiguous() for name, t in state.items()}, partial)
        else:
            torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
