"""`torch.autograd.grad` and its like: backward passes that accumulate nothing into the parameters
of a model.

    loss.backward()                     gradients go to the parameters: reduced, as ever
    loss.backward(inputs=parameters)    the same for these parameters alone
    torch.autograd.grad(loss, inputs)   gradients are returned: this rank's own, whole, in the compute dtype; nothing is reduced

Such a pass gathers what it needs (stage 3) unit by unit as it comes to it, so all ranks must make
it alike. What it saves with `create_graph=True` may lie in gathered buffers. They are left to their
readers: see [Note: nobody reads a reused buffer] in memory/pool.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry


TRANSFORMS = (
    "Use torch.autograd.grad(loss, parameters), or give the transform whole tensors inside `with"
    " onefold.full_params(model):` (every rank), for instance {name: p.detach().clone() for name, p"
    " in model.named_parameters()}."
)


def refuse_transforms() -> None:
    """Raise RuntimeError inside torch.func.grad and its like, which do not allow the handles that
    stand for gathered parameters.
    """
    enabled: Any = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
    if not enabled():
        raise RuntimeError(
            "a model with sharded parameters was called inside torch.func.grad, vjp, jacrev or the"
            f" like, which do not support the hooks on saved tensors that it needs. {TRANSFORMS}"
        )


#: What takes parameters as `inputs`.
CALLS = {torch.autograd.grad, torch.autograd.backward}


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """One of CALLS with sharded parameters among its arguments: autograd knows them as the whole
    parameters.
    """
    return func(*(_leaves(a) for a in args), **{k: _leaves(v) for k, v in kwargs.items()})


def _leaves(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(v) for v in value)
    known = (
        getattr(value, "_onefold_entry", None) if isinstance(value, torch.nn.Parameter) else None
    )
    entry = known() if known is not None else None
    return value if entry is None else entry.compute


def accumulates(entries: Iterable[Entry]) -> bool:
    """Inside a backward pass: whether it will bring any of `entries` a gradient, as far as its own
    graph tells.

    (A re-entrant checkpoint runs a backward pass of its own inside: its gradients are not
    foreseen.)
    """
    refuse_transforms()
    return any(
        _will_run(torch.autograd.graph.get_gradient_edge(entry.compute).node)
        for entry in entries
        if entry.active
    )


def _will_run(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the gradient of this leaf is returned, not accumulated
        return False
