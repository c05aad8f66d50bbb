"""Whole parameters outside a forward pass: to read, to change, to take away, to bring in. All
collective: every rank calls them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.memory import GATHERED
from onefold.runtime.buffers import refuse_parts
from onefold.runtime.checks import refuse_changes
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.interval import Interval
from onefold.runtime.parameter import disable_torch_function
from onefold.runtime.stream import from_first, tell_all, to_first
from onefold.runtime.tile import first_tiles
from onefold.runtime.unit import Unit
from onefold.runtime.unset import value_of
from onefold.runtime.whole import new_masters, state_context, whole_masters


def scatter_masters(
    engine: Engine, flat: Flat, full: torch.Tensor | None, master: torch.Tensor
) -> None:
    """Rank 0's `full` ([numel], master precision; None elsewhere) into every rank's `master`."""
    group, place = engine.group, state_context(engine, flat.unit_name)
    with torch.no_grad():
        if group.rank == 0:
            assert full is not None
            sends = []  # a fake group has nobody to send to
            if not group.fake:
                sends = [(p, full[slice(*flat.owned_by(p))]) for p in range(1, group.size)]
            group.exchange(sends, [], place, flat.index, move="state").wait()
            master.copy_(full[flat.owned[0] : flat.owned[1]])
        else:
            group.exchange([], [(0, master)], place, flat.index, move="state").wait()


def _rewrite(engine: Engine, flat: Flat, full: torch.Tensor | None) -> None:
    """Rank 0's `full` becomes everybody's masters, wherever these rest."""
    landing = flat.storage.landing(engine.device)
    scatter_masters(engine, flat, full, landing)
    flat.storage.store(landing)


@contextlib.contextmanager
def full_params(engine: Engine, write: bool) -> Iterator[None]:
    """Whole parameters in master precision in place of the sharded ones. See
    `onefold.full_params`.
    """
    if engine.stack:
        raise RuntimeError(
            "full_params was entered inside a forward pass of the model; enter it outside."
        )
    if write:
        engine.about_to_write()
    elif engine.unset and not engine.whole_depth:
        engine.unset.look(engine)
        engine.unset.refuse("full_params() would show")
    if engine.whole_depth:  # nested: the outer one has gathered
        if write and not engine.whole_write:
            raise RuntimeError(
                "full_params(write=True) was entered inside full_params(); give write=True to the"
                " outer one."
            )
        yield
        return
    if not engine.unsharded:
        refuse_changes(engine, "full_params")
    held: list[tuple[Unit, Flat, torch.Tensor | None]] = []
    # Parameters in tiles: the tiles lie one behind another, so that there is a whole to see
    joint: dict[str, torch.Tensor] = {}
    shown: list[tuple[Entry, nn.Parameter, torch.Tensor]] = []
    with disable_torch_function():
        for unit in engine.units:
            for flat in unit.flats:
                if flat.unsharded:
                    continue
                full = whole_masters(engine, flat)
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
    engine.whole_depth, engine.whole_write = 1, write
    try:
        yield
    finally:
        engine.whole_depth = 0
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
                engine.unset.look(engine)
        if wrong:
            raise ValueError(wrong)


def _take_over(shown: list[tuple[Entry, nn.Parameter, torch.Tensor]]) -> str | None:
    """Whole parameters that were given other memory (`p.data = value`), or replaced, are written to
    the memory they had. Returns what does not fit.
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
    """Where a tile lies in the whole parameter that `joint` has, or gets, by the parameter's
    name.
    """
    part = entry.part
    if part.names[0] not in joint:
        joint[part.names[0]] = torch.empty(part.numel, dtype=like.dtype, device=like.device)
    return joint[part.names[0]][part.first : part.first + entry.slot.numel].view(entry.slot.shape)


def _apart(joint: dict[str, torch.Tensor], flat: Flat) -> torch.Tensor:
    """The tiles of `flat`, which `joint` has, as its whole buffer, [numel]."""
    like = joint[flat.entries[0].part.names[0]]
    full = torch.zeros(flat.layout.numel, dtype=like.dtype, device=like.device)
    for entry in flat.entries:
        flat.view(full, entry).copy_(_place_in(joint, entry, like))
    return full


def full_state_dict(engine: Engine, module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole tensors on the host of rank 0; {} on other ranks. See `onefold.full_state_dict`."""
    if not engine.unsharded:
        refuse_changes(engine, "full_state_dict")
        for name, buffer in module.named_buffers():
            refuse_parts(name, buffer)  # on every rank, not on the one that writes them
    engine.unset.look(engine)
    engine.unset.refuse("full_state_dict() would hold")
    return whole_state_dict(engine, module, _masters_of, by_name=not engine.unsharded)


#: Elements [x, y) of an entry, counted from its first.
ReadEntry = Callable[[Entry, int, int], torch.Tensor]


def whole_state_dict(
    engine: Engine, module: nn.Module, values: Callable[[Flat], tuple[torch.dtype, ReadEntry, bool]], by_name: bool = True
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The module's state dict on rank 0's host, with whole tensors for parameters; {} on other
    ranks. Collective.

    Args:
        values: of a flat buffer the dtype, what reads the elements that this rank holds, and
            `alone` as in `to_first`.
        by_name: parameters are known by their names too, not only by their identity: hooks of a
            module may rename or copy them in its state dict.
    """
    first = engine.rank == 0
    wholes: dict[str, torch.Tensor] = {}
    out: dict[Any, torch.Tensor] = {}
    with disable_torch_function(), torch.no_grad():
        for flat in (flat for unit in engine.units for flat in unit.flats):
            dtype, read, alone = values(flat)
            for entry in flat.entries:
                part, into = entry.part, None
                if first:  # the tiles of a parameter share a whole
                    if part.names[0] not in wholes:
                        wholes[part.names[0]] = torch.empty(part.shape, dtype=dtype, device="cpu")
                    whole = wholes[part.names[0]]
                    out |= dict.fromkeys((id(entry.param), *(part.names if by_name else ())), whole)
                    into = whole.view(-1)[part.first : part.first + entry.slot.numel]
                to_first(engine, entry, dtype, partial(read, entry), into, alone)
        if not first:
            return {}
        return {
            name: out[key]
            if (key := id(value) if id(value) in out else name) in out
            else value.detach().cpu().clone()
            for name, value in plain_state_dict(engine, module).items()
            if isinstance(value, torch.Tensor)
        }


def _masters_of(flat: Flat) -> tuple[torch.dtype, ReadEntry, bool]:
    masters = None if flat.unsharded else flat.storage.load()

    def read(entry: Entry, x: int, y: int) -> torch.Tensor:
        if masters is None:
            return entry.param.detach().reshape(-1)[x:y]
        at = entry.slot.start - flat.owned[0]
        return masters[at + x : at + y]

    return flat.dtypes.master, read, False


@contextlib.contextmanager
def unguarded(engine: Engine) -> Iterator[None]:
    """Inside, `state_dict()` of the model's modules gives what they hold: for names and shapes."""
    engine.whole_depth += 1
    try:
        yield
    finally:
        engine.whole_depth -= 1


def plain_state_dict(engine: Engine, module: nn.Module) -> dict[str, Any]:
    """The module's own state dict: this rank's intervals under the parameters' names, buffers,
    extra state. Local.

    A parameter in tiles stands there as its first tile's.
    """
    with unguarded(engine), disable_torch_function(), first_tiles():
        held = module.state_dict(keep_vars=True)
    for name, value in held.items():
        if isinstance(value, Interval):
            refuse_parts(name, value)
    return held


def beside_parameters(
    engine: Engine, module: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What the module's state dict holds besides parameters: (persistent buffers, extra states),
    each by its name there. Local.

    Parameters are told by their identity or by their name: hooks of a module may give them another
    one in its state dict, or a copy.
    """
    known = {id(e.param) for e in engine.entries} | {id(e.compute) for e in engine.entries}
    names = {name for e in engine.entries for name in e.part.names}
    buffers: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in plain_state_dict(engine, module).items():
        if name.rpartition(".")[2] == "_extra_state":
            extra[name] = value
        elif isinstance(value, torch.Tensor) and id(value) not in known and name not in names:
            buffers[name] = value
    return buffers, extra


def load_full_state_dict(
    engine: Engine, module: nn.Module, state: Mapping[str, torch.Tensor] | None, strict: bool
) -> tuple[list[str], list[str]]:
    """Rank 0's whole tensors into every rank's masters. Returns (missing, unexpected) names. See
    `onefold.load_full_state_dict`.
    """
    refuse_changes(engine, "load_full_state_dict")
    engine.about_to_write()
    expected = {
        n: v for n, v in plain_state_dict(engine, module).items() if isinstance(v, torch.Tensor)
    }
    known = {id(e.param): e for e in engine.entries}
    by_name = {name: e for e in engine.entries for name in e.part.names}
    named = {
        n: e for n, v in expected.items() if (e := known.get(id(v), by_name.get(n))) is not None
    }
    shapes = {n: e.part.shape for n, e in named.items()}
    verdict = _compare(expected, shapes, state, strict) if engine.rank == 0 else None
    missing, unexpected, complaint = tell_all(engine, "load_full_state_dict()", verdict)[0]
    if complaint:
        raise ValueError(complaint)
    coming = {e.part.names[0] for n, e in named.items() if n not in missing}
    given = {
        e.part.names[0]: state[n] for n, e in named.items() if state is not None and n in state
    }
    with disable_torch_function(), torch.no_grad():
        for unit in engine.units:
            for flat in unit.flats:
                _load_flat(engine, flat, coming, given)
        _load_buffers(engine, {n: v for n, v in expected.items() if n not in shapes}, state or {})
        engine.make_stale()
        engine.unset.given(
            {
                name
                for n in expected
                if n not in missing
                for name in (n, *(named[n].part.names if n in named else ()))
            }
        )
        engine.unset.remember()
    return missing, unexpected


def _compare(
    expected: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    state: Mapping[str, torch.Tensor] | None,
    strict: bool,
) -> tuple[list[str], list[str], str | None]:
    if state is None:
        return (
            [],
            [],
            (
                "load_full_state_dict: rank 0 was given no state dict; give it the whole one (other"
                " ranks may give None)."
            ),
        )
    complaint = _no_tensors(expected, state)
    if complaint:
        return [], [], complaint
    missing, unexpected = (
        sorted(set(expected) - set(state)),
        sorted(map(str, set(state) - set(expected))),
    )
    wrong = [
        f"{n}: given {tuple(state[n].shape)}, expected {shapes.get(n, tuple(expected[n].shape))}"
        for n in expected
        if n in state and tuple(state[n].shape) != shapes.get(n, tuple(expected[n].shape))
    ]
    if wrong:
        return missing, unexpected, "load_full_state_dict: shapes differ. " + "; ".join(wrong[:5])
    if strict and (missing or unexpected):
        return (
            missing,
            unexpected,
            (
                f"load_full_state_dict: {len(missing)} names are missing ({', '.join(missing[:5])})"
                f" and {len(unexpected)} are unknown to the model ({', '.join(unexpected[:5])})."
                " Give strict=False to load what fits."
            ),
        )
    return missing, unexpected, None


def _no_tensors(expected: Mapping[str, Any], state: Any) -> str | None:
    """What is wrong with a `state` that is no dict, or holds something else than real tensors under
    known names.
    """
    if not isinstance(state, Mapping):
        return (
            f"load_full_state_dict: rank 0 was given a {type(state).__name__}; expected a dict of"
            " whole tensors, as onefold.full_state_dict(model) returns or torch.load(path) reads."
        )
    known = [n for n in expected if n in state]
    others = [
        f"{n} is a {type(state[n]).__name__}"
        for n in known
        if not isinstance(state[n], torch.Tensor)
    ]
    if others:
        return (
            f"load_full_state_dict: expected tensors, but {'; '.join(others[:5])}. torch.as_tensor"
            " turns arrays into tensors."
        )
    imaginary = [n for n in known if state[n].is_complex() and not expected[n].is_complex()]
    if imaginary:
        return (
            f"load_full_state_dict: {', '.join(imaginary[:5])} would lose their imaginary parts:"
            " give real tensors."
        )
    return None


def _load_flat(
    engine: Engine, flat: Flat, coming: Collection[str], state: Mapping[str, torch.Tensor]
) -> None:
    """What is `coming`, by the first name of the parameter; the rest stays. `state`: rank 0's whole
    tensors by that name.
    """
    masters = None if flat.unsharded else new_masters(flat, engine.device)
    for entry in flat.entries:
        part, whole = entry.part, None
        if part.names[0] not in coming:
            continue
        if engine.rank == 0:
            whole = state[part.names[0]].reshape(-1)[part.first : part.first + entry.slot.numel]
        if masters is None:
            assert whole is not None
            entry.param.copy_(whole.view(entry.param.shape))
        else:
            put = partial(_put, masters, entry)
            from_first(engine, entry, flat.dtypes.master, whole, put)
    if masters is not None:
        flat.storage.store(masters)


def _put(masters: torch.Tensor, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
    """Elements [x, y) of `entry` into this rank's `masters`, [owned]."""
    at = entry.slot.start - entry.flat.owned[0]
    masters[at + x : at + y].copy_(values)


def _load_buffers(
    engine: Engine, buffers: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    for name, buffer in buffers.items():
        if engine.rank == 0 and name in state:
            buffer.copy_(state[name])
    engine.group.broadcast(list(buffers.values()), state_context(engine, "buffers"))


def lay_out(engine: Engine, unit: Unit, coming: Collection[str] = ()) -> None:
    """Build the unit's flat buffers; rank 0's weights are everybody's. Parameters named in `coming`
    are NaN until somebody writes them.
    """
    for flat in unit.flats:
        if flat.unsharded:
            continue

        def fill(master: torch.Tensor, flat: Flat = flat) -> None:
            if any(entry.slot.name in coming for entry in flat.entries):
                master.zero_()
                for entry in flat.entries:
                    if entry.slot.name not in coming:
                        whole = _source(entry).detach().reshape(-1) if engine.rank == 0 else None
                        put = partial(_put, master, entry)
                        from_first(engine, entry, flat.dtypes.master, whole, put)
                    elif master.is_floating_point() and not flat.storage.encoded:
                        # See [Note: marks of what is unset] in runtime/unset.py
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
    """Rank 0's value of a parameter that is about to be laid out."""
    parameters, attribute, _ = entry.places[0]
    source = value_of(entry)
    source = parameters[attribute] if source is None else source  # one without elements
    assert source is not None
    return source
