"""An optimizer's own step over other tensors than its parameters.

A torch optimizer steps the tensors in its `param_groups` and keeps its states in `state`. For the
time of one step, the groups are replaced by copies that hold only what is to be stepped: some of
the parameters, or stand-ins. A stand-in is a part of a parameter, with that part of its gradient
and states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.runtime.implementations import Chosen


def groups_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the index of each parameter's group, by the parameter's id."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def raw_step(optimizer: Optimizer) -> None:
    """Run the optimizer's own update, without the hooks around it."""
    function: Any = type(optimizer).step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    function(optimizer)


@contextlib.contextmanager
def only(
    optimizer: Optimizer,
    groups: dict[int, int],
    real: Sequence[torch.Tensor],
    stand_ins: Sequence[torch.Tensor],
    device: torch.device | None = None,
) -> Iterator[None]:
    """Inside this context, the optimizer knows only `stand_ins`, each in the group of its `real`
    parameter.

    Groups are copies, and the optimizer's own counters are put back at the end: a step in pieces
    counts as one step, which the outer step() makes.

    Args:
        device: that of the model. It decides on the implementation of the step
            (runtime/implementations.py); None leaves that to torch.
    """
    wanted: dict[int, list[torch.Tensor]] = {}
    for param, stand_in in zip(real, stand_ins, strict=True):
        wanted.setdefault(groups[id(param)], []).append(stand_in)
    before, counters = (
        optimizer.param_groups,
        {k: v for k, v in optimizer.__dict__.items() if isinstance(v, (int, float))},
    )
    optimizer.param_groups = [
        {**before[i], "params": params} for i, params in sorted(wanted.items())
    ]
    if device is not None:
        Chosen(optimizer, optimizer.param_groups, device)  # they are copies: nothing to undo
    try:
        yield
    finally:
        optimizer.param_groups = before
        optimizer.__dict__.update(counters)
