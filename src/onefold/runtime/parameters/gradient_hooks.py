"""Gradient hooks that the user registers on a parameter, before or after `shard()`. They see this
rank's whole gradient, before the reduction.

| hook                                   | lives on                       | is called                                                  |
|----------------------------------------|--------------------------------|------------------------------------------------------------|
| `register_hook`                        | the leaf that autograd knows   | by autograd, with the whole gradient                       |
| `register_post_accumulate_grad_hook`   | the parameter that users hold  | by the reducer, before it takes the gradient               |

[Note: hooks that sum over tensor parallelism] transformers adds up the parts of a replicated gradient
(the norms of q and k under tensor parallelism) in a hook of the second kind: it calls `all_reduce` on
`.grad`. That is wrong wherever `.grad` has accumulated: what was added up in one micro-batch is added
up again in the next. Such a hook is known by what it is: a function of the package transformers that
calls `all_reduce` and encloses a mesh. `shard()` finds it in the module that will register it, marks
the parameter partial (`Found.partial`), and the hook never runs: the parts are summed in the message
that sums over the data axes.

Any other hook is called, and watched (`_Collectives`):

| it has sent the gradient to other ranks         | then                                                      |
|-------------------------------------------------|-----------------------------------------------------------|
| of a DTensor parameter                          | raise: DTensor's own placements say what is added up      |
| in two micro-batches whose gradients accumulate | raise: the first one's was added up twice                 |
| else                                            | fine; if the parameter is marked too, or needs a mark,    |
|                                                 | parallel/marks.py raises                                  |

While a hook of the second kind runs, its parameter is whole: `.grad` reads and writes the whole
local gradient, and the values are gathered on first use. A hook must not write to the values: they
would differ between ranks, because each rank's gradient is its own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from onefold.memory import storage_of
from onefold.runtime.boxes import local_of
from onefold.runtime.parameters.interval import (
    ShardedParameterError,
    disable_torch_function,
    get_grad,
    mapped,
    set_grad,
)
from onefold.runtime.parameters.schema import operator_of

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry

_T: Any = torch.Tensor
_GRAD, _SET_GRAD, _DELETE_GRAD = _T.grad.__get__, _T.grad.__set__, _T.grad.__delete__
_DATA, _REQUIRES_GRAD, _SET_REQUIRES_GRAD = (
    _T.data.__get__, _T.requires_grad.__get__, _T.requires_grad.__set__,
)  # fmt: skip
#: The methods that register a hook.
REGISTER = {_T.register_hook, _T.register_post_accumulate_grad_hook}
#: The parameters whose hooks are running, by id.
showing: dict[int, Entry] = {}

IN_BACKWARD = (
    "inside a backward pass the gradients are this rank's own: they are not reduced yet, so every"
    " rank would step to something else. Use the ordinary order (backward(), then"
    " optimizer.step()), or, to free gradients while the backward pass runs, Recipe.zero(...,"
    " step_in_backward=True) with the optimizer's states offloaded."
)


def move(old: torch.Tensor, entry: Entry) -> None:
    """Move the hooks of `old`, the parameter that `shard()` was given, to the entry's parameters.

    The dicts stay the same objects, so that the handles that the user holds still remove hooks.
    """
    hooks, post = old._backward_hooks, old._post_accumulate_grad_hooks
    if hooks is not None:
        old._backward_hooks = None
        entry.compute._backward_hooks = hooks
    if post is not None:
        for key in [key for key, hook in post.items() if not _is_called(entry, hook)]:
            del post[key]
    if post is not None and entry.param is not old:
        entry.param._post_accumulate_grad_hooks = post


def give_back(entry: Entry) -> None:
    """Move the hooks back when the parameter becomes an ordinary one again."""
    hooks, entry.compute._backward_hooks = entry.compute._backward_hooks, None
    entry.param._backward_hooks = hooks


def register(entry: Entry, func: Any, args: Any, kwargs: Any) -> Any:
    """Register a hook for a call of `func`, one of REGISTER, on a sharded parameter. Returns the
    handle.
    """
    param = entry.param
    if func != _T.register_hook and not _is_called(entry, (*args[1:], *kwargs.values())[0]):
        return RemovableHandle(OrderedDict())
    with disable_torch_function():
        if func == _T.register_hook and param.requires_grad:
            # The engine follows at the next pass
            _SET_REQUIRES_GRAD(entry.compute, True)
            return func(entry.compute, *args[1:], **kwargs)
        handle = func(*args, **kwargs)  # frozen: torch says so
        entry.post_hooks = param._post_accumulate_grad_hooks
        return handle


def answered(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func`, called while hooks run, on the whole parameters. Returns NotImplemented if no
    argument is a parameter whose hooks are running.
    """
    entry = showing.get(id(args[0])) if args else None
    with disable_torch_function():
        if entry is not None and func == _GRAD:
            return get_grad(entry.compute)
        if entry is not None and func == _SET_GRAD:
            set_grad(entry.compute, args[1])
            return None
        if entry is not None and func == _DELETE_GRAD:
            set_grad(entry.compute, None)
            return None
        if func in REGISTER or func == _REQUIRES_GRAD or func == _T.__hash__:
            return NotImplemented
        args, kwargs, found = _whole(func, args, kwargs)
        if not found:
            return NotImplemented
        # detach() rather than `.data`: it shares the version counter, so `run` notices writes
        return args[0].detach() if func == _DATA else func(*args, **kwargs)


def _whole(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    found, asks = False, operator_of(func).asks

    def swap(t: torch.Tensor) -> torch.Tensor:
        nonlocal found
        entry = showing.get(id(t))
        if entry is None:
            return t
        found = True
        engine = None if asks else entry.engine()
        return entry.compute if engine is None else engine.use(entry)

    return *mapped((args, kwargs), swap), found


def run(entry: Entry, hooks: Any, accumulated: torch.Tensor | None) -> bool:
    """Call the user's post-accumulate hooks of `entry`. The gradient of this backward pass is in
    `entry.compute.grad`.

    Args:
        accumulated: the whole, unreduced sum of earlier micro-batches, or None. Hooks see the sum
            with it, as in PyTorch.

    Returns:
        True if `entry.compute.grad` now includes `accumulated`, because a hook changed the
        gradient. Else it is the gradient of this backward pass alone.

    Raises:
        ShardedParameterError: a hook wrote to the parameter.
        ValueError: a hook adds up over ranks what was added up already.
    """
    compute, own = entry.compute, get_grad(entry.compute)
    assert own is not None
    if accumulated is not None:
        with torch.no_grad():
            set_grad(compute, accumulated.to(own.dtype).add_(own))
    shown: Any = get_grad(compute)
    version, values = shown._version, compute._version
    showing[id(entry.param)] = entry
    collectives = _Collectives(local_of(shown))
    try:
        with collectives:
            for hook in tuple(hooks.values()):
                hook(entry.param)
    finally:
        del showing[id(entry.param)]
    if compute._version != values:
        raise ShardedParameterError(
            f"a gradient hook wrote to parameter {entry.slot.name!r}, but {IN_BACKWARD}"
        )
    changed = collectives.wrote or get_grad(compute) is not shown or shown._version != version
    _refuse_sums(entry, accumulated is not None, collectives.any and changed)
    if accumulated is not None and not changed:
        set_grad(compute, own)
    return accumulated is not None and changed


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


class _Collectives(TorchDispatchMode):
    """Notices collectives. torch's version counters do not tell that one has written to a tensor.

    Attributes:
        any: there was one. wrote: one was given the memory of `gradient`.
    """

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self._gradient, self.any, self.wrote = gradient, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.any, mine = True, storage_of(self._gradient)
            if func.namespace == "c10d" and any(storage_of(t) == mine for t in _tensors(args)):
                self.wrote = True
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _refuse_sums(entry: Entry, accumulates: bool, sums: bool) -> None:
    """Raise ValueError if a hook adds up over ranks what was added up already. `sums`: it has sent
    the gradient to other ranks, and changed it.
    """
    again = accumulates and entry.hook_sums
    entry.hook_sums = again or sums
    name = entry.slot.name
    if sums and entry.box is not None:
        raise ValueError(
            f"a gradient hook of {name!r} ({entry.box.kind.describe()}) sends the gradient to other"
            " ranks. The gradient of a DTensor says by its placements what has to be added up, and"
            " shard() does it in its own messages: leave the hook out."
        )
    if sums and again and entry.flat.ranks.copies > 1:
        raise ValueError(
            f"a gradient hook of {name!r} has sent the gradient to other ranks in several"
            " micro-batches of one step. `.grad` has accumulated there, so what was added up in one"
            " micro-batch would be added up again in the next. Leave the hook out, and give shard()"
            f" partial=[{name!r}]: the parts are then added up once."
        )
