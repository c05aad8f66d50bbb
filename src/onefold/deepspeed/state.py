"""What leaves an engine: the whole model as one dict or file, and what callers read from
`engine.optimizer`, which is torch's own optimizer.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.deepspeed.scaling import LossScaler
from onefold.deepspeed.schema import FP16
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


def write_whole(state: dict[str, Tensor], path: Path) -> None:
    """Write to a temporary name and rename it, so that the file is complete or absent: safetensors
    by the name's suffix, else a pickle for `torch.load`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            # safetensors refuses tensors that share memory: tied weights are written twice
            save_file({name: t.clone().contiguous() for name, t in state.items()}, partial)
        else:
            torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def show_scale(optimizer: Any, scaler: LossScaler | None) -> None:
    """Set what callers read of the loss scale. These are plain attributes: `optimizer.loss_scale = 8`
    changes nothing, `optimizer.loss_scaler.cur_scale = 8` does.

    | attribute                          | what it is                                               |
    |------------------------------------|----------------------------------------------------------|
    | `loss_scaler`                      | the engine's `LossScaler`; outside fp16 its scale is 1   |
    | `cur_scale`, `loss_scale`          | its scale; changes of the scaler are followed            |
    | `dynamic_loss_scale`               | whether the scale changes by itself                      |
    | `overflow`                         | whether the last step was skipped                        |
    """
    shown = scaler or LossScaler(FP16(loss_scale=1))
    seen: weakref.ref[Any] = weakref.ref(optimizer)

    def follow(scale: float) -> None:
        if (there := seen()) is not None:
            there.cur_scale = there.loss_scale = scale

    shown.follower = follow
    follow(shown.scale)
    optimizer.loss_scaler, optimizer.overflow = shown, False
    optimizer.dynamic_loss_scale = shown.dynamic


def show_leaves(optimizer: Any, leaves: list[nn.Module]) -> None:
    """Set `optimizer.leaf_parameters`, {leaf module: its trainable parameters}, and
    `ds_z3_leaf_module` of these parameters. Neither keeps the model alive.
    """
    optimizer.leaf_parameters = weakref.WeakKeyDictionary()
    for leaf in leaves:
        parameters = [p for p in leaf.parameters() if p.requires_grad]
        optimizer.leaf_parameters[leaf] = parameters
        for parameter in parameters:
            parameter.__dict__["ds_z3_leaf_module"] = weakref.proxy(leaf)
