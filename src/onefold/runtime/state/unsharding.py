"""Turning a sharded model back into a plain module of whole parameters, which stay the same
objects. See `onefold.unsharded`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.runtime.entry import declare
from onefold.runtime.gathers import whole_masters
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.parameter import ShardedParameter, disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


def refuse_unless_possible(engine: Engine) -> None:
    """Raise if this model cannot be made whole now, with the same error on every rank.

    Raises:
        RuntimeError: the model is in a pass or another context, or has unreduced gradients.
        ValueError: the recipe does not support it.
    """
    flats = [flat for unit in engine.units for flat in unit.flats]
    if engine.stack or engine.progress.backward_open:
        raise RuntimeError(
            "unsharded was entered inside a pass of the model; enter it between steps."
        )
    if engine.full_params_depth or engine.gather.kept_gathered:
        other = "full_params" if engine.full_params_depth else "keep_gathered"
        raise RuntimeError(
            f"unsharded was entered inside {other} of the same model; leave that one first."
        )
    if any(flat.grads or flat.held for flat in flats):
        raise RuntimeError(
            "unsharded was entered while gradients kept under no_sync wait to be reduced; enter it"
            " after optimizer.step()."
        )
    why = None
    if engine.offloaded_flats:
        why = "it keeps parameters or optimizer states on the host or on NVMe"
    elif any(flat.tiled for flat in flats):
        why = f"weights above tile={engine.recipe.tile} are cut into tiles"
    elif any(flat.storage.encoded for flat in flats):
        why = f"frozen={engine.recipe.frozen!r} keeps frozen weights encoded"
    elif engine.recipe.moments is not None:
        why = f"moments={engine.recipe.moments!r} keeps the optimizer's states in another format"
    if why is not None:
        raise ValueError(
            f"onefold.unsharded does not work with this recipe: {why}. Change the structure before"
            " shard(), or save a checkpoint, build the new model and load what fits"
            " (onefold.export, then shard(..., weights=folder))."
        )


def make_plain(engine: Engine) -> None:
    """Give the parameters their whole values, unit by unit, and remove everything of the engine
    from them, and its hooks from the modules. Collective.
    """
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            for flat in unit.flats:
                full = None if flat.unsharded else whole_masters(engine.resources, flat)
                for entry in flat.entries if full is not None else ():
                    gradient_hooks.give_back(entry)
                    entry.param.grad = None
                    entry.param.data = flat.view(full, entry).clone()  # type: ignore[arg-type]
                    _unwrap(entry.param)
                    if entry.param.dtype != entry.declared:
                        declare(entry.param, entry.declared)
        for handle in engine.handles:
            handle.remove()
        engine.handles.clear()


def _unwrap(param: nn.Parameter) -> None:
    for key in [key for key in param.__dict__ if key == "onefold" or key.startswith("_onefold")]:
        if key != "_onefold_wire":  # of the caller of shard(), which may be called again
            del param.__dict__[key]
    if isinstance(param, ShardedParameter):  # a subclass was made of the original's class
        kind: Any = type(param)
        plain: Any = nn.Parameter if kind is ShardedParameter else kind.__bases__[1]
        param.__class__ = plain
