"""`optimizer.state_dict()`: gather the states of all ranks on rank 0's host.

every rank   a description of its states ──► all ranks: the same plan, or the same error
every rank   its elements, one state at a time ──► rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
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
    refuse_moment,
)
from onefold.recipe.moments import SIGNED, packed
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.stream import Read, tell_all, to_first
from onefold.runtime.storage import OnDisk

_CALL = "optimizer.state_dict()"


def after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `state_dict` hook: return the whole dict in place of this rank's part; None if
    `state_dict` is already whole.
    """
    if optimizer in locally:
        return None
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = Outline.of(optimizer)
        engine = outline.engine
        if engine is None or not outline.special:
            return None
        refuse_moment(engine, "state_dict")
        for each in outline.engines:
            each.transfers.check()
        said = _say(optimizer, outline)
        plan = _plan(outline, tell_all(engine, _CALL, said) if outline.divided else [said])
        first = engine.rank == 0 or not outline.divided
        state, error = _bring(optimizer, outline, plan, first)
        if outline.divided:
            error = first_of(tell_all(engine, _CALL, error))
        if error is not None:
            raise RuntimeError(f"{_CALL}: the states could not be read. {error}")
        if first:
            kept: Mapping[Any, Any] = optimizer.state
            state |= {k: value for k, value in kept.items() if not isinstance(k, torch.Tensor)}
        whole = {"state": state, "param_groups": _whole_groups(optimizer, outline)}
        return whole | {key: value for key, value in state_dict.items() if key not in whole}


#: What a rank reports for one parameter: None if it accounts for none of the elements, {} if it has
#: no state, else {key: (dtype, None)} for an element-wise state, {key: (None, value)} for others.
_Said = dict[Any, tuple[torch.dtype | None, Any]] | None


def _say(optimizer: Optimizer, outline: Outline) -> tuple[list[_Said], str | None]:
    """Return what this rank holds for each parameter, and a complaint if it has a state that cannot
    be combined. Parameters without elements that this rank accounts for are None.
    """
    states = [optimizer.state.get(p) or {} for p in outline.objects]
    sharded = [(n, e) for p in outline.params for n, e in zip(p.numbers, p.entries, strict=False)]
    odd = odd_keys((tuple(entry.param.shape), states[n]) for n, entry in sharded)
    said: list[_Said] = []
    wrong: str | None = None
    for param in outline.params:
        found: _Said = None
        if not param.entries and (state := states[param.numbers[0]]):
            found = {key: (None, value) for key, value in state.items()}
        for n, entry in zip(param.numbers, param.entries, strict=False):
            a, b = entry.accounted() if outline.divided else entry.owned()
            if found or (a == b and entry.slot.numel):
                continue
            found = {}
            how = moment_policy(optimizer, entry) if states[n] else None
            for key, value in states[n].items():
                sort = sort_of(key, value, tuple(entry.param.shape), odd)
                if (part := packed(key)) is not None:
                    found.setdefault(part.key, (torch.float32, None))
                elif sort == "elements":
                    dtype = value.dtype
                    if how is not None and key in SIGNED:
                        dtype = torch.promote_types(dtype, entry.flat.dtypes.master)
                    found[key] = dtype, None
                elif sort == "other" and (outline.divided or entry.flat.tiled):
                    wrong = wrong or (
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)}"
                        f" for parameter {param.name!r}: neither one number nor one for each"
                        " element, so that the parts of several ranks cannot be put together."
                        " local_state_dict has this rank's."
                    )
                else:
                    tensor = isinstance(value, torch.Tensor)
                    found[key] = None, value.detach().cpu().clone() if tensor else value
        said.append(found)
    return said, wrong


def _plan(outline: Outline, told: list[tuple[list[_Said], str | None]]) -> list[_Said]:
    """Return for each parameter what all ranks together hold.

    Raises:
        ValueError: on every rank, if the ranks' states cannot be combined.
    """
    wrong = next((complaint for _, complaint in told if complaint), None)
    if wrong is not None:
        raise ValueError(f"{_CALL}: {wrong}")
    plan: list[_Said] = []
    for at, param in enumerate(outline.params):
        found = [here for said, _ in told if (here := said[at]) is not None]
        kinds = [{key: dtype for key, (dtype, _) in here.items()} for here in found]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{_CALL}: the ranks keep different states of parameter {param.name!r}"
                f" ({kinds[0]} and {next(k for k in kinds if k != kinds[0])}): an optimizer must"
                " step on all ranks alike."
            )
        plan.append(found[0] if found and found[0] else None)
    return plan


def _bring(
    optimizer: Optimizer, outline: Outline, plan: list[_Said], first: bool
) -> tuple[dict[Any, Any], str | None]:
    """Return the whole states (on the first rank) and the first error of this rank's reads."""
    state: dict[Any, Any] = {}
    reader = _PartReader(optimizer)
    for number, (param, said) in enumerate(zip(outline.params, plan, strict=True)):
        if said is not None:
            state[number] = {
                key: value if dtype is None else _whole(reader, param, key, dtype, first)
                for key, (dtype, value) in said.items()
            }
    return state if first else {}, reader.error


def _whole(
    reader: _PartReader, param: Param, key: str, dtype: torch.dtype, first: bool
) -> torch.Tensor | None:
    whole = torch.zeros(param.shape, dtype=dtype, device="cpu") if first else None
    for entry in param.entries:
        out, part = None, entry.part
        if whole is not None:
            out = whole.view(-1)[part.first : part.first + entry.slot.numel]
        to_first(engine_of(entry), entry, dtype, reader.of(entry, key, dtype), out)
    return whole


class _PartReader:
    """Reads this rank's parts. It keeps the first error for the end: raising at once would leave
    the other ranks waiting.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.error: str | None = None

    def of(self, entry: Entry, key: str, dtype: torch.dtype) -> Read:
        def read(x: int, y: int) -> torch.Tensor:
            try:
                return _part(self.optimizer, entry, key, x, y).to(dtype)
            except Exception as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
                return torch.zeros(y - x, dtype=dtype, device="cpu")

        return read


def _part(optimizer: Optimizer, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
    """Return elements [x, y) of the state `key` of `entry`, counted from its first element. If the
    state is packed, x is at a block boundary.
    """
    parts: dict[str, torch.Tensor] = {}
    for name, value in optimizer.state.get(entry.param, {}).items():
        if name == key or ((part := packed(name)) is not None and part.key == key):
            held = entry.flat.storage.elements(entry, name, value, x, y)
            parts[name] = held.read() if isinstance(held, OnDisk) else held
    if not parts:  # this tile was never stepped, but other tiles of the parameter were
        return torch.zeros(y - x, device="cpu")
    if key in parts:
        return parts[key]
    how = moment_policy(optimizer, entry)
    assert how is not None
    return moments.unpacked(how, parts, key, y - x)


def _whole_groups(optimizer: Optimizer, outline: Outline) -> list[dict[str, Any]]:
    """Return the groups as torch's state dict has them, with parameters in place of tiles."""
    out: list[dict[str, Any]] = []
    start = first = 0
    for group, params in zip(optimizer.param_groups, outline.groups, strict=True):
        whole = {key: value for key, value in group.items() if key != "params"}
        if (named := group.get("param_names")) is not None:
            whole["param_names"] = [
                p.name if len(p.numbers) > 1 else named[p.numbers[0] - first] for p in params
            ]
        out.append({**whole, "params": list(range(start, start + len(params)))})
        start, first = start + len(params), first + len(group["params"])
    return out
