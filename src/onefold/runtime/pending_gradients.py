"""Gradients that wait for the boundary, and which parameters get gradients at all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onefold.layout import overlap
from onefold.memory import GRADIENTS
from onefold.recipe import Tier
from onefold.runtime.differentiate import keep_hooks_from_compiler
from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    get_grad,
)
from onefold.runtime.parameters.values import is_storageless

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.resources import Resources
    from onefold.runtime.unit import Unit


# -- pending gradients -----------------------------------------------------------------------------
#
# Gradients that wait for the boundary: what the user sees of them, and may do to them.
#
# Under `onefold.no_sync` a unit's gradient stays whole in its flat buffer, unreduced. `.grad` shows
# this rank's part of it, so that zero_grad() has something to drop. The engine follows a drop. It
# refuses any other change, which would reach only one rank's part of one rank's gradient.


def show_pending(reduce: Reducer) -> None:
    """Let `.grad` show this rank's part of gradients kept under no_sync, so that zero_grad() has
    something to drop.
    """
    reduce.shows = True
    for unit in reduce.units:
        for flat in unit.flats:
            for entry in flat.entries:
                if flat.held and entry.number in reduce.held and entry.param.grad is None:
                    _show_held(entry)
                elif entry.filled and entry.param.grad is None:
                    run, (a, b) = flat.run_of[entry.index], flat.local(entry)
                    part = (
                        flat.grads[run][a - run[0] : b - run[0]] if b > a else flat.grads[run][:0]
                    )
                    entry.pending_grad = entry.param.grad = flat.storage.show_gradient(
                        entry, part, f"the unreduced gradient of {entry.slot.name!r}"
                    )


def whole_local_gradient(entry: Entry, weight: float = 1.0) -> torch.Tensor | None:
    """Return a copy of this rank's whole gradient of `entry` that waits for the boundary; None if
    none waits whole.

    `weight`: what every gradient was multiplied with on arrival (`PassFollower.weight`).
    """
    flat = entry.flat
    run = flat.run_of.get(entry.index)
    if not entry.filled or entry.pending_grad is None or run not in flat.grads:
        return None
    with disable_torch_function(), torch.no_grad():
        part = flat.grads[run][entry.slot.start - run[0] : entry.slot.end - run[0]]
        return part.view(entry.slot.shape) / (flat.early_scale * entry.parts * weight)


def take_pending(reduce: Reducer) -> None:
    """Forget the unreduced gradients that the user has dropped. Called before the rest are used.

    Raises:
        RuntimeError: the user changed an unreduced gradient in another way than by dropping it.
    """
    shown = [
        (e, e.pending_grad)
        for unit in reduce.units
        for e in unit.entries
        if e.pending_grad is not None
    ]
    # zero_grad(set_to_none=False) writes zeros to all parts. A part of zeros alone proves no drop:
    # it may have been zero before (unused rows of an embedding), and then have been scaled by the
    # user. So zeros count as a drop only if all parts were written to.
    all_written = all(e.param.grad is not kept or kept._version for e, kept in shown)
    for entry, kept in shown:
        entry.pending_grad = None
        now, entry.param.grad = entry.param.grad, None
        zeroed = now is kept and kept._version and not is_storageless(kept) and not kept.any()
        if now is None or (zeroed and (all_written or kept.numel() == entry.slot.numel)):
            entry.filled = False
            _drop_held(reduce, entry)
        elif now is not kept or kept._version:
            raise RuntimeError(
                f"the gradient of {entry.slot.name!r} was changed between micro-batches under"
                " no_sync, where `.grad` shows only this rank's unreduced part. Change gradients"
                " after the last micro-batch. Dropping them is fine: optimizer.zero_grad(), or"
                " `.grad = None` for some of them."
            )
    for unit in reduce.units:
        for flat in unit.flats:
            if flat.grads and not any(e.filled for e in flat.entries):
                for buffer in flat.grads.values():
                    reduce.pool.give(buffer)
                flat.grads.clear()
            if flat.held and not any(e.number in reduce.held for e in flat.entries):
                for buffer in flat.held.values():
                    reduce.pool.give(buffer)
                flat.held.clear()


def follow_runs(reduce: Reducer, flat: Flat) -> None:
    """Move gradients that wait for the boundary to buffers over the present runs. Called after
    parameters were frozen or trained again, which changes the ranges that travel.
    """
    if not flat.grads and not flat.held:
        return
    take_pending(reduce)  # `.grad` shows views of the old buffers
    if flat.grads:
        whole, flat.grads = flat.grads, {}
        mine = [e for e in flat.entries if e.filled]
        _move(reduce, flat, whole, flat.grads, mine, (0, flat.layout.numel))
    if flat.held:
        sums, flat.held = flat.held, {}
        mine = [e for e in flat.entries if e.number in reduce.held]
        _move(reduce, flat, sums, flat.held, mine, flat.shard)
    show_pending(reduce)


def _move(
    reduce: Reducer,
    flat: Flat,
    old: dict[tuple[int, int], torch.Tensor],
    new: dict[tuple[int, int], torch.Tensor],
    entries: list[Entry],
    present: tuple[int, int],
) -> None:
    """Move the gradients of `entries` from the buffers `old` into buffers `new` over the present
    runs, zero elsewhere. Buffers cover the part of a run that lies in the addresses `present`.
    """
    dtypes = {buffer.dtype for buffer in old.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else flat.dtypes.sums
    with disable_torch_function(), torch.no_grad():
        for run in flat.runs:
            if all(flat.run_of.get(e.index) != run for e in entries):
                continue
            (start, end) = overlap(run, present)
            new[run] = reduce.pool.take(end - start, dtype, GRADIENTS, flat.unit_name).zero_()
        for before, buffer in old.items():
            origin, _ = overlap(before, present)
            for entry in entries:
                span = (entry.slot.start, entry.slot.end)
                if before[0] <= span[0] and span[1] <= before[1]:
                    run = flat.run_of[entry.index]
                    (a, b), (start, _) = overlap(span, present), overlap(run, present)
                    new[run][a - start : b - start].copy_(buffer[a - origin : b - origin])
            reduce.pool.give(buffer)


def _show_held(entry: Entry) -> None:
    """Let `.grad` show the part that this rank steps of a sum held inside its group."""
    flat, run = entry.flat, entry.flat.run_of[entry.index]
    (first, _), (a, b) = overlap(run, flat.shard), flat.local(entry)
    part = flat.held[run][a - first : b - first] if b > a else flat.held[run][:0]
    entry.pending_grad = entry.param.grad = flat.storage.show_gradient(
        entry, part, f"the gradient of {entry.slot.name!r} before the boundary"
    )


def _drop_held(reduce: Reducer, entry: Entry) -> None:
    """Zero the held sum of a gradient that the user has dropped."""
    flat = entry.flat
    reduce.held.discard(entry.number)
    run = flat.run_of.get(entry.index)
    if run is not None and run in flat.held:
        span = overlap(run, flat.shard)
        a, b = overlap((entry.slot.start, entry.slot.end), span)
        flat.held[run][a - span[0] : b - span[0]].zero_()


def gradient_bytes(units: Sequence[Unit], resources: Resources, tier: Tier) -> int:
    """Return the bytes of gradients on a tier that wait for the optimizer: of reduced ones, and on
    the device also of those that wait for the boundary.
    """
    ledger = resources.transfers.ledgers[tier]
    # In a backward pass buffers change owners: only the ledger's own count is right
    if resources.progress.backward_open:
        return ledger.held(GRADIENTS)
    with disable_torch_function():
        here = [f for u in units for f in u.flats if f.storage.gradient_tier is tier]
        reduced = sum(
            unique_bytes(
                [get_grad(e.param) for f in here for e in f.entries if e.pending_grad is None]
            )
        )
    if tier is not Tier.DEVICE:
        return reduced
    waiting = [
        b for u in units for flat in u.flats for b in (*flat.grads.values(), *flat.held.values())
    ]
    return reduced + sum(b.numel() * b.element_size() for b in waiting)


def unique_bytes(tensors: Iterable[torch.Tensor | None]) -> Iterator[int]:
    """The bytes of each storage among `tensors`, once."""
    seen = set()
    with disable_torch_function():
        for t in tensors:
            if t is not None and (storage := t.untyped_storage())._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()


# -- which parameters train ------------------------------------------------------------------------
#
# Which parameters train: `requires_grad` as the user has set it, and hooks on their gradients.


def follow_trainable(reduce: Reducer) -> None:
    """Follow `requires_grad` as the user has set it, and hook the gradients of trainable
    parameters.
    """
    for unit in reduce.units:
        follow_trainable_of(reduce, unit)


def follow_trainable_of(reduce: Reducer, unit: Unit) -> None:
    for flat in unit.flats:
        if flat.unsharded:
            continue
        before, there = flat.runs, flat.refresh_active(reduce.shows)
        if flat.runs != before:
            follow_runs(reduce, flat)
        if not there or flat.hooked:
            continue
        flat.hooked = True
        for entry in flat.entries:
            if entry.active and not entry.hooked:
                entry.hooked = True
                # Its own method would register on the optimizer's object (`Whole`)
                torch.Tensor.register_post_accumulate_grad_hook(
                    entry.compute, _arrival(weakref.ref(reduce), weakref.ref(entry))
                )
                refuse_gradients(entry)


def refuse_gradients(entry: Entry) -> None:
    """Let a backward pass raise that accumulates a gradient into the optimizer's parameter itself.

    Autograd knows the whole parameter. It comes to the other one only if code has given that to an
    autograd Function or the like, which computes with a tensor's memory: with this rank's elements
    at most. Nothing would reduce that gradient.
    """
    known = weakref.ref(entry)

    def refuse(_: Any) -> None:
        if (
            (e := known()) is not None
            and (engine := e.engine()) is not None
            and not engine.progress.closed
            and getattr(e.param, "_onefold_faced", False)
        ):
            raise ShardedParameterError(
                f"parameter {e.slot.name!r} was given to an autograd Function, or to other code that"
                " computes with a tensor's memory: its gradient would not be reduced. In the forward"
                " pass read it as an attribute of its module (`module.weight`), which is the whole"
                " there; elsewhere give the code `parameter.clone()`."
            )

    with disable_torch_function(), torch.enable_grad():
        # The parameter refers to this node weakly: the entry keeps it
        entry.accumulates = torch.autograd.graph.get_gradient_edge(entry.param).node
        entry.accumulates.register_prehook(refuse)


def _arrival(reduce: weakref.ref[Reducer], entry: weakref.ref[Entry]) -> Any:
    def hook(_: torch.Tensor) -> None:
        if (r := reduce()) is not None and (e := entry()) is not None and not r.progress.closed:
            r.arrived(e)

    return hook


for _function in (refuse_gradients, _arrival):
    keep_hooks_from_compiler(_function)
