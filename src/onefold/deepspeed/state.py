"""What leaves an engine: the whole model as one dict or file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import onefold
from onefold.pretrained.adapters import embedding_layers


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
    cast: dict[int, Tensor] = {}  # tied names stay one tensor
    out: dict[str, Tensor] = {}
    wholes = onefold.full_state_dict(module)
    kept = embedding_layers(module) if without_frozen and beside_adapters else []
    for name, whole in wholes.items():
        out[name] = whole
        if (known := parameters.get(name)) is None:
            continue
        if without_frozen and not known.requires_grad and name not in kept:
            del out[name]
        elif whole.is_floating_point():
            out[name] = cast.setdefault(id(whole), whole.to(dtype or known.dtype))
    return out


def write_whole(state: dict[str, Tensor], path: Path) -> None:
    """Write safetensors, by the name's suffix, else a pickle for `torch.load`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_or_absent(path) as partial:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # safetensors refuses tensors that share memory: tied weights are written twice
            save_file({name: t.clone().contiguous() for name, t in state.items()}, partial)
        else:
            torch.save(state, partial)


@contextlib.contextmanager
def whole_or_absent(path: Path) -> Iterator[Path]:
    """Yield a name to write to, and rename it to `path` at the end of the block."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
