"""What a thread is in (forward passes of sharded models, autograd, a step of an optimizer), the tensors
in arguments and results, and what torch.compile must leave alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onefold.runtime.flat import Unit

# -- tensors in arguments and results ----------------------------------------------------------------


def tensors_in(value: Any, depth: int = 4) -> list[Any]:
    """Return the tensors in nested tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or depth == 0 or isinstance(value, (str, bytes, int, float)):
        return []
    if isinstance(value, (list, tuple, set)):
        parts: Any = value
    elif isinstance(value, Mapping):
        parts = value.values()
    else:
        parts = getattr(value, "__dict__", {}).values()
    return [t for part in parts for t in tensors_in(part, depth - 1)]


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation of torch writes to, by its schema."""
    declared = func._schema.arguments if func._schema.is_mutable else ()
    given = {a.name: value for a, value in zip(declared, args, strict=False)} | kwargs
    return tensors_in([given.get(a.name) for a in declared if is_written(a)])


def is_written(argument: Any) -> bool:
    """Return whether an operation writes to an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def mapped(value: Any, change: Callable[[torch.Tensor], Any], objects: int = 0) -> Any:
    """Return `value` with each tensor in its lists, tuples and dicts replaced by `change(tensor)`.
    `objects`: so many levels of dataclasses, plain objects and dicts of other classes are copied too.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if not tensors_in(value):
        return value
    if isinstance(value, (list, tuple, set)):
        parts = [mapped(v, change, objects) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict or objects:
        out = copy.copy(value)
        for k, v in value.items() if isinstance(value, dict) else vars(value).items():
            # An output of transformers: its items are attributes too
            put = out.__setitem__ if isinstance(value, dict) else partial(object.__setattr__, out)
            put(k, mapped(v, change, objects and objects - 1))
        return out
    return value


# -- inside autograd -------------------------------------------------------------------------------
#
# `torch.autograd.grad` and its like: backward passes that accumulate nothing into the parameters
# of a model.
#
#     loss.backward()                     gradients go to the parameters, reduced
#     loss.backward(inputs=parameters)    the same for these parameters alone
#     torch.autograd.grad(loss, inputs)   gradients are returned: this rank's own, whole, in the compute dtype; nothing is reduced
#
# The gradient of a DTensor parameter is not returned: a sentence refuses it.
#
# At stage 3 the last kind of pass gathers units when it comes to them, so all ranks must make it in
# the same way. What it saves with `create_graph=True` may lie in gathered buffers. The pool does not
# reuse these while somebody can read them: see [Note: nobody reads a reused buffer] in
# memory.py.


TRANSFORMS = (
    "Use torch.autograd.grad(loss, parameters), or give the transform whole tensors inside `with"
    " onefold.full_params(model):` (every rank), for instance {name: p.detach().clone() for name, p"
    " in model.named_parameters()}."
)


def refuse_transforms() -> None:
    """Raise RuntimeError inside torch.func.grad and its like: they do not allow hooks on saved
    tensors, which gathered parameters need.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        raise RuntimeError(
            "a model with sharded parameters was called inside torch.func.grad, vjp, jacrev or the"
            f" like, which do not support the hooks on saved tensors that it needs. {TRANSFORMS}"
        )


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the backward pass under way accumulates a gradient into `leaf`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the gradient of this leaf is returned, not accumulated
        return False


def in_autograd() -> bool:
    """Whether a backward pass is running in this thread. A forward pass inside it is a
    recomputation.
    """
    return torch._C._current_graph_task_id() != -1


# -- open passes -----------------------------------------------------------------------------------
#
# [Note: a pass ends with its call] torch calls a hook after a forward pass that returned, or that raised
# an `Exception`. It calls none after Ctrl-C (KeyboardInterrupt) or SystemExit. So an open pass has the
# frame of its module's call, which cannot be cleared while it runs. Whoever asks which passes are open
# ends those first whose call was left.


class _Thread(threading.local):
    """What one thread does, over all models.

    Attributes:
        passes: its open forward passes, the innermost last.
        stepping: optimizer steps under way. Inside one, a plain tensor may hold this rank's elements
            only (an optimizer state) and be combined with an interval.
        casts_states: it is in `optimizer.load_state_dict`, which casts states to `param.dtype`. It
            must see the master dtype, which is what the optimizer steps.
    """

    stepping = 0
    casts_states = False

    def __init__(self) -> None:
        self.passes: list[OpenPass] = []


here = _Thread()


@dataclass(eq=False, slots=True)
class OpenPass:
    """An open forward pass of a unit's module.

    Attributes:
        recompute: it is inside a backward pass.
        call: the frame of the module's call. abort: ends the pass if that call was left.
        outermost: it has begun a pass over the model.
        in_use: the unit is in use by it.
        beside: the open passes of its thread.
    """

    unit: Unit
    recompute: bool
    call: FrameType
    abort: Callable[[OpenPass], None]
    outermost: bool = False
    in_use: bool = False
    beside: list[OpenPass] = field(default_factory=lambda: here.passes)


def still_open(passes: list[OpenPass]) -> list[OpenPass]:
    """Return `passes`, an engine's or a thread's, after ending those that were left open. See
    [Note: a pass ends with its call].
    """
    while passes:
        try:
            passes[-1].call.clear()
        except RuntimeError:  # it runs, in this thread or another
            break
        passes[-1].abort(passes[-1])
    return passes


def in_forward() -> bool:
    """Whether a forward pass of any sharded model is open in this thread."""
    return bool(still_open(here.passes))


# -- compilation -----------------------------------------------------------------------------------


def keep_from_compiler(function: Any) -> None:
    """Make compiled code break its graph at `function`, whose own frames run uncompiled.

    torch.compiler.disable does the same, but importing the compiler costs a second for everybody
    who does not compile.
    """
    function._torchdynamo_disable = True
    _run_uncompiled(function.__code__)


def keep_hooks_from_compiler(function: Any) -> None:
    """Run the functions that `function` defines uncompiled, where compiled code calls them through
    autograd: as hooks on saved tensors or on gradients.

    Each pass makes new ones. Compiled, each would be compiled again, up to the recompile limit.
    """
    for code in function.__code__.co_consts:
        if isinstance(code, CodeType):
            _run_uncompiled(code)


def _run_uncompiled(code: CodeType) -> None:
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
