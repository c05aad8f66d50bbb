"""Which parameters train: `requires_grad` as the user has set it, and hooks on their gradients."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

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


def _arrival(reduce: weakref.ref[Reducer], entry: weakref.ref[Entry]) -> Any:
    def hook(_: torch.Tensor) -> None:
        if (r := reduce()) is not None and (e := entry()) is not None and not r.progress.closed:
            r.arrived(e)

    return hook
