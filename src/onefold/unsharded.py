"""`onefold.unsharded`: change the structure of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.optim import unwatch, whole
from onefold.runtime.engine import Engine
from onefold.runtime.registry import engine_of, is_sharded, spoil, unregister
from onefold.runtime.state import unsharding
from onefold.shard import shard


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model is a plain module of whole parameters, to change its structure: another
    head, other ties, more tokens. Collective.

    Parameters are the same objects, in master precision, without gradients. On leaving, the model
    is sharded again by the same recipe, over the same ranks; rank 0's values are everybody's. All
    ranks must make the same changes.

    Optimizers made before stay good: states (whole inside) go on for every parameter whose shape
    stayed. A new parameter is added by you (`optimizer.add_param_group`). A parameter that left the
    model stays in its group and is not stepped, having no gradient.

    If the block raises on any rank, it raises on all, and the model refuses to be called until it
    is sharded anew by `onefold.shard`.

    Raises:
        ValueError: this recipe has no way back (offloaded, in tiles, encoded), or the ranks made
            different models.
        RuntimeError: it was entered inside a pass or with unreduced gradients, or another rank
            raised inside.
    """
    engine = _ready(module)
    optimizers = whole.optimizers_over(engine)
    states = whole.gather(engine, optimizers)
    params = {entry.number: entry.param for entry in engine.entries}
    unsharding.make_plain(engine)
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
        whole.cut(engine, optimizers)
    except BaseException as failure:
        if not is_sharded(module):
            spoil(module, failure)
            engine.group.close()
        raise


def unshard(module: nn.Module) -> None:
    """Make the model a plain module of whole parameters for good: another engine is to have it.
    Collective. Optimizers of before keep the parameters, and nothing of their states.

    Raises:
        ValueError, RuntimeError: as `unsharded`.
    """
    engine = _ready(module)
    unsharding.make_plain(engine)
    _let_go(engine, module, but_group=False)


def _ready(module: nn.Module) -> Engine:
    """Its engine, which can be taken from it."""
    engine = engine_of(module)
    unsharding.refuse_unless_possible(engine)
    engine.masters.about_to_write()
    engine.transfers.check()
    return engine


def _shard_again(engine: Engine, module: nn.Module) -> None:
    """The same call of `shard()`. Whoever holds `engine` (a meter, a scaler, a Checkpointer) has
    the new one in his hands afterwards.
    """
    given, group, step = engine.given, engine.group, engine.step
    moved = (
        next((p.device for p in module.parameters() if not p.is_meta), group.device) != group.device
    )
    if moved:
        group.close()
    shard(module, engine.recipe, group=given[0] if moved else group, units=given[1], init=given[2])
    again = engine_of(module)
    again.given, again.progress.step = given, step
    engine.__dict__ = again.__dict__


def _let_go(engine: Engine, module: nn.Module, but_group: bool = True) -> None:
    """The engine forgets the model; its communicators may stay, to leave by."""
    unwatch(engine)
    if engine.finalizer is not None:
        engine.finalizer.detach()
    unregister(module)
    engine.close(but_group=but_group)


def _tell(engine: Engine, error: BaseException | None) -> None:
    """Ranks tell each other whether the block raised. Collective.

    Raises:
        BaseException: `error`, if it did here.
        RuntimeError: it did elsewhere.
    """
    payload = torch.tensor([error is not None], dtype=torch.uint8)
    place = CollectiveContext("control", "(unsharded)", engine.step, "state")
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
