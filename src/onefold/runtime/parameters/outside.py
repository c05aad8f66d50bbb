"""Operations on parameters outside a forward pass of their model: a penalty on weights, a
temperature in the loss, tied weights.

With gradients enabled, an operation on a sharded parameter gathers the whole parameter and computes
on it. Autograd sees the same leaf that the forward pass uses. So the gradient of the operation is
accumulated with that of the forward pass, and reduced with it.

[Note: outside, nothing stays gathered] At stage 3 a unit that is gathered for one operation is
released after it. Where autograd saves a tensor in the gathered buffer, only its place there is
saved; the backward pass gathers the unit again and returns a copy of the elements. Where the
operation returns a view of the buffer, the user gets a copy, which keeps the graph. A penalty over
all parameters therefore never holds more than one unit.

At stage 3 each operation is a gather, so every rank must do the same operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.memory import storage_of
from onefold.runtime.boxes import dtensor_over, is_dtensor, local_of
from onefold.runtime.differentiate import is_checkpoint, keep_hooks_from_compiler, tensors_in
from onefold.runtime.parameters.interval import disable_torch_function, entry_of, mapped, spec_of
from onefold.runtime.parameters.values import ForwardPass

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.parameters.parameter import OwningEngine
    from onefold.runtime.unit import Unit


class Place:
    """The place of a saved tensor in a gathered buffer: autograd keeps it, not the elements. `spec`:
    of the DTensor whose local tensor it is.
    """

    __slots__ = ("engine", "flat", "offset", "size", "spec", "stride", "unit")

    def __init__(self, engine: OwningEngine, unit: Unit, flat: Flat, t: torch.Tensor) -> None:
        self.engine, self.unit, self.flat = engine, unit, flat
        self.spec = t._spec if is_dtensor(t) else None  # type: ignore[attr-defined]
        t = local_of(t)
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()

    def read(self) -> torch.Tensor:
        self.engine.backward_event()
        with disable_torch_function(), torch.no_grad():
            gathered = self.engine.gather_outside(self.unit)
            assert self.flat.full is not None
            out = self.flat.full.as_strided(self.size, self.stride, self.offset).clone()
            if gathered:
                self.engine.release_outside(self.unit)
        return out if self.spec is None else dtensor_over(out, self.spec)


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
                used.append((engine, unit, engine.gather_outside(unit)))
        by_storage = {k: v for engine, _, _ in used for k, v in engine.gathered_buffers.items()}
        owner = {id(unit): engine for engine, unit, _ in used}
        args, kwargs = mapped((args, kwargs), _whole)
        with _saving(by_storage, owner):
            out = func(*args, **kwargs)
            leaves = {id(entry.compute) for entry in entries}
            out = mapped(out, lambda t: _copied(t, by_storage, leaves))
        for engine, unit, gathered in used:
            if gathered:
                engine.release_outside(unit)
        for engine in {id(e): e for e, _, _ in used}.values():
            _watch(engine, out)
    return out


def _whole(t: torch.Tensor) -> torch.Tensor:
    if not getattr(type(t), "_onefold_faced", False):
        return t
    entry, spec = entry_of(t), spec_of(t)
    if spec is not None and "_onefold_entry" not in t.__dict__:
        return spec.gather(t.detach(), "an operation with gradients")
    return t if entry is None else entry.seen()


def _saving(
    by_storage: dict[int, tuple[Unit, Flat]], owner: dict[int, OwningEngine]
) -> saved_tensors_hooks:
    """Return hooks that save tensors in gathered buffers as places. All other tensors are passed to
    the hooks that were active before, if any.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    outer_pack, outer_unpack = top if top else (None, None)
    recomputed = is_checkpoint(outer_pack)  # [Note: a checkpoint around a pass]

    def pack(t: torch.Tensor) -> Any:
        hit = by_storage.get(storage_of(local_of(t))) if t.layout is torch.strided else None
        if (
            hit is not None
            and id(hit[0]) in owner
            and t.dtype == hit[1].dtypes.compute
            and not recomputed
        ):
            return Place(owner[id(hit[0])], *hit, t)
        if outer_pack:
            return outer_pack(t)
        return t if t.grad_fn is None else t.detach()

    def unpack(saved: Any) -> torch.Tensor:
        if type(saved) is Place:
            return saved.read()
        return outer_unpack(saved) if outer_unpack else saved

    return saved_tensors_hooks(pack, unpack)


def _copied(t: torch.Tensor, by_storage: dict[int, tuple[Unit, Flat]], leaves: set[int]) -> Any:
    """Return a tensor that an operation has returned, or a copy if it lies in a gathered buffer.

    If the operation returned the parameter itself, as `p.float()` does, it becomes a view: a hook
    that the user registers on the result must not stay on the parameter.
    """
    if id(t) in leaves:
        t = t.view_as(t)
    return t.clone() if t.layout is torch.strided and storage_of(local_of(t)) in by_storage else t


def _watch(engine: OwningEngine, out: Any) -> None:
    """Hook `out`: a backward pass through it counts as one of this engine's, and raises if the
    parameters have been written to since.
    """
    current_pass = ForwardPass(engine.write_counters)

    def backward_reached(_: torch.Tensor) -> None:
        if not engine.progress.closed:
            current_pass.backward_reached(True)
            with disable_torch_function():
                engine.backward_event()

    for t in tensors_in(out):
        if t.requires_grad:
            t.register_hook(backward_reached)


for _function in (_saving, _watch):
    keep_hooks_from_compiler(_function)
