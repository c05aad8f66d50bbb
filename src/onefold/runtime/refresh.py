"""Refreshing resident copies: they are gathered again once masters have been written to."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from onefold.memory import GATHERED, nbytes_of
from onefold.recipe.core import SMALL_TRAFFIC
from onefold.runtime.unit import State, Unit

if TYPE_CHECKING:
    from onefold.runtime.gather import Gatherer

#: Resident copies of at most so many bytes are refreshed together, in one message.
SMALL = 64 << 10


def refresh(gather: Gatherer) -> None:
    """Launch the gathers of all stale resident copies: first the small ones, together in one
    message, then the others in the order of use.
    """
    stale = [unit for unit in gather.units if unit.resident and unit.state is State.STALE]
    together = _small(gather, stale)
    if len(together) > 1:
        _launch_together(gather, together)
    for unit in stale:
        if unit.state is State.STALE:
            gather.launch(unit)


def _small(gather: Gatherer, units: list[Unit]) -> list[Unit]:
    """Return those of `units` whose gathers go in one message.

    Their bytes are in memory twice until the first of them is used. So there are at most as many of
    them as small reductions may have under way.
    """
    recipe, chosen, nbytes = gather.recipe, [], 0
    if not (recipe.overlap and recipe.in_flight and gather.beside is nullcontext):
        return []
    one: torch.dtype | None = None
    for unit in units:
        flats = [flat for flat in unit.flats if flat.stale]
        one = one or flats[0].dtypes.compute
        size = sum(flat.layout.numel * one.itemsize for flat in flats)
        if (
            size <= SMALL
            and nbytes + size <= 3 * SMALL_TRAFFIC
            and all(flat.dtypes.compute == one and flat.gather.plain for flat in flats)
            and all(flat.owners_group.joins_messages for flat in flats)
        ):
            chosen.append(unit)
            nbytes += size
    return chosen


def _launch_together(gather: Gatherer, units: list[Unit]) -> None:
    fulls, places, numbers = [], [], []
    for unit in units:
        unit.move(State.GATHERING, gather.progress.step)
        place = gather.progress.context("all-gather", unit.name)
        for flat in unit.flats:
            if not flat.stale:
                continue
            flat.stale = False
            full = gather.buffer_of(unit, flat)
            gather.put(flat, full)
            fulls.append(full)
            places.append(place)
            numbers.append(flat.index)
    # A number made of the units: ranks that send other units together cannot match this message
    number = zlib.crc32(repr(numbers).encode())
    nbytes = sum(nbytes_of(full) for full in fulls)
    gather.memory.add(GATHERED, nbytes)
    group = units[0].flats[0].owners_group
    pending = group.all_gather_together(fulls, places, number)
    pending.then(lambda: gather.memory.add(GATHERED, -nbytes))
    for unit in units:
        unit.pending.append(pending)
