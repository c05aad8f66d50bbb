"""What Onefold puts around methods of torch's, from the first `shard()` on: all of it is here.

torch has hooks before and after a step, and around the state dict of an optimizer that is known. It
has none for the moments of this table (torch 2.13, torch/optim/optimizer.py):

| method                          | torch has no hook                                                | put around it                      |
|---------------------------------|------------------------------------------------------------------|------------------------------------|
| `step` of each class            | behind a step that raises; `super().step()` calls the same hooks | calls are counted; the last tells  |
| `add_param_group`               | when an optimizer is made                                        | the optimizer is met afterwards    |
| `state_dict`, `load_state_dict` | before the first call on an optimizer that is not known          | the optimizer is met before        |
| `load_state_dict`               | where it casts states to `param.dtype`                           | parameters show the masters' dtype |
| `zero_grad`, also of modules    | where it reads `.grad` only to drop it                           | `.grad` is shown as it is stored   |

Each calls torch's method with the same arguments and returns its result. While no model is sharded
they do nothing else.

[Note: classes, not objects] A wrapper on an optimizer would make a reference cycle with it, and
would be lost in its copies. torch itself wraps the `step` of a class when the class gets its first
object (`Optimizer.profile_hook_step`), so the counter is put around that: learning-rate schedulers,
scalers and copies take it with the method. A scheduler made before the first `shard()` has put the
method as it was into `optimizer.step`. It is replaced at the first step (`count_from_now_on`), so
this one step alone is not counted. If it raises, the next step ends it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.runtime.parameters.parameter import reader


@dataclass(frozen=True)
class Follower:
    """Who is told.

    Attributes:
        has_parameters: an optimizer has got a group of parameters.
        is_asked: the state dict of an optimizer is about to be made, or loaded.
        step_is_over: the outermost call of an optimizer's step has returned or raised.
    """

    has_parameters: Callable[[Optimizer], None]
    is_asked: Callable[[Optimizer], None]
    step_is_over: Callable[[Optimizer], None]


_followers: list[Follower] = []  # at most one
_calls: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def calls_of_step(optimizer: Optimizer) -> int:
    """Return how many counted calls of the optimizer's step have not returned: 2 inside the
    `super().step()` of its own step.
    """
    return _calls.get(optimizer, 0)


def count_from_now_on(optimizer: Optimizer) -> None:
    """Count the steps of an optimizer into which somebody put a function as its `step`."""
    step = optimizer.__dict__.get("step")
    if isinstance(step, FunctionType):
        optimizer.step = _counted(step, weakref.ref(optimizer))  # type: ignore[method-assign]


def follow(follower: Follower) -> None:
    """Tell `follower` from now on, until `unfollow`."""
    _put_around_torchs()
    _followers[:] = [follower]


def unfollow() -> None:
    _followers.clear()


# -- the wrappers ----------------------------------------------------------------------------------


def _counted(step: Any, of: weakref.ref[Optimizer] | None = None) -> Any:
    """Put the counter around `step`, with torch's call of the hooks in it: a class's, or the one
    that was put into an optimizer (`of`).
    """
    if getattr(step, _OURS, False):
        return step

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0] if of is None else of()
        if optimizer is None or not _followers:
            return step(*args, **kwargs)
        _calls[optimizer] = calls_of_step(optimizer) + 1
        try:
            return step(*args, **kwargs)
        finally:
            _calls[optimizer] -= 1
            if not _calls[optimizer]:
                for follower in _followers:
                    follower.step_is_over(optimizer)

    counted.__dict__[_OURS] = True
    return counted


def _tells_of_parameters(add_param_group: Any) -> Any:
    @functools.wraps(add_param_group)
    def told(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        out = add_param_group(self, *args, **kwargs)
        for follower in _followers:
            follower.has_parameters(self)
        return out

    return told


def _tells_of_call(method: Any) -> Any:
    @functools.wraps(method)
    def told(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for follower in _followers:
            follower.is_asked(self)
        return method(self, *args, **kwargs)

    return told


def _reads(flag: str, method: Any) -> Any:
    """Set a flag of `reader` during the call."""

    @functools.wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _followers:
            return method(self, *args, **kwargs)
        before = getattr(reader, flag)
        setattr(reader, flag, True)
        try:
            return method(self, *args, **kwargs)
        finally:
            setattr(reader, flag, before)

    return read


# -- putting them there ----------------------------------------------------------------------------


_OURS = "_onefold_counts"


def _put_around_torchs() -> None:
    """Put the wrappers around torch's methods, once."""
    if getattr(Optimizer.profile_hook_step, _OURS, False):
        return
    torchs: Any = Optimizer.profile_hook_step

    def hooked_and_counted(step: Any) -> Any:
        hooked = torchs(step)
        hooked.hooked = True  # as torch marks what it returns here
        return _counted(hooked)

    hooked_and_counted.__dict__[_OURS] = True
    kind: Any = Optimizer
    kind.profile_hook_step = staticmethod(hooked_and_counted)
    for each in _kinds(Optimizer):  # classes that had an object already
        own = each.__dict__.get("step")
        if getattr(own, "hooked", False):
            each.step = _counted(own)  # type: ignore[attr-defined]
    kind.add_param_group = _tells_of_parameters(kind.add_param_group)
    kind.state_dict = _tells_of_call(kind.state_dict)
    kind.load_state_dict = _tells_of_call(_reads("casts_states", kind.load_state_dict))
    module: Any = nn.Module
    for zeroing in (kind, module):
        zeroing.zero_grad = _reads("drops_gradients", zeroing.zero_grad)


def _kinds(kind: type) -> Iterable[type]:
    """Return `kind` and all its subclasses."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))
