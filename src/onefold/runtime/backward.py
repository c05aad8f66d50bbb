"""The end of a backward pass, good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.runtime.agree import agree_and_finish
from onefold.runtime.interval import disable_torch_function
from onefold.runtime.unreduced import show_unreduced

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


def _end_differentiating(engine: Engine) -> None:
    """The end of a backward pass that accumulated nothing (torch.autograd.grad): nothing to
    reduce, nothing to agree on.
    """
    engine.progress.backward_open = engine.progress.differentiating = False
    if not engine.progress.creates_graph:
        _close_graphs(engine)
    engine.reached.clear()
    engine.gather.end_backward()
    engine.activations.end_backward()
    engine.memory.look()


def _close_graphs(engine: Engine) -> None:
    """The backward pass has used up the graphs of the passes that it came to; of one pass, if
    none was noticed.
    """
    closed = [p for p in dict.fromkeys(engine.reached) if p.open]
    for each in closed:
        each.open = False
    engine.progress.open_graphs = max(
        0, engine.progress.open_graphs - (len(closed) if engine.reached else 1)
    )
    engine.progress.root_graphs = max(
        0, engine.progress.root_graphs - (sum(p.of_root for p in closed) if engine.reached else 1)
    )
    engine.reached.clear()


def end_backward(engine: Engine) -> None:
    with disable_torch_function(), torch.no_grad():
        if engine.progress.differentiating:
            _end_differentiating(engine)
            return
        engine.reduce.collect()
        engine.gather.join_rest_of_backward()
        used = engine.reduce.used
        if used and not engine.progress.deferring:
            engine.reduce.launch_rest()
            agree_and_finish(engine, used)
            engine.progress.step += 1
            engine.reduced_since_gather = True
        engine.outside_graphs = False
        if used:
            _close_graphs(engine)
        if engine.progress.deferring or engine.progress.holding:
            show_unreduced(engine.reduce)
        engine.steps.join()
        engine.progress.backward_open = False
        engine.gather.end_backward()
        engine.activations.end_backward()
        engine.transfers.down.wait()  # what the user finds in `.grad` is there
        engine.memory.look()
        engine.transfers.host.look()
        for unit in engine.units:
            unit.waiting = set()


def reset(engine: Engine) -> None:
    """Clean up after a forward or backward pass that raised."""
    if not engine.progress.differentiating:
        engine.reduce.drop()
    engine.progress.backward_open = engine.progress.differentiating = False
    engine.progress.open_graphs = engine.progress.root_graphs = 0
    engine.reached.clear()
    engine.outside_graphs = False
    engine.gather.end_backward()
    engine.activations.end_backward()
