"""Autograd and the compiler: what runs inside a backward pass, and what torch.compile must leave
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch

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
    if type(value) is dict:
        return {k: mapped(v, change, objects) for k, v in value.items()}
    if objects:
        out = copy.copy(value)
        for k, v in value.items() if isinstance(value, dict) else vars(value).items():
            # An output of transformers: its items are attributes too
            put = out.__setitem__ if isinstance(value, dict) else partial(object.__setattr__, out)
            put(k, mapped(v, change, objects - 1))
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


# -- recomputation ---------------------------------------------------------------------------------
#
# How to tell that torch.utils.checkpoint is going to recompute a pass: by its hooks on saved
# tensors.


def is_checkpoint(pack: Any) -> bool:
    """Whether a hook on saved tensors is that of torch.utils.checkpoint, which saves no tensor and
    computes it again.

    [Note: a checkpoint around a pass] torch compares how many tensors a pass saves with how many
    its recomputation saves. So its hook has to see gathered parameters in the forward pass as it
    sees them in the recomputation. The engine's own hooks must not take them before.
    """
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


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
