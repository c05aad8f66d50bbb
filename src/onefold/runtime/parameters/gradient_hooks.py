"""Gradient hooks that the user registers on a parameter, before or after `shard()`. Autograd calls
them with this rank's whole gradient of this backward pass, before the reduction.

| hook                                   | is called with                 | the engine's own hook (runtime/reduce.py) comes behind     |
|----------------------------------------|--------------------------------|------------------------------------------------------------|
| `register_hook`                        | the gradient                   | it                                                         |
| `register_post_accumulate_grad_hook`   | the parameter that users hold  | it, in the same dictionary                                 |

Both are registered on the leaf that autograd knows. While a gradient lies there, as when a hook of the
second kind runs, its parameter is whole: `.grad` reads and writes that gradient, and the values are
gathered on first use. A hook must not write to the values: they would differ between ranks, because each rank's
gradient is its own.

[Note: hooks that sum over tensor parallelism] transformers adds up the parts of a replicated gradient
(the norms of q and k under tensor parallelism) in a hook of the second kind. Such a hook is known by
what it is: a function of the package transformers that calls `all_reduce` and encloses a mesh.
`shard()` finds it in the module that will register it, marks the parameter partial (`Found.partial`),
and the hook never runs: the parts are summed in the message that sums over the data axes.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from onefold.runtime.differentiate import keep_hooks_from_compiler
from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    entry_of,
)
from onefold.runtime.parameters.values import written

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry

_T: Any = torch.Tensor

IN_BACKWARD = (
    "inside a backward pass the gradients are this rank's own: they are not reduced yet, so every"
    " rank would step to something else. Use the ordinary order (backward(), then"
    " optimizer.step()), or, to free gradients while the backward pass runs, Recipe.zero(...,"
    " step_in_backward=True) with the optimizer's states offloaded."
)


def move(old: Any, entry: Entry) -> None:
    """Move the hooks of `old`, the parameter that `shard()` was given, to the leaf."""
    _move(
        old, entry.compute, lambda hook: _on_leaf(entry, hook) if _is_called(entry, hook) else None
    )


def give_back(entry: Entry) -> None:
    """Move the hooks back when the parameter becomes an ordinary one again."""
    _move(entry.compute, entry.param, lambda hook: getattr(hook, "users", None))


def _move(source: Any, target: Any, changed: Callable[[Any], Any]) -> None:
    """Move all hooks; of those that are called with the parameter, what `changed` makes of them. The
    dicts stay the same objects, so that the handles that the user holds still remove hooks.
    """
    target._backward_hooks, source._backward_hooks = source._backward_hooks, None
    post, source._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks, None
    for key, hook in tuple((post or {}).items()):
        if (hook := changed(hook)) is not None:
            post[key] = hook
        else:
            del post[key]
    target._post_accumulate_grad_hooks = post


def register(param: Any, hook: Any, post: bool) -> Any:
    """Register a hook on a sharded parameter; `post`: one that is called with the parameter, when its
    gradient has been accumulated. Returns the handle.
    """
    register_on: Any = _T.register_post_accumulate_grad_hook if post else _T.register_hook
    entry = entry_of(param)
    if entry is None or not param.requires_grad:
        return register_on(param, hook)  # torch says why not
    if post and not _is_called(entry, hook):
        return RemovableHandle(OrderedDict())
    leaf: Any = entry.compute
    leaf.requires_grad = True  # the engine follows at the next pass
    handle = register_on(leaf, _on_leaf(entry, hook) if post else hook)
    if post and entry.arrival is not None:
        hooks, own = leaf._post_accumulate_grad_hooks, entry.arrival.id
        hooks[own] = hooks.pop(own)  # the engine's stays the last
    return handle


def _on_leaf(entry: Entry, hook: Any) -> Callable[[torch.Tensor], None]:
    """Return what calls the user's `hook`, registered on the leaf of `entry`, with the parameter."""
    known = weakref.ref(entry)

    def call(_: torch.Tensor) -> None:
        e = known()
        engine = e.engine() if e is not None else None
        if e is None or engine is None or engine.closed:
            return
        engine.passes.event(True)
        if e.box is not None:
            with disable_torch_function(), torch.no_grad():
                e.box.settle(e.compute)
        before = written(e.param), e.compute._version
        hook(e.param)
        if (written(e.param), e.compute._version) != before:
            raise ShardedParameterError(
                f"a gradient hook wrote to parameter {e.slot.name!r}, but {IN_BACKWARD}"
            )

    call.users = hook  # type: ignore[attr-defined]
    return call


keep_hooks_from_compiler(_on_leaf)


# -- hooks that sum over tensor parallelism --------------------------------------------------------
#
# See [Note: hooks that sum over tensor parallelism].


def summed_over(module: nn.Module) -> Sequence[int]:
    """Return the ranks over which a hook will sum the gradients of the module's own parameters:
    transformers registers it in the module's forward pass. Nothing if there is no such hook.
    """
    forward = module.__dict__.get("forward")
    if not inspect.isfunction(forward):
        return ()
    for cell in forward.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if ranks := _ranks_of(cell.cell_contents):
                return ranks
    return ()


def _ranks_of(hook: Any) -> Sequence[int]:
    """Return the ranks over which a hook of transformers sums gradients; nothing if it is another
    hook.
    """
    if not inspect.isfunction(hook) or hook.__module__.partition(".")[0] != "transformers":
        return ()
    if "all_reduce" not in hook.__code__.co_names:
        return ()
    for enclosed in inspect.getclosurevars(hook).nonlocals.values():
        if isinstance(getattr(enclosed, "mesh", None), torch.Tensor):
            ranks: list[int] = enclosed.mesh.flatten().tolist()
            return ranks
    return ()


def _is_called(entry: Entry, hook: Any) -> bool:
    """Whether a post-accumulate hook is called.

    Raises:
        ValueError: it sums over tensor parallelism, and the parameter is not marked partial.
    """
    ranks = _ranks_of(hook)
    if len(ranks) > 1 and entry.parts == 1:
        raise ValueError(
            f"transformers adds up the gradient of {entry.slot.name!r} over ranks"
            f" {', '.join(map(str, ranks))}, in a hook on what has accumulated. shard() does it in"
            " its own messages if it is given a mesh in which these ranks, and no others, have the"
            " same data: shard(..., mesh=mesh['fsdp', 'tp'], data='fsdp'). If the module's forward"
            f" was wrapped before shard(), also give partial=[{entry.slot.name!r}]."
        )
    return not ranks
