"""A sharded module that stays gathered over several micro-batches, and whose gradients are reduced
once for all of them.

    unshard          gather every unit once                (stages 1 and 2: refresh the stale copies)
    micro-batches    forward and backward passes in any order, several graphs open; gradients stay whole on this rank
    reshard          release every unit
    reduce_grad      one reduction of the sums
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from onefold.runtime.engine import Engine
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.runtime.refresh import refresh


def unshard(module: nn.Module) -> None:
    """Gather all units of a sharded module, and keep them gathered until `reshard`. Collective.

    Returns once the gathers are launched; each unit is waited for where it is used. Passes in
    between gather nothing: forward passes of several micro-batches may be open, and backward passes
    may come in any order. An optimizer step in between releases the units, which are then gathered
    again as they are used.

    At stages 0 to 2 whole parameters exist anyway: copies that an optimizer step has made stale are
    gathered.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "unshard")
    if engine.unsharded:
        engine.gather.holding = True
        return
    if engine.progress.backward_open:  # a backward pass raised before it came to its end
        engine.passes.reset()
    with disable_torch_function(), torch.no_grad():
        engine.transfers.check()
        # First: writes to units that are not kept are not looked for
        engine.gather.keep(engine.gather.sharded, holding=True)
        refresh(engine.gather, engine.units)
        engine.gather.gather_kept()


def reshard(module: nn.Module) -> None:
    """Release the units that `unshard` has gathered.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "reshard")
    with disable_torch_function():
        engine.gather.let_go()


def reduce_grad(module: nn.Module, divide_by: float = 1.0) -> None:
    """Divide the gradients that wait on this rank, and reduce them: `.grad` is set, or added to.
    Collective. Does nothing if none wait.

    They wait after backward passes inside `accumulating(module)`, and under `onefold.no_sync` where
    the recipe reduces at the boundary.

    Args:
        divide_by: the number of micro-batches, if each of their losses is a mean.

    Raises:
        ValueError: the module was not sharded.
        RuntimeError: a pass of the module is under way, or `onefold.no_sync(module)` is open.
    """
    engine = engine_of(module)
    _refuse_inside(engine, "reduce_grad")
    if not engine.progress.pending:
        return
    if not engine.progress.sync:
        raise RuntimeError(
            "onefold.parallel.reduce_grad was called inside onefold.no_sync of the same module, which"
            " keeps gradients from being reduced: call it outside."
        )
    if divide_by != 1:
        with disable_torch_function(), torch.no_grad():
            _divide(engine, divide_by)
    engine.reduce_pending()


def _divide(engine: Engine, divisor: float) -> None:
    for buffer in (flat.grad for flat in engine.flats):
        if buffer is not None:
            buffer.div_(divisor)


@contextlib.contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Context of passes whose gradients stay whole on this rank, whatever the recipe says, until
    `reduce_grad`.
    """
    engine = engine_of(module)
    progress = engine.progress
    before, progress.holds_whole = progress.holds_whole, True
    try:
        with engine.unsynced():
            yield
    finally:
        progress.holds_whole = before


def _refuse_inside(engine: Engine, name: str) -> None:
    if engine.stack or (engine.progress.backward_open and engine.computing):
        raise RuntimeError(
            f"onefold.parallel.{name} was called inside a pass of the module; call it between"
            " micro-batches."
        )
