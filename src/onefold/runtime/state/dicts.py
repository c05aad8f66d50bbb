"""State dicts of whole tensors: what the module's own `state_dict()` and `load_state_dict()` would
give and take if it were not sharded. All collective: every rank calls them.

[Note: hooks of state dicts] A module may rename its parameters in its state dict, or save them in
other shapes (one fused weight as three). Such hooks are run on whole tensors, on rank 0: these stand
in the modules' places while torch goes through them. What has only to know names (checkpoints, which
call a parameter what its module calls it) looks at the state dict of the intervals, and where a hook
has made something else of them, at that of whole parameters without memory (`contents`, in
runtime/state/contents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.runtime.buffers import refuse_parts
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.flat import Flat
from onefold.runtime.gathers import new_masters, put_elements, state_context
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.contents import (
    as_parameters,
    contents_and_changes,
    own_state_dict,
    showing,
)
from onefold.runtime.state.stream import from_first, tell_all, to_first


def full_state_dict(engine: Engine, module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole tensors on the host of rank 0; {} on other ranks. See `onefold.full_state_dict`."""
    if not engine.unsharded:
        engine.refuse_changes("full_state_dict")
        for name, buffer in module.named_buffers():
            refuse_parts(name, buffer)  # on every rank, not on the one that writes them
    engine.unset.look()
    engine.unset.refuse("full_state_dict() would hold")
    return whole_state_dict(engine, module, _masters_of)


#: Elements [x, y) of an entry, counted from its first.
ReadEntry = Callable[[Entry, int, int], torch.Tensor]


def whole_state_dict(
    engine: Engine, module: nn.Module, values: Callable[[Flat], tuple[torch.dtype, ReadEntry, bool]]
) -> dict[str, torch.Tensor]:
    """The module's state dict on rank 0's host, with whole tensors for parameters; {} on other
    ranks. Collective.

    Args:
        values: of a flat buffer the dtype, what reads the elements that this rank holds, and
            `alone` as in `to_first`.
    """
    wholes = _wholes(engine, values)
    if engine.rank != 0:
        return {}
    with disable_torch_function(), torch.no_grad():
        shown = as_parameters(engine, wholes)
        of = {id(param): wholes[entry.part.names[0]] for entry, param in shown.items()}
        with showing(shown):
            held = own_state_dict(engine, module)
        return {
            name: of[id(value)] if id(value) in of else value.detach().cpu().clone()
            for name, value in held.items()
            if isinstance(value, torch.Tensor)
        }


def _wholes(
    engine: Engine, values: Callable[[Flat], tuple[torch.dtype, ReadEntry, bool]]
) -> dict[str, torch.Tensor]:
    """Rank 0's host has every parameter whole, by its first name; {} on other ranks. Collective."""
    first = engine.rank == 0
    wholes: dict[str, torch.Tensor] = {}
    with disable_torch_function(), torch.no_grad():
        for flat in (flat for unit in engine.units for flat in unit.flats):
            dtype, read, alone = values(flat)
            for entry in flat.entries:
                part, into = entry.part, None
                if first:  # the tiles of a parameter share a whole
                    if part.names[0] not in wholes:
                        wholes[part.names[0]] = torch.empty(part.shape, dtype=dtype, device="cpu")
                    whole = wholes[part.names[0]].view(-1)
                    into = whole[part.first : part.first + entry.slot.numel]
                to_first(engine, entry, dtype, partial(read, entry), into, alone)
    return wholes


def _masters_of(flat: Flat) -> tuple[torch.dtype, ReadEntry, bool]:
    masters = None if flat.unsharded else flat.storage.load()

    def read(entry: Entry, x: int, y: int) -> torch.Tensor:
        if masters is None:
            return entry.param.detach().reshape(-1)[x:y]
        at = entry.slot.start - flat.owned[0]
        return masters[at + x : at + y]

    return flat.dtypes.master, read, False


def load_full_state_dict(
    engine: Engine, module: nn.Module, state: Mapping[str, torch.Tensor] | None, strict: bool
) -> tuple[list[str], list[str]]:
    """Rank 0's whole tensors into every rank's masters. Returns (missing, unexpected) names. See
    `onefold.load_full_state_dict`.
    """
    engine.refuse_changes("load_full_state_dict")
    engine.masters.about_to_write()
    try:
        held, changed = contents_and_changes(engine, module)
    except ValueError:  # of a hook that needs values
        held, changed = {}, True
    if changed:
        return _load_by_module(engine, module, state, strict)
    expected = {n: v for n, (v, _) in held.items() if isinstance(v, torch.Tensor)}
    named = {n: e for n, (_, e) in held.items() if e is not None}
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


def _load_by_module(
    engine: Engine, module: nn.Module, state: Mapping[str, torch.Tensor] | None, strict: bool
) -> tuple[list[str], list[str]]:
    """Rank 0's module takes over `state` itself, hooks and all, into whole parameters; these go to
    all ranks.
    """
    wholes, verdict = _wholes(engine, _masters_of), None
    if engine.rank == 0:
        verdict = _taken_over(engine, module, wholes, state, strict)
    missing, unexpected, complaint = tell_all(engine, "load_full_state_dict()", verdict)[0]
    if complaint:
        raise ValueError(complaint)
    coming = {e.part.names[0] for e in engine.entries}
    buffers = dict(module.named_buffers())
    with disable_torch_function(), torch.no_grad():
        for flat in (flat for unit in engine.units for flat in unit.flats):
            _load_flat(engine, flat, coming, wholes)
        _load_buffers(engine, buffers, {})
        engine.make_stale()
        names = {name for e in engine.entries for name in e.part.names} | set(buffers)
        engine.unset.given(names - set(missing))
        engine.unset.remember()
    return missing, unexpected


def _taken_over(
    engine: Engine, module: nn.Module, wholes: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None, strict: bool,
) -> tuple[list[str], list[str], str | None]:  # fmt: skip
    """What `_compare` says, once rank 0's module has loaded `state` into `wholes`."""
    if state is None:
        return _compare({}, {}, state, strict)
    if complaint := _no_tensors({}, state):
        return [], [], complaint
    with disable_torch_function(), torch.no_grad():
        shown = as_parameters(engine, wholes)
        for entry in engine.entries:  # a module in tiles writes to each of them
            if entry not in shown or entry.slot.numel < entry.part.numel:
                part, whole = entry.part, wholes[entry.part.names[0]].view(-1)
                tile = whole[part.first : part.first + entry.slot.numel].view(entry.slot.shape)
                shown[entry] = nn.Parameter(tile, requires_grad=False)
        engine.whole_depth += 1
        try:
            with showing(shown):
                missing, unexpected = module.load_state_dict(state, strict=False)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return [], [], f"load_full_state_dict: the model's own load_state_dict failed: {said}"
        finally:
            engine.whole_depth -= 1
    complaint = _of_names(missing, unexpected) if strict and (missing or unexpected) else None
    return sorted(missing), sorted(unexpected), complaint


def _of_names(missing: Collection[str], unexpected: Collection[str]) -> str:
    return (
        f"load_full_state_dict: {len(missing)} names are missing ({', '.join([*missing][:5])})"
        f" and {len(unexpected)} are unknown to the model ({', '.join([*unexpected][:5])})."
        " Give strict=False to load what fits."
    )


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
    complaint = _of_names(missing, unexpected) if strict and (missing or unexpected) else None
    return missing, unexpected, complaint


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
            put = partial(put_elements, masters, entry)
            from_first(engine, entry, flat.dtypes.master, whole, put)
    if masters is not None:
        flat.storage.store(masters)


def _load_buffers(
    engine: Engine, buffers: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    for name, buffer in buffers.items():
        if engine.rank == 0 and name in state:
            buffer.copy_(state[name])
    engine.group.broadcast(list(buffers.values()), state_context(engine.resources, "buffers"))
