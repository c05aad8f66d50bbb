"""Which parameters train: `requires_grad` as the user has set it, and hooks on their gradients."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.differentiate import keep_hooks_from_compiler
from onefold.runtime.parameters.interval import ShardedParameterError, disable_torch_function
from onefold.runtime.unreduced import follow_runs

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.unit import Unit


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
                entry.compute.register_post_accumulate_grad_hook(
                    _arrival(weakref.ref(reduce), weakref.ref(entry))
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
