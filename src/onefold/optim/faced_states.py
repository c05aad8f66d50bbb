"""`optimizer.state` outside a step: states of divided parameters show the whole parameter's shape.

    inside `step()`, and to the engine   plain tensors of this rank's elements    `PlainStates`: a defaultdict as torch's own
    to the user's code                   intervals (`Interval`)                   `FacedStates`: converted on access

For the user `optimizer.state[p]["exp_avg"].norm()` is the norm of the whole, `.zero_()` writes this
rank's elements, and `.shape` is the parameter's. Without access there is no cost: a step only
changes the class of one object, and changes it back afterwards.

[Note: states elsewhere] All ranks must reach the same collectives, so `optimizer.state` has the
same keys on each. A rank that owns no element of a parameter has a dict for it as soon as the other
ranks have stepped it, or a load has given them its states. When the user's code looks, the dict is
filled: with empty intervals under the keys of another parameter (of its group, if there is one), with the
number of steps counted since the last look, and with the other parameter's numbers. Nothing but the user's
code reads it: whole states are collected from ranks that own elements.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

from onefold.optim.verdict import fresh_state
from onefold.optim.whole import owned_by
from onefold.quant.moments import MomentPolicy, moment_policy
from onefold.recipe.moments import SIGNED, packed
from onefold.runtime.parameters.interval import (
    Interval,
    IntervalSpec,
    disable_torch_function,
    dress,
    entry_of,
    spec_of,
)
from onefold.runtime.parameters.values import Elsewhere


def policy_of(optimizer: Optimizer, entry: Any, key: Any = "exp_avg") -> MomentPolicy | None:
    """Return how the state `key` of `entry` is stored; None: as the optimizer makes it."""
    return moment_policy(optimizer, entry.engine().recipe, entry.flat) if key in SIGNED else None


def stored_as(
    optimizer: Optimizer, entry: Any, key: str, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return {key: dtype} of what is stored for the state `key`."""
    how = policy_of(optimizer, entry, key)
    return {key: dtype} if how is None else how.stored(entry, key)


Kind = Literal["packed", "elements", "number", "other"]
Shape = tuple[int, ...]


def kinds_of(states: Sequence[tuple[Shape, Mapping[Any, Any]]]) -> list[dict[Any, Kind]]:
    """Return {key: kind} for the state of each parameter, given as `(shape, state)`.

    The shape does not tell a step count from an element-wise state of a 0-dim parameter. The states
    of the other parameters do: their value of that key differs in shape from its parameter.
    """
    odd = {
        key
        for shape, state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and (tuple(value.shape) != shape or key == "step")
    }

    def kind(key: Any, value: Any, shape: Shape) -> Kind:
        if packed(key) is not None:
            return "packed"
        same = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
        one = not isinstance(value, torch.Tensor) or (key in odd and value.numel() == 1)
        if one and not (same and shape):
            return "number"
        return "elements" if same else "other"

    return [{k: kind(k, v, shape) for k, v in state.items()} for shape, state in states]


_enabled = torch._C._is_torch_function_enabled


class PlainStates(defaultdict[Any, Any]):
    """The states as the optimizer's own step sees them.

    Attributes:
        dressed: the states that were read outside since the last step, and hold intervals.
        elsewhere: {id of a parameter of which this rank has no element: steps of the other ranks
            since its state was last filled}. Each has a key here, which keeps it alive.
    """

    optimizer: weakref.ref[Optimizer]
    dressed: list[tuple[IntervalSpec, dict[str, Any]]]
    elsewhere: dict[int, int]


class FacedStates(PlainStates):
    """The states as code outside a step sees them, with the same keys and order on every rank."""

    complete = True

    def __getitem__(self, key: Any) -> Any:
        self._complete()
        return self._face(key, super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (it is what this is written with)

    def _complete(self) -> None:
        """Fill the states elsewhere, and put all in the order of the groups."""
        optimizer = self.optimizer() if not self.complete and _enabled() else None
        if optimizer is None:
            return
        self.complete = True
        with disable_torch_function():
            self.fill(optimizer)
            own = dict(self)
            params = [p for group in optimizer.param_groups for p in group["params"] if p in own]
            self.clear()
            for key in dict.fromkeys([*params, *own]):
                self[key] = own[key]

    def fill(self, optimizer: Optimizer) -> None:
        """See [Note: states elsewhere]. Drops those that the optimizer keeps no state for."""
        waiting, self.elsewhere = self.elsewhere, {}
        whole = owned_by(optimizer) if waiting else {}
        for group in optimizer.param_groups if waiting else ():
            there = [p for p in group["params"] if dict.__contains__(self, p)]
            lacking = [p for p in there if id(p) in waiting]
            others = (dict.__getitem__(self, p) for p in there if self._has_some(p, whole))
            other: dict[str, Any] = next(others, {})
            fresh: dict[str, Any] = {}
            with contextlib.suppress(Exception), torch.no_grad():  # else it cannot be known
                fresh = fresh_state(optimizer, group, lacking[0]) if lacking else {}
            for param in lacking:
                known, steps = dict.__getitem__(self, param), waiting[id(param)]
                like = dict[str, Any]()
                for key, value in fresh.items():
                    if isinstance(value, torch.Tensor) and not value.numel():  # of elements
                        kinds = stored_as(optimizer, entry_of(param), key, value.dtype)
                        like |= {k: value.new_empty(0, dtype=kind) for k, kind in kinds.items()}
                    else:
                        like[key] = copy.deepcopy(other.get(key, value))
                if steps and "step" in like:
                    like["step"] = like["step"] * 0 + known.get("step", 0) + steps
                known |= {k: value for k, value in like.items() if k in known or not known}
                if not known:
                    dict.__delitem__(self, param)

    def _has_some(self, param: Any, whole: Any) -> bool:
        """Whether it is sharded, and this rank has elements and states of it."""
        spec = spec_of(param) if id(param) not in whole else None
        return spec is not None and spec.start < spec.stop and bool(dict.get(self, param))

    def _face_all(self) -> None:
        for key, state in list(dict.items(self)):
            self._face(key, state)

    def _face(self, key: Any, state: Any) -> Any:
        spec = spec_of(key) if _enabled() and isinstance(state, dict) else None
        optimizer = self.optimizer() if spec is not None else None
        if spec is None or optimizer is None:
            return state
        with disable_torch_function():
            if id(key) in owned_by(optimizer):  # its owner has its states as they are
                return state
            for name, value in state.items():
                if (
                    not (type(value) is torch.Tensor or isinstance(value, Elsewhere))
                    or tuple(value.shape) != (spec.stop - spec.start,)
                    or packed(name) is not None
                    or name == "step"
                ):
                    continue
                if isinstance(value, Elsewhere):
                    value.__dict__["_onefold_spec"] = spec.of(str(name))
                else:
                    state[name] = dress(value, spec.of(str(name)))
            self.dressed.append((spec, state))
        return state


def _looked_at(name: str, faced: bool) -> Callable[..., Any]:
    """Return the method of a dict as code outside a step calls it. `faced`: it gives states."""
    method = getattr(dict, name)

    def looked_at(self: FacedStates, *args: Any) -> Any:
        self._complete()
        if faced:
            self._face_all()
        return method(self, *args)

    return looked_at


for _name in ("__contains__", "__len__", "__iter__", "keys", "__setitem__", "__delitem__", "clear"):
    setattr(FacedStates, _name, _looked_at(_name, faced=False))
for _name in ("items", "values", "pop", "popitem", "setdefault"):
    setattr(FacedStates, _name, _looked_at(_name, faced=True))


def show(optimizer: Optimizer) -> None:
    """From now on show intervals to code outside the step."""
    state: Any = optimizer.state
    if not isinstance(state, PlainStates):
        faced = PlainStates(dict, state)
        faced.optimizer, faced.dressed, faced.elsewhere = weakref.ref(optimizer), [], {}
        optimizer.state = state = faced
    state.__class__, state.complete = FacedStates, False


def stepped_elsewhere(optimizer: Optimizer, params: list[Any], loaded: bool = False) -> None:
    """Count a step of `params`, of which this rank has no element, on the other ranks; or take in that
    these were given states that were `loaded`, with the numbers of another parameter's. Called after
    `show`. See [Note: states elsewhere].
    """
    state: Any = optimizer.state
    if not params or type(state) is not FacedStates:
        return
    counts, whole = state.elsewhere, owned_by(optimizer)
    for param in params:
        if id(param) in whole:
            continue  # its owner has its states
        if loaded or dict.get(state, param) is None:
            dict.__setitem__(state, param, {})
            counts[id(param)] = 0
        counts[id(param)] = counts.get(id(param), 0) + (not loaded)
    if loaded:
        state.fill(optimizer)


def hide(optimizer: Optimizer) -> None:
    """From now on the states are plain tensors, as a step needs them."""
    state: Any = optimizer.state
    if type(state) is FacedStates:
        state.__class__ = PlainStates  # type: ignore[assignment]
        _make_plain(state.dressed)
        state.dressed.clear()


def make_plain(optimizer: Optimizer) -> None:
    """Make this rank's elements of every state that a constructor, or a step before shard(), made. Of
    parameters that are stepped whole intervals become whole tensors: collective, if there are any.
    """
    whole, plain = owned_by(optimizer) if optimizer.state else {}, []
    for param, state in dict.items(optimizer.state):
        spec = spec_of(param)
        if spec is None or not isinstance(state, dict):
            continue
        if id(param) not in whole:
            plain.append((spec, state))
            continue
        for key, value in state.items():
            if isinstance(value, Interval) and (of := spec_of(value)) is not None:
                state[key] = of.gather(value.detach(), f"the state {key!r}")
    _make_plain(plain)


def _make_plain(states: Sequence[tuple[IntervalSpec, dict[str, Any]]]) -> None:
    """Replace intervals, and plain tensors of the parameter's whole shape, by this rank's elements."""
    kinds = kinds_of([(tuple(spec.shape), state) for spec, state in states])
    for (spec, state), kind_of in zip(states, kinds, strict=True):
        held = slice(spec.start, spec.stop)
        for key, value in state.items():
            if isinstance(value, Interval):
                state[key] = value.as_subclass(torch.Tensor)
                continue
            whole = kind_of[key] == "elements" and type(value) is torch.Tensor
            if whole and tuple(value.shape) != (held.stop - held.start,):
                state[key] = value.detach().reshape(-1)[held].clone()
