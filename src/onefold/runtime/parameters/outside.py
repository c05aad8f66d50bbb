"""Operations on parameters outside a forward pass of their model: a penalty on weights, a
temperature in the loss, tied weights.

With gradients enabled, an operation on a sharded parameter gathers the whole parameter and computes
on it. Autograd sees the same leaf that the forward pass uses. So the gradient of the operation is
accumulated with that of the forward pass, and reduced with it.

[Note: outside, nothing stays gathered] At stage 3 a unit that is gathered for one operation is
released after it. Where autograd saves a tensor in the gathered buffer, it keeps a handle that does
not stay (runtime/saved.py). Where the operation returns a view of the buffer, the user gets a copy,
which keeps the graph. A penalty over all parameters therefore never holds more than one unit.

At stage 3 each operation is a gather, so every rank must do the same operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from onefold.memory import storage_of
from onefold.runtime.boxes import local_of
from onefold.runtime.parameters.interval import disable_torch_function, entry_of, mapped, spec_of
from onefold.runtime.saved import saving

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.parameters.parameter import OwningEngine
    from onefold.runtime.unit import Unit


def compute_outside(func: Any, args: Any, kwargs: dict[str, Any], entries: list[Entry]) -> Any:
    """Run `func` with gradients on the whole parameters of `entries`, which are among the
    arguments. See the docstring of this module. Collective at stage 3.
    """
    used: list[tuple[OwningEngine, Unit, bool]] = []
    with disable_torch_function():
        for entry in entries:
            engine = entry.engine()
            assert engine is not None
            unit = engine.begin_outside(entry)
            if all(u is not unit for _, u, _ in used):
                used.append((engine, unit, engine.gather.gather_alone(unit)))
        engines = {id(engine): engine for engine, _, _ in used}.values()
        by_storage = {k: v for engine in engines for k, v in engine.gather.by_storage.items()}
        args, kwargs = mapped((args, kwargs), _whole)
        with saving([engine.gather for engine in engines], stays=False):
            out = func(*args, **kwargs)
            leaves = {id(entry.compute) for entry in entries}
            out = mapped(out, lambda t: _copied(t, by_storage, leaves))
        for engine, unit, gathered in used:
            if gathered:
                engine.gather.release(unit)
        for engine in engines:
            engine.passes.watch_outside(out)
    return out


def _whole(t: torch.Tensor) -> torch.Tensor:
    if not getattr(type(t), "_onefold_faced", False):
        return t
    entry, spec = entry_of(t), spec_of(t)
    if spec is not None and "_onefold_entry" not in t.__dict__:
        return spec.gather(t.detach(), "an operation with gradients")
    return t if entry is None else entry.compute


def _copied(t: torch.Tensor, by_storage: dict[int, tuple[Unit, Flat]], leaves: set[int]) -> Any:
    """Return a tensor that an operation has returned, or a copy if it lies in a gathered buffer.

    If the operation returned the parameter itself, as `p.float()` does, it becomes a view: a hook
    that the user registers on the result must not stay on the parameter.
    """
    if id(t) in leaves:
        t = t.view_as(t)
    return t.clone() if t.layout is torch.strided and storage_of(local_of(t)) in by_storage else t
