"""`optimizer.state` of divided parameters outside a step: states with the face of the whole, as the
parameters have it.

    inside `step()`, and to the engine     plain tensors of this rank's elements          `PlainStates`: a defaultdict as torch's own
    inside `step()`, and to the engine   plain tensors of this rank's elements    `PlainStates`: a defaultdict as torch's own
    to code of the user's                intervals (`Interval`)                   `FacedStates`: dressed when they are asked for
So `optimizer.state[p]["exp_avg"].norm()` is that of the whole, `.zero_()` writes this rank's
elements, `.shape` is the parameter's. A rank that owns nothing of a parameter shows empty intervals
under the keys that its other parameters have, so that all ranks come to the same collectives. What
nobody asks for costs nothing: a step changes one object's class before, and back behind it.
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
    """What the optimizer's own step sees. `dressed`: states that somebody has asked for since the
    last.
    """

    dressed: list[tuple[IntervalSpec, dict[str, Any]]]


class FacedStates(PlainStates):
    """What code outside a step sees: the same keys in the same order on every rank."""

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
        """States of the parameters that other ranks have all elements of, in the order of the
        groups.
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
        """Empty states for a parameter of which other ranks have all elements, if it was ever
        stepped.
        """
        entry = param.__dict__["_onefold_entry"]()
        # 1 is what shard() wrote
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
                        # On NVMe there is no region for a format that this rank has nothing in
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
        """{key: dtype} of what `entry` has where another parameter has `name`: whether moments are
        packed is for its own size to say.
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
    """From now on code outside sees intervals."""
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
    """From now on they are plain tensors, as a step wants them."""
    state: Any = optimizer.state
    if type(state) is FacedStates:
        state.__class__ = PlainStates  # type: ignore[assignment]
        for spec, known in state.dressed:
            make_plain(spec, known)
        state.dressed.clear()


def make_all_plain(optimizer: Optimizer) -> None:
    """As `make_plain`, of every parameter: what a constructor, or a step before shard(), made."""
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
    """Intervals in the state of one parameter, and plain tensors of the parameter's whole shape,
    become this rank's elements.

    `elementwise`: what other parameters have a number for each element of; of a 0-dim parameter a
    count of steps looks the same.
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
    """Whether a plain state has all elements of a parameter of which this rank holds a part."""
    return (
        value.shape == spec.shape
        and tuple(value.shape) != (spec.stop - spec.start,)
        and (value.dim() > 0 or also_numbers)
    )
