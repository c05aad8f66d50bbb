"""Gather the states of optimizers on every rank, for `onefold.unsharded`.

sharded              every rank: its interval of each element-wise state, numbers as they are
gather(...)          every rank: whole states in the parameter's shape
shard()              every rank: its interval again
drop_misfits(...)    parameters with another shape lose their states
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.optim.owned import owned_by
from onefold.optim.state_dicts import met
from onefold.optim.state_parts import (
    OptimizerParts,
    Outline,
    OwnShape,
    agreed,
    described,
    own_shape,
    placed,
)
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import StateItem, tell_all, to_all

_CALL = "unsharded()"


def optimizers_over(engine: Engine) -> list[Optimizer]:
    """Return the optimizers over parameters of `engine`, in the same order on every rank."""
    number = {id(entry.param): entry.number for entry in engine.entries}
    gc.collect()  # those in reference cycles must not show up on some ranks only

    def first(optimizer: Optimizer) -> int:
        return min((number[id(p)] for p in _params(optimizer) if id(p) in number), default=-1)

    return sorted(
        (o for o in met if first(o) >= 0),
        key=lambda o: (first(o), type(o).__name__, len(_params(o))),
    )


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gather(engine: Engine, optimizers: list[Optimizer]) -> list[dict[int, dict[str, Any]]]:
    """Return the whole states of each optimizer, by the entry's number. Collective. The optimizers
    are not changed.

    Raises:
        ValueError: a state is neither element-wise nor a number, or the ranks have different
            optimizers, or different states.
    """
    here = [(type(o).__name__, len(_params(o))) for o in optimizers]
    told = tell_all(engine.resources, _CALL, here)
    if any(each != here for each in told):
        words = "; ".join(
            f"rank {r}: {', '.join(f'{n} of {k} parameters' for n, k in each)}"
            for r, each in enumerate(told)
        )
        raise ValueError(
            f"the ranks have different optimizers over this model ({words}). Drop those that are"
            " not used any more."
        )
    with disable_torch_function(), torch.no_grad():
        return [_gather_one(engine, optimizer) for optimizer in optimizers]


def _gather_one(engine: Engine, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    outline = Outline.of(optimizer, [engine])
    outline.groups = [[param for param in group if param.entries] for group in outline.groups]
    instead = "Drop the optimizer's state before, and make it anew."
    said = described(optimizer, outline, instead, refuse=True)
    plan = agreed(_CALL, outline, tell_all(engine.resources, _CALL, said))
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    held: dict[Flat, dict[StateItem, Entry]] = {}
    out: dict[int, dict[str, Any]] = {}
    parts = OptimizerParts(optimizer)
    for param, found in zip(outline.params, plan, strict=True):
        (entry,) = param.entries
        own, group = optimizer.state.get(entry.param) or {}, group_of[id(entry.param)]
        held_whole = parts.owned(entry)
        for key, (dtype, value) in (found or {}).items():
            if held_whole is not None and (dtype is not None or isinstance(value, OwnShape)):
                which = value if dtype is None else OwnShape(held_whole.matrix.shape, dtype)
                moved = own_shape(entry, held_whole, which, own.get(key), everywhere=True)
                assert moved is not None
                out.setdefault(entry.number, {})[key] = moved.to(entry.param.device)
                continue
            if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
                value = value.to(own[key].device)
            out.setdefault(entry.number, {})[key] = placed(value, entry.param, group)
            if dtype is not None and not entry.flat.divided:
                out[entry.number][key] = own[key].clone()
            elif dtype is not None:
                held.setdefault(entry.flat, {})[param.item(key, dtype)] = entry
    for flat in (flat for unit in engine.units for flat in unit.flats):
        items = held.get(flat, {})
        for sort in dict.fromkeys((item.key, item.dtype) for item in items):
            some = [item for item in items if (item.key, item.dtype) == sort]
            full = to_all(engine.resources, parts, some)
            for item in some:
                out[items[item].number][item.key] = flat.view(full, items[item]).clone()
    return out


def holds_some(entry: Entry) -> bool:
    """Return whether this rank's optimizer steps some of the parameter (or it has no elements)."""
    a, b = entry.owned()
    return a < b or not entry.numel


def drop_misfits(
    engine: Engine, optimizers: Iterable[Optimizer], shapes: Mapping[int, tuple[int, ...]]
) -> None:
    """Drop the states of parameters that have another shape now. Local. `shard()` has made this
    rank's parts of the other states (`follow` in optim/state_dicts.py).

    `shapes`: of the parameters before, by id. States of matrices that are stepped whole may have any
    shape.
    """
    with disable_torch_function():
        for optimizer in optimizers:
            whole = owned_by(optimizer)
            for entry in engine.entries:
                if (known := whole.get(id(entry.param))) is not None:
                    if shapes.get(id(entry.param)) not in (None, known.matrix.shape):
                        optimizer.state.pop(entry.param, None)
                    continue
                values = (optimizer.state.get(entry.param) or {}).values()
                if not entry.flat.unsharded and any(
                    isinstance(v, torch.Tensor) and v.numel() > 1 and v.shape != entry.param.shape
                    for v in values
                ):
                    del optimizer.state[entry.param]
