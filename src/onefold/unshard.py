"""`onefold.unshard`: a plain model again, to change its structure or to hand it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.optim import remove_step_hooks
from onefold.optim.states import met
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, declare
from onefold.runtime.hooks import engine_of, unregister
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.parameter import ShardedParameter, disable_torch_function
from onefold.runtime.parts import whole_masters


def unshard(module: nn.Module) -> nn.Module:
    """Make the model a plain module of whole parameters, in master precision and without gradients.
    Collective. Return it.

    To change the structure of a sharded model (another head, other ties, more tokens), unshard it,
    change it on every rank alike, and `shard` it again. Parameters stay the same objects. Optimizers
    keep them but lose their states: make a new one, or save a checkpoint before and load it.

    Raises:
        ValueError: this recipe does not support it (offloaded, encoded, DTensors).
        RuntimeError: it was called inside a pass or another context, or gradients wait to be reduced.
    """
    engine = engine_of(module)
    _refuse_unless_possible(engine)
    engine.transfers.check()
    for optimizer in list(met):  # what they hold is of this rank's parts
        for entry in engine.entries:
            optimizer.state.pop(entry.param, None)
    _make_plain(engine)
    remove_step_hooks(engine)
    if engine.finalizer is not None:
        engine.finalizer.detach()
    unregister(module)
    engine.close()
    return module


def _refuse_unless_possible(engine: Engine) -> None:
    """Raise if this model cannot be made whole now, with the same error on every rank."""
    flats = engine.flats
    inside = {
        "a pass of the model": engine.in_any_pass(),
        "full_params": bool(engine.full_params_depth),
        "keep_gathered": bool(engine.gather.kept),
    }
    if where := next((name for name, now in inside.items() if now), None):
        raise RuntimeError(f"unshard was called inside {where}: call it outside, between steps.")
    if any(flat.waits for flat in flats):
        raise RuntimeError(
            "unshard was called while gradients kept under no_sync wait to be reduced; call it after"
            " optimizer.step()."
        )
    reasons = {
        "it keeps parameters or optimizer states on the host or on NVMe": engine.offloaded_flats,
        f"frozen={engine.recipe.frozen!r} keeps frozen weights encoded": any(
            flat.storage.encoded for flat in flats
        ),
        "some parameters are DTensors, of which each rank has its own part": any(
            entry.box for entry in engine.entries
        ),
    }
    if why := next((why for why, yes in reasons.items() if yes), None):
        raise ValueError(
            f"onefold.unshard does not work with this recipe: {why}. Change the structure before"
            " shard(), or export the model, build the new one and load what fits"
            " (onefold.export, then shard(..., weights=folder))."
        )


def _make_plain(engine: Engine) -> None:
    """Give the parameters their whole values, and remove everything of the engine from them, and its
    hooks from the modules. Collective. If memory runs out, the model is as it was.
    """
    with disable_torch_function(), torch.no_grad():
        wholes: list[tuple[Entry, torch.Tensor]] = []
        for flat in (flat for flat in engine.flats if not flat.unsharded):
            full = whole_masters(engine, flat)
            wholes += [(entry, flat.view(full, entry).clone()) for entry in flat.entries]
        # What needs memory is done: from here on the model changes
        for entry, whole in wholes:
            gradient_hooks.give_back(entry)
            entry.param.grad = None
            entry.param.data = whole
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
