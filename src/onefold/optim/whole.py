"""Gather the states of optimizers on every rank and cut them again, for `onefold.unsharded`.

sharded         every rank: its interval of each element-wise state, scalars as they are
gather(...)     every rank: whole states in the parameter's shape
cut(...)        every rank: its interval of the states that still fit their parameter
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.optim.state_parts import OptimizerParts
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import StateItem, tell_all, to_all

_CALL = "unsharded()"
#: Optimizers that have stepped sharded parameters.
seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: What a rank reports of a parameter's states: {key: (dtype name, None)} for an element-wise state,
#: {key: ("", value)} for any other.
_Told = dict[str, tuple[str, Any]]


def optimizers_over(engine: Engine) -> list[Optimizer]:
    """Return the optimizers over parameters of `engine`, in the same order on every rank."""
    number = {id(entry.param): entry.number for entry in engine.entries}
    gc.collect()  # dead optimizers must not show up on some ranks only
    alive = {
        id(o): o for o in (*seen, *(o for o in gc.get_objects() if issubclass(type(o), Optimizer)))
    }

    def first(optimizer: Optimizer) -> int:
        return min((number[id(p)] for p in _params(optimizer) if id(p) in number), default=-1)

    return sorted(
        (o for o in alive.values() if first(o) >= 0),
        key=lambda o: (first(o), type(o).__name__, len(_params(o))),
    )


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gather(engine: Engine, optimizers: Iterable[Optimizer]) -> list[dict[int, dict[str, Any]]]:
    """Return the whole states of each optimizer, by the entry's number. Collective. The optimizers
    are not changed.

    Raises:
        ValueError: a state is neither element-wise nor a number, or the ranks have different
            optimizers.
    """
    with disable_torch_function(), torch.no_grad():
        return [_gather_one(engine, optimizer) for optimizer in _agreed(engine, list(optimizers))]


def _agreed(engine: Engine, optimizers: list[Optimizer]) -> list[Optimizer]:
    told = tell_all(
        engine.resources, _CALL, [(type(o).__name__, len(_params(o))) for o in optimizers]
    )
    if any(each != told[0] for each in told):
        words = "; ".join(
            f"rank {r}: {', '.join(f'{n} of {k} parameters' for n, k in each)}"
            for r, each in enumerate(told)
        )
        raise ValueError(
            f"the ranks have different optimizers over this model ({words}). Drop those that are"
            " not used any more."
        )
    return optimizers


def _gather_one(engine: Engine, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    # A rank without elements of a parameter may keep an old copy of its `step`: it is not asked
    known = {
        entry.number: state
        for entry in engine.entries
        if holds_some(entry) and (state := optimizer.state.get(entry.param))
    }
    told: dict[int, _Told] = {}
    for each in tell_all(
        engine.resources,
        _CALL,
        {n: _tell(optimizer, engine.entries[n], state) for n, state in known.items()},
    ):
        for number, states in each.items():
            if len(states) > len(told.get(number, ())):
                told[number] = states
    out: dict[int, dict[str, Any]] = {
        n: {key: value for key, (_, value) in states.items()} for n, states in told.items()
    }
    for unit in engine.units:
        for flat in unit.flats:
            mine = [entry for entry in flat.entries if entry.number in told]
            for key, dtype in dict.fromkeys(
                (k, d) for e in mine for k, (d, _) in told[e.number].items() if d
            ):
                some = [e for e in mine if told[e.number].get(key, ("",))[0] == dtype]
                for entry, whole in _wholes(
                    engine, optimizer, flat, some, key, getattr(torch, dtype)
                ):
                    out[entry.number][key] = whole
    return out


def holds_some(entry: Entry) -> bool:
    """Return whether this rank's optimizer steps some of the parameter (or it has no elements)."""
    a, b = entry.owned()
    return a < b or not entry.slot.numel


def _tell(optimizer: Optimizer, entry: Entry, state: Mapping[str, Any]) -> _Told:
    told: _Told = {}
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == entry.param.shape
            and (value.dim() or entry.flat.whole_master)
        ):
            told[key] = (
                (str(value.dtype).removeprefix("torch."), None) if key != "step" else ("", value)
            )
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            raise ValueError(
                f"the state {key!r} of {type(optimizer).__name__} for {entry.slot.name!r} has the"
                f" shape {tuple(value.shape)}, where this rank's part of the parameter has"
                f" {tuple(entry.param.shape)}: only states with an element for each of the"
                " parameter's, and numbers, can be made whole. Drop the optimizer's state before,"
                " and make it anew."
            )
        else:
            told[key] = ("", value)
    return told


def _wholes(
    engine: Engine,
    optimizer: Optimizer,
    flat: Flat,
    entries: list[Entry],
    key: str,
    dtype: torch.dtype,
) -> list[tuple[Entry, torch.Tensor]]:
    """Gather one state of some entries of a flat buffer. Collective if the buffer is divided."""
    if flat.whole_master:
        return [(e, optimizer.state[e.param][key].clone()) for e in entries]
    items = [StateItem((entry,), key, dtype) for entry in entries]
    full = to_all(engine.resources, OptimizerParts(optimizer), items)
    return [(entry, flat.view(full, entry).clone()) for entry in entries]


def cut(engine: Engine, optimizers: Iterable[Optimizer]) -> None:
    """Replace whole states in `optimizer.state` by this rank's parts. Local. A parameter with a
    changed shape loses its states.
    """
    with disable_torch_function(), torch.no_grad():
        for optimizer in optimizers:
            for entry in engine.entries:
                state = optimizer.state.get(entry.param)
                if state and not entry.flat.unsharded:
                    _cut_one(optimizer, entry, state)


def _cut_one(optimizer: Optimizer, entry: Entry, state: dict[str, Any]) -> None:
    slot, (a, b) = entry.slot, entry.owned()
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and tuple(value.shape) == slot.shape and key != "step":
            part = value.reshape(-1)[a:b].clone()
            cut[key] = part.view(entry.param.shape)
        elif isinstance(value, torch.Tensor) and value.shape == entry.param.shape:
            cut[key] = value  # already cut by shard()
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            cut.clear()
            break
        else:
            cut[key] = value
    if cut:
        optimizer.state[entry.param] = cut
    else:
        del optimizer.state[entry.param]
