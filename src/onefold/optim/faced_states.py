"""`optimizer.state` outside a step: states of divided parameters show the whole parameter's shape.

    inside `step()`, and to the engine   plain tensors of this rank's elements    `PlainStates`: a defaultdict as torch's own
    to the user's code                   intervals (`Interval`)                   `FacedStates`: converted on access

For the user `optimizer.state[p]["exp_avg"].norm()` is the norm of the whole, `.zero_()` writes this
rank's elements, and `.shape` is the parameter's. A rank that owns no element of a parameter shows
empty intervals, under the keys that its other parameters have. This way all ranks reach the same
collectives. Without access there is no cost: a step only changes the class of one object, and
changes it back afterwards.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.quant.moments import torchao_format
from onefold.recipe.moments import FORMATS, SIGNED, packed
from onefold.runtime.parameters.interval import (
    Interval,
    IntervalSpec,
    disable_torch_function,
    dress,
    spec_of,
)

_enabled = torch._C._is_torch_function_enabled


class PlainStates(defaultdict[Any, Any]):
    """The states as the optimizer's own step sees them. `dressed`: the states that were read
    outside since the last step, and hold intervals.
    """

    dressed: list[tuple[IntervalSpec, dict[str, Any]]]


class FacedStates(PlainStates):
    """The states as code outside a step sees them, with the same keys and order on every rank."""

    optimizer: weakref.ref[Optimizer]
    complete: bool

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

    def _face_all(self) -> None:
        self._complete()
        if _enabled():
            for key, state in list(super().items()):
                self._face(key, state)

    def _complete(self) -> None:
        """Add states for parameters of which this rank has no element, and put all states in the
        order of the groups.
        """
        optimizer = self.optimizer()
        if self.complete or optimizer is None or not _enabled():
            return
        self.complete = True
        has = super().__contains__
        params = [p for group in optimizer.param_groups for p in group["params"]]
        empty = [
            p
            for p in params
            if (spec := spec_of(p)) is not None
            and spec.start == spec.stop
            and spec.numel
            and not has(p)
        ]
        with disable_torch_function():
            found = {p: state for p in empty if (state := self._like_others(p))}
            if not found:
                return
            own = dict(super().items())
            super().clear()
            for key in [*params, *own]:
                if (key in own or key in found) and not has(key):
                    super().__setitem__(key, own[key] if key in own else found[key])

    def _face(self, key: Any, state: Any) -> Any:
        spec = spec_of(key) if _enabled() and isinstance(state, dict) else None
        if spec is None:
            return state
        with disable_torch_function():
            numel = spec.stop - spec.start
            if not numel and spec.numel:
                others = self._like_others(key)
                state |= {
                    k: v
                    for k, v in others.items()
                    if not state or (k in state and not isinstance(state[k], Interval))
                }
            for name, value in state.items():
                if (
                    type(value) is torch.Tensor
                    and tuple(value.shape) == (numel,)
                    and packed(name) is None
                    and name != "step"
                ):
                    state[name] = dress(value, spec)
            self.dressed.append((spec, state))
        return state

    def _like_others(self, param: Any) -> dict[str, Any]:
        """Return empty states for a parameter of which this rank has no element; {} if it was
        never stepped.
        """
        entry = param.__dict__["_onefold_entry"]()
        # `last_write` is 1 after shard()
        if entry is None or entry.last_write < 2 or not entry.param.requires_grad:
            return {}
        for other, state in super().items():
            spec = spec_of(other)
            if spec is not None and state and spec.start < spec.stop:
                out: dict[str, Any] = {}
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor):
                        out[name] = value
                    elif packed(name) is not None or (
                        value.dim() == 1 and value.numel() == spec.stop - spec.start
                    ):
                        kinds = self._kinds(entry, name, value.dtype)
                        # On the host if the format differs: with states on NVMe this rank has no
                        # region for it
                        for key, kind in kinds.items():
                            out[key] = torch.empty(
                                0,
                                dtype=kind,
                                device="cpu" if value.is_meta and key != name else value.device,
                            )
                    else:
                        out[name] = value.detach().clone()
                return out
        return {}

    def _kinds(self, entry: Any, name: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return {key: dtype} of the states of `entry` that correspond to the state `name` of
        another parameter. The sizes of the two decide separately whether moments are packed.
        """
        optimizer, part = self.optimizer(), packed(name)
        key = part.key if part is not None else name
        own = torchao_format(optimizer) if optimizer is not None else None
        asked = own or FORMATS.get(entry.engine().recipe.moments)
        if key not in SIGNED or asked is None or not asked.packed:
            return {name: dtype}
        keys = asked.of(entry.part.numel).keys(key)
        return {
            one: found.dtype if (found := packed(one)) is not None else torch.float32
            for one in keys
        }


def show(optimizer: Optimizer) -> None:
    """From now on show intervals to code outside the step."""
    state: Any = optimizer.state
    if type(state) is PlainStates:
        state.__class__ = FacedStates
        state.complete = False  # type: ignore[attr-defined]
    elif type(state) is not FacedStates:
        faced = FacedStates(dict)
        faced.dressed, faced.optimizer, faced.complete = [], weakref.ref(optimizer), False
        for key, value in state.items():
            dict.__setitem__(faced, key, value)
        optimizer.state = faced


def hide(optimizer: Optimizer) -> None:
    """From now on the states are plain tensors, as a step needs them."""
    state: Any = optimizer.state
    if type(state) is FacedStates:
        state.__class__ = PlainStates  # type: ignore[assignment]
        for spec, known in state.dressed:
            make_plain(spec, known)
        state.dressed.clear()


def make_all_plain(optimizer: Optimizer) -> None:
    """Apply `make_plain` to every state that a constructor, or a step before shard(), made."""
    known = [(spec_of(param), state) for param, state in dict.items(optimizer.state)]
    elementwise = frozenset(
        key for spec, state in known if spec is not None and isinstance(state, dict)
        for key, value in state.items() if type(value) is torch.Tensor and _is_whole(value, spec)
    )  # fmt: skip
    for spec, state in known:
        make_plain(spec, state, elementwise)


def make_plain(
    spec: IntervalSpec | None, state: Any, elementwise: frozenset[str] = frozenset()
) -> None:
    """Replace intervals and plain tensors of the parameter's whole shape, in the state of one
    parameter, by this rank's elements.

    `elementwise`: keys that are element-wise in the states of other parameters. For a 0-dim
    parameter the shape does not tell an element-wise state from a count of steps.
    """
    for key, value in state.items() if isinstance(state, dict) else ():
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
