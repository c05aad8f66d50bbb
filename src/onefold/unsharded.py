"""`onefold.unsharded`: change the structure of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.optim import remove_step_hooks, whole
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, declare
from onefold.runtime.hooks import engine_of, is_sharded, spoil, unregister
from onefold.runtime.parameters import gradient_hooks
from onefold.runtime.parameters.parameter import ShardedParameter, disable_torch_function
from onefold.runtime.parts import whole_masters
from onefold.shard import shard


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Context in which the model is a plain module of whole parameters, to change its structure:
    another head, other ties, more tokens. Collective.

    Parameters are the same objects, in master precision, without gradients. On exit, the model is
    sharded again by the same recipe over the same ranks, from rank 0's values. All ranks must make
    the same changes.

    Existing optimizers stay valid. Their states, whole inside the block, are kept for every
    parameter that keeps its shape. Add new parameters yourself (`optimizer.add_param_group`). A
    parameter that was removed from the model stays in its group, but is not stepped, because it
    gets no gradient.

    If the block raises on any rank, it raises on all. The model then cannot be called until
    `onefold.shard` has sharded it again.

    Raises:
        ValueError: this recipe does not support it (offloaded, in tiles, encoded), or the ranks
            made different models.
        RuntimeError: it was entered inside a pass or with unreduced gradients, or another rank
            raised inside.
    """
    engine = _ready(module)
    optimizers = whole.optimizers_over(engine)
    states = whole.gather(engine, optimizers)
    params = {entry.number: entry.param for entry in engine.entries}
    shapes = {id(entry.param): tuple(entry.shape) for entry in engine.entries}
    _make_plain(engine)
    for optimizer, known in zip(optimizers, states, strict=True):
        for number, state in known.items():
            optimizer.state[params[number]] = state
    del params, states
    _let_go(engine, module)
    error: Exception | None = None
    try:
        try:
            yield module
        except Exception as raised:
            error = raised
        _tell(engine, error)
        _shard_again(engine, module)
        whole.drop_misfits(engine, optimizers, shapes)
    except BaseException as failure:
        if not is_sharded(module):
            spoil(module, failure)
            engine.group.close()
        raise


def unshard(module: nn.Module) -> None:
    """Make the model a plain module of whole parameters for good, to give it to another engine.
    Collective. Existing optimizers keep their parameters but lose their states.

    Raises:
        ValueError, RuntimeError: as `unsharded`.
    """
    engine = _ready(module)
    _make_plain(engine)
    _let_go(engine, module, but_group=False)


def _ready(module: nn.Module) -> Engine:
    """Return the model's engine, after checking that the model can be unsharded now."""
    engine = engine_of(module)
    _refuse_unless_possible(engine)
    engine.transfers.check()
    return engine


def _shard_again(engine: Engine, module: nn.Module) -> None:
    """Repeat the call of `shard()`. `engine` takes over the new engine's state, so that objects
    which hold it (a meter, a scaler, a Checkpointer) use the new one.
    """
    given, group, step = engine.given, engine.group, engine.step_count
    moved = (
        next((p.device for p in module.parameters() if not p.is_meta), group.device) != group.device
    )
    if moved:
        group.close()
    shard(module, engine.recipe, **(given if moved else given | {"group": group}))
    again = engine_of(module)
    again.given, again.progress.step_count = given, step
    again.progress.follower = engine.progress.follower
    engine.__dict__ = again.__dict__


def _let_go(engine: Engine, module: nn.Module, but_group: bool = True) -> None:
    """Detach the engine from the model. With `but_group` the communicators stay open, for the
    exchange at the end of the block.
    """
    remove_step_hooks(engine)
    if engine.finalizer is not None:
        engine.finalizer.detach()
    unregister(module)
    engine.close(but_group=but_group)


def _tell(engine: Engine, error: BaseException | None) -> None:
    """Exchange whether the block raised on any rank. Collective.

    Raises:
        BaseException: `error`, if it raised on this rank.
        RuntimeError: it raised on another rank.
    """
    payload = torch.tensor([error is not None], dtype=torch.uint8, device="cpu")
    place = CollectiveContext("control", "(unsharded)", engine.step_count, "state")
    try:
        told: Any = [bool(t.item()) for t in engine.group.exchange_control(payload, place)]
    finally:
        if error is not None:
            raise error
    if any(told):
        raise RuntimeError(
            "the block under onefold.unsharded raised on rank"
            f" {engine.group.ranks[told.index(True)]}: its message says what to mend."
        )


def _refuse_unless_possible(engine: Engine) -> None:
    """Raise if this model cannot be made whole now, with the same error on every rank.

    Raises:
        RuntimeError: the model is in a pass or another context, or has unreduced gradients.
        ValueError: the recipe does not support it.
    """
    flats = [flat for unit in engine.units for flat in unit.flats]
    if engine.in_any_pass():
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
    elif any(flat.boxed for flat in flats):
        why = "some parameters are DTensors, of which each rank has its own part"
    elif engine.recipe.moments is not None:
        why = f"moments={engine.recipe.moments!r} keeps the optimizer's states in another format"
    if why is not None:
        raise ValueError(
            f"onefold.unsharded does not work with this recipe: {why}. Change the structure before"
            " shard(), or save a checkpoint, build the new model and load what fits"
            " (onefold.export, then shard(..., weights=folder))."
        )


def _make_plain(engine: Engine) -> None:
    """Give the parameters their whole values, and remove everything of the engine from them, and its
    hooks from the modules. Collective. If memory runs out, the model is as it was.
    """
    with disable_torch_function(), torch.no_grad():
        wholes: list[tuple[Entry, torch.Tensor]] = []
        for flat in (flat for unit in engine.units for flat in unit.flats if not flat.unsharded):
            full = whole_masters(engine.resources, flat)
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
