"""Whole parameters outside a forward pass: `lay_out` divides rank 0's among the ranks;
`full_params` shows them to be read and changed. All are collective: every rank calls them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import nn

from onefold.memory import GATHERED
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.flat import Flat
from onefold.runtime.gathers import put_elements, state_context, whole_masters
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.stream import from_first
from onefold.runtime.unit import Unit
from onefold.runtime.unset import value_of


def scatter_masters(
    engine: Engine, flat: Flat, full: torch.Tensor | None, master: torch.Tensor
) -> None:
    """Send each rank its part of rank 0's `full` ([numel], master precision; None elsewhere), into
    `master`.
    """
    group, context = engine.group, state_context(engine.resources, flat.unit_name)
    with torch.no_grad():
        if group.rank == 0:
            assert full is not None
            sends = []  # a fake group has nobody to send to
            if not group.fake:
                sends = [(p, full[slice(*flat.owned_by(p))]) for p in range(1, group.size)]
            group.exchange(sends, [], context, flat.index, move="state").wait()
            master.copy_(full[flat.owned[0] : flat.owned[1]])
        else:
            group.exchange([], [(0, master)], context, flat.index, move="state").wait()


def _rewrite(engine: Engine, flat: Flat, full: torch.Tensor | None) -> None:
    """Replace the masters of every rank by rank 0's `full`, on whatever tier they are stored."""
    landing = flat.storage.landing(engine.device)
    scatter_masters(engine, flat, full, landing)
    flat.storage.store(landing)


@contextlib.contextmanager
def full_params(engine: Engine, write: bool) -> Iterator[None]:
    """Put whole parameters in master precision in place of the sharded ones, inside the context.
    See `onefold.full_params`.
    """
    if engine.stack:
        raise RuntimeError(
            "full_params was entered inside a forward pass of the model; enter it outside."
        )
    if write:
        engine.masters.about_to_write()
    elif engine.uninitialized and not engine.full_params_depth:
        engine.uninitialized.look()
        engine.uninitialized.refuse("full_params() would show")
    if engine.full_params_depth:  # nested: the outer one has gathered
        if write and not engine.full_params_write:
            raise RuntimeError(
                "full_params(write=True) was entered inside full_params(); give write=True to the"
                " outer one."
            )
        yield
        return
    if not engine.unsharded:
        engine.refuse_changes("full_params")
    held: list[tuple[Unit, Flat, torch.Tensor | None]] = []
    # Whole parameters that are in tiles, by name: one buffer for all tiles of each
    joint: dict[str, torch.Tensor] = {}
    shown: list[tuple[Entry, nn.Parameter, torch.Tensor]] = []
    with disable_torch_function():
        for unit in engine.units:
            for flat in unit.flats:
                if flat.unsharded:
                    continue
                full = whole_masters(engine.resources, flat)
                held.append((unit, flat, None if flat.tiled else full))
                engine.memory.add(
                    GATHERED, flat.layout.numel * flat.dtypes.master.itemsize, unit.name
                )
                for entry in flat.entries:
                    whole = flat.view(full, entry)
                    if flat.tiled:
                        whole = _place_in(joint, entry, whole).copy_(whole)
                    stand_in = nn.Parameter(whole, requires_grad=False)
                    flat.swap(entry, stand_in)
                    if write:
                        shown.append((entry, stand_in, whole))
                del full, whole
    engine.full_params_depth, engine.full_params_write = 1, write
    try:
        yield
    finally:
        engine.full_params_depth = 0
        with disable_torch_function(), torch.no_grad():
            wrong = _take_over(shown)
            shown.clear()
            for unit, flat, kept in held:
                for entry in flat.entries:
                    flat.swap(entry, entry.param)
                if write:
                    _rewrite(engine, flat, kept if kept is not None else _apart(joint, flat))
                engine.memory.add(
                    GATHERED, -flat.layout.numel * flat.dtypes.master.itemsize, unit.name
                )
            if write:
                engine.make_stale()
                engine.uninitialized.look()
        if wrong:
            raise ValueError(wrong)


def _take_over(shown: list[tuple[Entry, nn.Parameter, torch.Tensor]]) -> str | None:
    """Copy whole parameters that the user has given other memory (`p.data = value`), or replaced,
    back to the memory they had. Returns a complaint if a shape does not fit.
    """
    wrong = None
    for entry, stand_in, whole in shown:
        placed = [
            found
            for places, attribute, _ in entry.places
            if (found := places.get(attribute)) is not None
        ]
        param = next((p for p in placed if p is not stand_in), stand_in)
        if param.data_ptr() != whole.data_ptr():
            if param.shape == whole.shape:
                whole.copy_(param)
            else:
                wrong = wrong or (
                    f"inside full_params(write=True) parameter {entry.slot.name!r} of shape"
                    f" {tuple(whole.shape)} was given data of shape {tuple(param.shape)}. Another"
                    " shape is given inside `with onefold.unsharded(model):`."
                )
    return wrong


def _place_in(joint: dict[str, torch.Tensor], entry: Entry, like: torch.Tensor) -> torch.Tensor:
    """Return the view of a tile in its whole parameter, which `joint` has by the parameter's name.
    A missing one is allocated.
    """
    part = entry.part
    if part.names[0] not in joint:
        joint[part.names[0]] = torch.empty(part.numel, dtype=like.dtype, device=like.device)
    return joint[part.names[0]][part.first : part.first + entry.slot.numel].view(entry.slot.shape)


def _apart(joint: dict[str, torch.Tensor], flat: Flat) -> torch.Tensor:
    """Copy the tiles of `flat` from `joint` into a new whole buffer, [numel]."""
    like = joint[flat.entries[0].part.names[0]]
    full = torch.zeros(flat.layout.numel, dtype=like.dtype, device=like.device)
    for entry in flat.entries:
        flat.view(full, entry).copy_(_place_in(joint, entry, like))
    return full


def lay_out(engine: Engine, unit: Unit, incoming: Collection[str] = ()) -> None:
    """Build the unit's flat buffers from rank 0's weights. Parameters named in `incoming` are filled
    with NaN until they are loaded.
    """
    for flat in unit.flats:
        if flat.unsharded:
            continue

        def fill(master: torch.Tensor, flat: Flat = flat) -> None:
            if any(entry.slot.name in incoming for entry in flat.entries):
                master.zero_()
                for entry in flat.entries:
                    if entry.slot.name not in incoming:
                        whole = _source(entry).detach().reshape(-1) if engine.rank == 0 else None
                        put = partial(put_elements, master, entry)
                        from_first(engine, entry, flat.dtypes.master, whole, put)
                    elif master.is_floating_point() and not flat.storage.encoded:
                        # See [Note: marks of what is uninitialized] in runtime/uninitialized.py
                        a, b = flat.local(entry)
                        master[a - flat.owned[0] : b - flat.owned[0]].fill_(math.nan)
                return
            full = None
            if engine.rank == 0:
                full = torch.zeros(
                    flat.layout.numel, dtype=flat.dtypes.master, device=engine.device
                )
                for entry in flat.entries:
                    source = _source(entry)
                    flat.view(full, entry).copy_(source.detach())
            scatter_masters(engine, flat, full, master)

        with disable_torch_function(), torch.no_grad():
            flat.build(fill, engine.device)


def _source(entry: Entry) -> torch.Tensor:
    """Return rank 0's value of a parameter that is about to be laid out."""
    parameters, attribute, _ = entry.places[0]
    source = value_of(entry)
    source = parameters[attribute] if source is None else source  # None: it has no elements
    assert source is not None
    return source
