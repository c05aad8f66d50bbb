"""`optimizer.state` outside a step: states of divided parameters show the whole parameter's shape.

    inside `step()`, and to the engine   plain tensors of this rank's elements    `PlainStates`: a defaultdict as torch's own
    to the user's code                   intervals (`Interval`)                   `FacedStates`: converted on access

For the user `optimizer.state[p]["exp_avg"].norm()` is the norm of the whole, `.zero_()` writes this
rank's elements, and `.shape` is the parameter's. Without access there is no cost: a step only
changes the class of one object, and changes it back afterwards.

[Note: states elsewhere] All ranks must reach the same collectives, so `optimizer.state` has the
same keys on each. A rank that owns no element of a parameter has a dict for it as soon as the other
ranks have stepped it, or a load has given them its states. When the user's code looks, the dict is
filled: with empty intervals under the keys of another parameter of the group, with the number of
steps counted since the last look, and with the other parameter's numbers. Nothing but the user's
code reads it: whole states are collected from ranks that own elements.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.optim.verdict import fresh_state
from onefold.optim.whole import owned, owned_by
from onefold.quant.moments import MomentPolicy, moment_policy, torchao_format
from onefold.recipe.moments import SIGNED, packed
from onefold.runtime.parameters.interval import (
    Interval,
    IntervalSpec,
    disable_torch_function,
    dress,
    spec_of,
)
from onefold.runtime.parameters.values import StatePlace


def policy_of(optimizer: Optimizer, entry: Any) -> MomentPolicy | None:
    """Return how the moments of `entry` are stored; None: as the optimizer makes them."""
    return moment_policy(optimizer, entry.engine().recipe, entry.flat)


def stored_as(
    how: MomentPolicy | None, entry: Any, key: str, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return {key: dtype} of what is stored for the state `key`, by the policy for it."""
    if how is None:
        return {key: dtype}
    format = how.of(entry)
    parts = {name: packed(name) for name in format.keys(key)}
    return {n: part.dtype if part is not None else format.dtype for n, part in parts.items()}


_enabled = torch._C._is_torch_function_enabled


class PlainStates(defaultdict[Any, Any]):
    """The states as the optimizer's own step sees them.

    Attributes:
        dressed: the states that were read outside since the last step, and hold intervals.
        elsewhere: {id of a parameter of which this rank has no element: steps of the other ranks
            since its state was last filled}. Each has a key here, which keeps it alive.
    """

    dressed: list[tuple[IntervalSpec, dict[str, Any]]]
    elsewhere: dict[int, int]


class FacedStates(PlainStates):
    """The states as code outside a step sees them, with the same keys and order on every rank."""

    optimizer: weakref.ref[Optimizer]
    complete: bool
    donors: tuple[dict[int, Any], Any] | None

    def __getitem__(self, key: Any) -> Any:
        return self._face(key, super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (it is what this is written with)

    def __contains__(self, key: object) -> bool:
        self._complete()
        return super().__contains__(key)

    def __len__(self) -> int:
        self._complete()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._complete()
        return super().__iter__()

    def keys(self) -> Any:
        self._complete()
        return super().keys()

    def items(self) -> Any:
        self._face_all()
        return super().items()

    def values(self) -> Any:
        self._face_all()
        return super().values()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changed(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changed(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self[key]
        self._changed(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        keys = list(self)
        if not keys:
            raise KeyError("popitem(): the dictionary is empty")
        return keys[-1], self.pop(keys[-1])

    def clear(self) -> None:
        super().clear()
        self.elsewhere.clear()
        self.donors = None

    def _changed(self, key: Any) -> None:
        self.elsewhere.pop(id(key), None)
        self.donors = None

    def _is_owned(self, key: Any) -> bool:
        """Whether it is stepped whole: its owner has its states as they are."""
        optimizer = self.optimizer()
        with disable_torch_function():
            return optimizer is not None and owned(optimizer, key) is not None

    def _face_all(self) -> None:
        self._complete()
        if _enabled():
            for key, state in list(super().items()):
                self._face(key, state)

    def _complete(self) -> None:
        """Put the states in the order of the groups. Drop those of parameters elsewhere that the
        optimizer keeps no state for.
        """
        optimizer = self.optimizer()
        if self.complete or optimizer is None or not _enabled():
            return
        self.complete = True
        with disable_torch_function():
            for param, state in list(super().items()):
                if not state and id(param) in self.elsewhere and not self.like_others(param):
                    del self[param]
            own = dict(super().items())
            params = [p for group in optimizer.param_groups for p in group["params"]]
            wanted = [p for p in params if p in own]
            if [id(p) for p in wanted] == [id(key) for key, _ in zip(own, wanted, strict=False)]:
                return
            super().clear()
            for key in [*wanted, *own]:
                if key not in self:
                    super().__setitem__(key, own[key])

    def _face(self, key: Any, state: Any) -> Any:
        spec = spec_of(key) if _enabled() and isinstance(state, dict) else None
        if spec is None or self._is_owned(key):
            return state
        with disable_torch_function():
            numel = spec.stop - spec.start
            if not numel and spec.numel:
                self._fill(key, state)
            for name, value in state.items():
                if (
                    type(value) not in (torch.Tensor, StatePlace)
                    or tuple(value.shape) != (numel,)
                    or packed(name) is not None
                    or name == "step"
                ):
                    continue
                if isinstance(value, StatePlace):
                    value.spec = spec.of(str(name))
                else:
                    state[name] = dress(value, spec.of(str(name)))
            self.dressed.append((spec, state))
        return state

    def _fill(self, param: Any, state: dict[str, Any]) -> None:
        """See [Note: states elsewhere]."""
        since = self.elsewhere.pop(id(param), None)
        if since is None and not state:
            return  # the other ranks have no state of it either
        others, before = self.like_others(param), state.get("step", 0)
        new = not state
        state |= {
            name: value
            for name, value in others.items()
            if new or (name in state and not isinstance(state[name], Interval))
        }
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = torch.full_like(step, float(before) + (since or 0))
        elif isinstance(step, (int, float)):
            state["step"] = type(step)(before + (since or 0))

    def like_others(self, param: Any) -> dict[str, Any]:
        """Return empty states, and the numbers of another parameter's state, for a parameter of
        which this rank has no element.
        """
        entry, optimizer = param.__dict__["_onefold_entry"](), self.optimizer()
        if entry is None or optimizer is None:
            return {}
        other, anyone = self._donor(optimizer, param)
        if other is None:
            # Another group may have other keys
            if fresh := self._fresh(optimizer, entry, param):
                return fresh
            other = anyone
        if other is None:
            return {}
        state = dict.__getitem__(self, other)
        spec = spec_of(other)
        assert spec is not None
        out: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                out[name] = value
            elif packed(name) is not None or (
                value.dim() == 1 and value.numel() == spec.stop - spec.start
            ):
                # The sizes of the two decide separately whether moments are packed
                part = packed(name)
                key = part.key if part is not None else name
                how = policy_of(optimizer, entry) if key in SIGNED else None
                kinds = stored_as(how, entry, key, value.dtype)
                # On the host if the format differs: with states on NVMe this rank has no region
                # for it
                for key, kind in kinds.items():
                    device = "cpu" if value.is_meta and key != name else value.device
                    out[key] = torch.empty(0, dtype=kind, device=device)
            else:
                out[name] = value.detach().clone()
        return out

    def _donor(self, optimizer: Optimizer, param: Any) -> tuple[Any, Any]:
        """Return a parameter with a state, of which this rank has elements: one of the same group,
        and one of any. None where there is none.
        """
        if self.donors is None:
            found: dict[int, Any] = {}
            whole = owned_by(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    spec = spec_of(p)
                    if id(p) in whole:
                        continue
                    if spec is not None and spec.start < spec.stop and dict.get(self, p):
                        found |= dict.fromkeys(map(id, group["params"]), p)
                        break
            self.donors = found, next(iter(found.values()), None)
        return self.donors[0].get(id(param)), self.donors[1]

    def _fresh(self, optimizer: Optimizer, entry: Any, param: Any) -> dict[str, Any]:
        """Return the state that the optimizer gives a parameter at its first step, where this rank
        has no state of any other parameter; {} if it cannot be known.
        """
        recipe = entry.engine().recipe
        group = next(
            (g for g in optimizer.param_groups if any(p is param for p in g["params"])), {}
        )
        if recipe.moments or entry.flat.storage.offloaded or torchao_format(optimizer) is not None:
            return {}
        with contextlib.suppress(Exception), torch.no_grad():
            return fresh_state(optimizer, group, param)
        return {}


def show(optimizer: Optimizer) -> None:
    """From now on show intervals to code outside the step."""
    state: Any = optimizer.state
    if type(state) is PlainStates:
        state.__class__ = FacedStates
    elif type(state) is not FacedStates:
        faced = FacedStates(dict)
        faced.dressed, faced.elsewhere, faced.optimizer = [], {}, weakref.ref(optimizer)
        for key, value in state.items():
            dict.__setitem__(faced, key, value)
        optimizer.state = state = faced
    state.complete, state.donors = False, None


def stepped_elsewhere(optimizer: Optimizer, params: list[Any]) -> None:
    """Count a step of `params`, of which this rank has no element, on the other ranks. See [Note:
    states elsewhere].
    """
    state: Any = optimizer.state
    if params and type(state) is FacedStates:
        counts, whole = state.elsewhere, owned_by(optimizer)
        for param in params:
            if id(param) in whole:
                continue  # its owner has its states
            known = counts.get(id(param))
            if known is None:
                dict.setdefault(state, param, {})
            counts[id(param)] = (known or 0) + 1


def loaded_elsewhere(optimizer: Optimizer, param: Any) -> None:
    """Note that a load has given the other ranks states of `param`, of which this rank has no
    element. Its numbers are taken from another parameter's state. Called after `show`.
    """
    state: Any = optimizer.state
    if type(state) is FacedStates and (like := state.like_others(param)):
        same_group, anyone = state._donor(optimizer, param)
        if same_group is None and anyone is not None and "step" in like:
            step = dict.__getitem__(state, anyone).get("step", like["step"])
            like["step"] = step.clone() if isinstance(step, torch.Tensor) else step
        state[param] = like


def hide(optimizer: Optimizer) -> None:
    """From now on the states are plain tensors, as a step needs them."""
    state: Any = optimizer.state
    if type(state) is FacedStates:
        state.__class__ = PlainStates  # type: ignore[assignment]
        for spec, known in state.dressed:
            make_plain(spec, known)
        state.dressed.clear()


def make_all_plain(optimizer: Optimizer) -> None:
    """Make this rank's elements of every state that a constructor, or a step before shard(), made. Of
    parameters that are stepped whole intervals become whole tensors: collective, if there are any.
    """
    whole = owned_by(optimizer) if optimizer.state else {}
    known = [
        (param, spec_of(param), state)
        for param, state in dict.items(optimizer.state)
        if isinstance(state, dict)
    ]
    elementwise = frozenset(
        key
        for param, spec, state in known
        for key, value in state.items()
        if spec is not None and id(param) not in whole
        if type(value) is torch.Tensor and _is_whole(value, spec)
    )
    for param, spec, state in known:
        if id(param) not in whole:
            make_plain(spec, state, elementwise)
            continue
        for key, value in state.items():
            if isinstance(value, Interval) and (of := spec_of(value)) is not None:
                state[key] = of.gather(value.detach(), f"the state {key!r}")


def make_plain(
    spec: IntervalSpec | None, state: dict[str, Any], elementwise: frozenset[str] = frozenset()
) -> None:
    """Replace intervals and plain tensors of the parameter's whole shape, in the state of one
    parameter, by this rank's elements.

    `elementwise`: keys that are element-wise in the states of other parameters. For a 0-dim
    parameter the shape does not tell an element-wise state from a count of steps.
    """
    for key, value in state.items():
        if isinstance(value, Interval):
            state[key] = value.as_subclass(torch.Tensor)
        elif (
            spec is not None
            and type(value) is torch.Tensor
            and _is_whole(value, spec, key in elementwise)
            and packed(key) is None
        ):
            state[key] = value.detach().reshape(-1)[spec.start : spec.stop].clone()


def _is_whole(value: torch.Tensor, spec: IntervalSpec, also_numbers: bool = False) -> bool:
    """Return whether a plain state is whole, while this rank holds only a part of the parameter."""
    return (
        value.shape == spec.shape
        and tuple(value.shape) != (spec.stop - spec.start,)
        and (value.dim() > 0 or also_numbers)
    )
