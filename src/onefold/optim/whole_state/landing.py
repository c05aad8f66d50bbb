"""`optimizer.load_state_dict()`: load this rank's part of a whole dict, which is given on every
rank or on rank 0 only.

    before torch's load   the ranks compare their dicts ──► element-wise states are created and filled
    torch's load          numbers and groups
    after it              the element-wise states are put into `optimizer.state`
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.optim.state_sorts import odd_keys, sort_of
from onefold.optim.whole_state.outline import (
    Outline,
    Param,
    engine_of,
    first_of,
    locally,
    moment_policy,
    numbers_of,
    refuse_moment,
)
from onefold.recipe.moments import SIGNED, grain_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.stream import Put, from_first, tell_all
from onefold.runtime.storage import OnDisk

#: A top-level key that marks the result of `local_state_dict`.
LOCAL = "onefold_local"
_CALL = "optimizer.load_state_dict()"


@dataclass
class _Landing:
    """A state being loaded: called with elements [x, y) of `entry`, in order. It keeps an error for
    the end: raising at once would leave the other ranks waiting.
    """

    entry: Entry
    parts: dict[str, torch.Tensor]
    put: Put
    error: str | None = None

    def __call__(self, x: int, y: int, values: torch.Tensor) -> None:
        if self.error is None:
            try:
                self.put(x, y, values)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"


#: Element-wise states being loaded: filled before torch's load, set after it.
_landed: weakref.WeakKeyDictionary[Optimizer, list[_Landing]] = weakref.WeakKeyDictionary()


def before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `load_state_dict` hook: return this rank's part in place of the whole dict; None if torch
    can load the dict as it is.
    """
    _landed.pop(optimizer, None)
    if optimizer in locally:
        return None
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = Outline.of(optimizer)
        engine = outline.engine
        if engine is None or (engine.group.size == 1 and not outline.special):
            return None
        refuse_moment(engine, "load_state_dict")
        complaint, digest = None, b""
        try:
            digest = _look(optimizer, outline, state_dict)
        except _Refused as error:
            complaint = str(error)
        except Exception as error:  # not raised yet: the other ranks wait for this one's report
            complaint = (
                f"expected what optimizer.state_dict() returned ({type(error).__name__}: {error})."
            )
        told = tell_all(engine, _CALL, (complaint, digest, bool(state_dict.get("state"))))
        scattered = told[0][2] and not all(full for _, _, full in told)
        _refuse(engine, told, scattered)
        if not scattered and not outline.special:
            return None
        for each in outline.engines:
            each.transfers.check()
        given: Mapping[str, Any] = state_dict
        if scattered:  # rank 0 tells all but the element-wise tensors, which follow one by one
            first = _said_by_first(outline, state_dict) if engine.rank == 0 else None
            given = tell_all(engine, _CALL, first)[0]
        return _take(optimizer, outline, engine, given, state_dict, scattered)


def set_landed(optimizer: Optimizer) -> None:
    """Put the element-wise states into `optimizer.state`, after torch's load."""
    for landing in _landed.pop(optimizer, ()):
        optimizer.state[landing.entry.param].update(landing.parts)


# -- checking the given dict -----------------------------------------------------------------------


class _Refused(ValueError):
    """The dict cannot be loaded here."""


def _refuse(engine: Engine, told: list[tuple[str | None, bytes, bool]], scattered: bool) -> None:
    """Raise ValueError on every rank if the ranks' dicts cannot be loaded."""
    ranks = sorted(engine.group.ranks)
    for rank, (complaint, digest, full) in enumerate(told[:1] if scattered else told):
        if complaint is not None:
            who = f" (rank {ranks[rank]})" if len(told) > 1 else ""
            raise ValueError(f"{_CALL}: {complaint}{who}")
        if full and not told[0][2]:
            raise ValueError(
                f"{_CALL}: rank {ranks[0]} was given an empty state and rank {ranks[rank]} was not."
                f" Give every rank the same whole dict, or rank {ranks[0]} the whole one and the"
                " others what state_dict() returned there."
            )
        if digest != told[0][1]:
            raise ValueError(
                f"{_CALL}: rank {ranks[0]} and rank {ranks[rank]} were given different dicts. Give"
                f" every rank the same whole one (the file that rank 0 saved), or rank {ranks[0]}"
                " the whole one and the others what state_dict() returned there; what"
                " local_state_dict() returned goes to onefold.optim.load_local_state_dict."
            )


def _look(optimizer: Optimizer, outline: Outline, given: Mapping[str, Any]) -> bytes:
    """Check a dict, and return a digest of all but its elements. Raises: _Refused."""
    if LOCAL in given:
        said = given[LOCAL]
        raise _Refused(
            f"this is the part of rank {said['rank']} of {said['ranks']}, as local_state_dict()"
            " returned it. Give it to onefold.optim.load_local_state_dict(optimizer, state) on"
            " as many ranks, or give what optimizer.state_dict() returned."
        )
    state, groups = given.get("state", {}), given.get("param_groups", [])
    if not state and not groups:
        raise _Refused(
            "the dict has neither 'state' nor 'param_groups'; expected what"
            " optimizer.state_dict() returned."
        )
    ours = [len(params) for params in outline.groups]
    theirs = [len(group["params"]) for group in groups]
    if ours != theirs:
        raise _Refused(
            f"the dict has {_counted(theirs)}, this {type(optimizer).__name__} has"
            f" {_counted(ours)}. Make the groups as they were when it was saved, of the same"
            " model."
        )
    text: list[Any] = [[sorted((str(k), _simple(v)) for k, v in group.items()) for group in groups]]
    odd = _odd(outline, given)
    for number, param in zip(numbers_of(given), outline.params, strict=True):
        for key, value in state.get(number, {}).items():
            text.append((number, str(key), _simple(value)))
            if (
                param.entries
                and not _is_elements(param, key, value, odd)
                and _cannot_be_cut(outline, param, value)
            ):
                raise _Refused(
                    f"state {key!r} of parameter {number} ({param.name!r}) has shape"
                    f" {tuple(value.shape)}, expected {param.shape}. It is of another model, or"
                    " one rank's part: those are saved by onefold.optim.local_state_dict and"
                    " loaded by load_local_state_dict."
                )
    return hashlib.sha256(repr(text).encode()).digest()


def _counted(groups: list[int]) -> str:
    if len(groups) == 1:
        return f"one parameter group of {groups[0]}"
    return f"{len(groups)} parameter groups of {', '.join(map(str, groups))}"


def _simple(value: Any) -> Any:
    """Return a description of a value that is the same on every rank: no addresses, no elements."""
    if isinstance(value, torch.Tensor):
        number = value.numel() == 1 and value.device.type != "meta"
        return tuple(value.shape), value.item() if number else ""
    plain = isinstance(value, (int, float, str, bool, type(None), list, tuple))
    return value if plain else type(value).__name__


def _odd(outline: Outline, given: Mapping[str, Any]) -> set[Any]:
    state = given.get("state", {})
    params = zip(numbers_of(given), outline.params, strict=True)
    return odd_keys((param.shape, state.get(number, {})) for number, param in params)


def _is_elements(param: Param, key: Any, value: Any, odd: set[Any]) -> bool:
    return sort_of(key, value, param.shape, odd) == "elements"


def _cannot_be_cut(outline: Outline, param: Param, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    on_disk = value.numel() > 1 and any(e.flat.storage.on_disk for e in param.entries)
    return outline.divided or param.entries[0].flat.tiled or on_disk


# -- storing this rank's part ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Elements:
    """Placeholder for an element-wise tensor, of which rank 0 sends each rank its part."""

    dtype: torch.dtype


def _said_by_first(outline: Outline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return rank 0's dict with placeholders for the tensors to be sent."""
    state, odd = dict(given["state"]), _odd(outline, given)
    for number, param in zip(numbers_of(given), outline.params, strict=True):
        if param.entries and number in state:
            values = {key: _plain(value) for key, value in state[number].items()}
            state[number] = {
                k: _Elements(v.dtype) if _is_elements(param, k, v, odd) else v
                for k, v in values.items()
            }
    return {**given, "state": state}


def _plain(value: Any) -> Any:
    """Return the values of a packed state of torchao's; any other value as it is."""
    packed_by_torchao = type(value).__module__.startswith("torchao.")
    return value.dequantize() if packed_by_torchao and isinstance(value, torch.Tensor) else value


def _take(
    optimizer: Optimizer, outline: Outline, engine: Engine, given: Mapping[str, Any],
    wholes: Mapping[str, Any], scattered: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return this rank's part for torch to load. Element-wise states are created here, and set
    after torch's own load (`set_landed`).
    """
    numbers, state = numbers_of(given), given["state"]
    odd = set() if scattered else _odd(outline, given)

    def in_elements(param: Param, key: Any, value: Any) -> bool:
        if scattered:
            return isinstance(value, _Elements)
        return bool(param.entries) and _is_elements(param, key, value, odd)

    mine: dict[Any, Any] = {key: value for key, value in state.items() if key not in set(numbers)}
    landing, error = _landed.setdefault(optimizer, []), None
    for number, param in zip(numbers, outline.params, strict=True):
        if number not in state:
            continue
        values = {key: _plain(value) for key, value in state[number].items()}
        elements = {key: v for key, v in values.items() if in_elements(param, key, v)}
        for n in param.numbers:
            mine[n] = {
                # clone: the caller's dict must not change
                key: value.clone() if isinstance(value, torch.Tensor) and param.entries else value
                for key, value in values.items()
                if key not in elements
            }
        there = wholes.get("state", {}).get(number)
        for key, value in elements.items():
            whole = _plain(there[key]).detach().reshape(-1) if there is not None else None
            for put in _land(optimizer, param, key, value.dtype, whole, scattered):
                landing.append(put)
                error = error or put.error
    for each in outline.engines:
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            each.transfers.flush() if each.on_disk else None
    wrong = first_of(tell_all(engine, _CALL, error))
    if wrong is not None:
        _landed.pop(optimizer, None)
        raise RuntimeError(f"{_CALL}: the states could not be put in their places. {wrong}")
    local = []
    for group, params, ours in zip(
        given["param_groups"], outline.groups, optimizer.param_groups, strict=True
    ):
        # torch assigns states in the optimizer's own order
        group = {**group, "params": sorted(n for param in params for n in param.numbers)}
        # The optimizer's own names: with tiles it has more objects than the dict
        if "param_names" in group and len(group["param_names"]) != len(group["params"]):
            group["param_names"] = ours.get("param_names", group["param_names"])
        local.append(group)
    return {**given, "state": mine, "param_groups": local}


def _land(
    optimizer: Optimizer, param: Param, key: str, dtype: torch.dtype,
    whole: torch.Tensor | None, scattered: bool,
) -> Iterable[_Landing]:  # fmt: skip
    """Load one state, tile by tile. `whole`: its elements, if this rank has them."""
    for entry in param.entries:
        part, put = None, _landing(optimizer, entry, key, dtype)
        if whole is not None:
            part = whole[entry.part.first : entry.part.first + entry.slot.numel]
        if scattered:
            from_first(engine_of(entry), entry, dtype, part, put)
        elif part is not None:
            a, b = entry.owned()
            put(a, b, part[a:b])
        yield put


def _landing(optimizer: Optimizer, entry: Entry, key: str, dtype: torch.dtype) -> _Landing:
    """Create this rank's state `key` of `entry`, in memory or on NVMe. Its `put` stores values as
    they are, rounded, or packed.
    """
    storage, device = entry.flat.storage, entry.param.device
    how = moment_policy(optimizer, entry) if key in SIGNED else None
    if entry.flat.dtypes.master.is_floating_point:
        dtype = entry.flat.dtypes.master  # torch's own load does the same
    format = how.of(entry) if how is not None else None
    dtypes = {key: dtype} if format is None else {key: format.dtype}
    if format is not None and format.packed:
        keys = {name: packed(name) for name in format.keys(key)}
        dtypes = {name: part.dtype for name, part in keys.items() if part is not None}
    in_memory = how.small(entry) if how is not None else entry.param.dim() == 0
    parts = {n: storage.new_state(entry, n, kind, in_memory) for n, kind in dtypes.items()}

    def put(x: int, y: int, values: torch.Tensor) -> None:
        new = {key: values}
        if how is not None and format is not None and format.packed:
            values = values.to(device, torch.float32)
            new = {
                name: torch.zeros(-(-(y - x) // grain_of(name)), dtype=kind, device=values.device)
                for name, kind in dtypes.items()
            }
            piece = moments.Piece(entry, entry.part.first + x, values, values, new, {}, False)
            step = torch.zeros((), device="cpu")
            moments.pack(replace(how, seed=None), piece, key, values, step, again=True)
        for name, value in new.items():
            into = storage.elements(entry, name, parts[name], x, y)
            into.write(0, value) if isinstance(into, OnDisk) else into.copy_(value)

    return _Landing(entry, parts, put)
