"""Who steps a shard, and when.

| shard                                   | stepped by                                   | when                         |
|-----------------------------------------|----------------------------------------------|------------------------------|
| on the device                           | the user's optimizer itself                  | at `optimizer.step()`        |
| with moments in 8 or 4 bits             | its rule, piece by piece (quant/moments.py)  | before the rest of that step |
| on the host                             | the user's optimizer, unit by unit           | before the rest of that step |
| on NVMe                                 | the user's optimizer, chunk by chunk         | before the rest of that step |
| on the host or NVMe, `step_in_backward` | as above, in a thread (offload/in_backward.py) | when its gradient has landed |

The user's step leaves out what was stepped "before the rest": such parameters have no `.grad` while
it runs (optim/step_hooks.py).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.unit import Unit


class Stepper(ABC):
    """Steps those shards of one engine that the user's optimizer does not step by itself."""

    # -- at optimizer.step() -----------------------------------------------------------------------

    @abstractmethod
    def keeps_own_format(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer itself keeps its moments in fewer bits (as torchao's do)."""

    @abstractmethod
    def apart(self, optimizer: Optimizer, entries: Sequence[Entry]) -> list[Entry]:
        """Return those of `entries` that `step` is to be called for. `optimizer` steps them all.

        Raises:
            ValueError: the recipe and the optimizer disagree on the format of moments.
        """

    @abstractmethod
    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, which `apart` has returned. Collective if any is stored on NVMe.

        Raises:
            TierError: on every rank, if a disk failed on one.
        """

    # -- in the backward pass ----------------------------------------------------------------------

    def takes(self, flat: Flat, which: list[bool]) -> bool:
        """Whether `flat` is stepped as soon as the gradients of the entries `which` are there."""
        return False

    def landed(self, flat: Flat) -> None:
        """Called for a flat buffer that `takes` accepts, once its gradients are `.grad` of its
        parameters.
        """

    def has_stepped(self, unit: Unit) -> bool:
        """Whether part of the unit was stepped in the backward pass under way."""
        return False

    def join(self) -> None:
        """Wait for the steps in the backward pass that are under way."""

    def close(self) -> None:
        """End the work in the background."""


# -- which of torch's implementations steps --------------------------------------------------------
#
# How a torch optimizer is made to step: with which of its implementations, and over other tensors
# than its parameters.
#
# [Note: implementations] Which of torch's implementations steps sharded parameters if
# the user has named none (`foreach` and `fused` are None):
#
# | parameters are                                     | torch takes by itself | here                                                   |
# |----------------------------------------------------|-----------------------|--------------------------------------------------------|
# | on an accelerator                                  | foreach               | fused: one pass over masters, gradients and states     |
# | on the host, of a model on an accelerator          | a loop in Python      | fused                                                  |
# | on the host, of a model on the host: few and small | a loop in Python      | foreach: the same bits, fewer calls                    |
# | any other                                          | a loop in Python      | the same: it stays in the cache; DDP's bits            |
#
# On the host, foreach gives the same bits as the loop. For Adam and AdamW, fused differs from both in
# the last bit, on any device. So a model on the host keeps the bits that it has under DDP. A model on
# an accelerator takes what is fastest: its gradients are summed in another order than by NCCL's
# all-reduce anyway. To choose, give the optimizer `foreach=False` (the loop), `foreach=True` or
# `fused=True`.
#
# This holds only for torch's own classes whose groups have both options, and only during a step:
# outside of it `param_groups` are as the user made them.


#: Element-wise, with both options, and (SGD, Adam, AdamW on the host) with the loop's bits in
#: foreach.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
#: Where torch has fused kernels worth taking.
FUSED_ON = frozenset(("cuda", "xpu"))
#: Bytes of a group (FEW) and of a parameter (SMALL) up to which foreach on the host saves more in
#: calls than it loses in passes over memory.
FEW, SMALL = 32 << 20, 64 << 10


class Chosen:
    """Sets options of parameter groups until `end`."""

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> None:
        """`groups`: the optimizer's, or copies of them. `device`: that of the model which the
        parameters belong to.
        """
        self._set: list[tuple[dict[str, Any], str]] = []
        if type(optimizer) not in _KNOWN:
            return
        for group in groups:
            if (name := _best(group, device)) is not None:
                group[name] = True
                self._set.append((group, name))
                if name == "fused":
                    _bring_steps(optimizer, group["params"])

    def end(self) -> None:
        """Make the groups again as the user made them."""
        options, self._set = self._set, []
        for group, name in options:
            group[name] = None


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is of one of torch's classes whose implementations are known here.
    Derived classes are not, since they may do anything.
    """
    return type(optimizer) in _KNOWN


def supports_scaling(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a fused kernel would step each group. Such a kernel takes a loss scale, and skips an
    overflow without asking the host.
    """
    return type(optimizer) in _KNOWN and all(
        _best(group, device) == "fused" for group in optimizer.param_groups
    )


def _best(group: dict[str, Any], device: torch.device) -> str | None:
    """Return the option to set for a step of `group`, or None if torch's own choice stands."""
    if (
        group.get("fused") is not None
        or group.get("foreach") is not None
        or group.get("differentiable")
        or group.get("capturable")
    ):
        return None
    if isinstance(group["lr"], torch.Tensor) or any(
        isinstance(beta, torch.Tensor) for beta in group.get("betas", ())
    ):
        return None
    params: Iterable[torch.Tensor] = group["params"]
    sizes = [p.numel() * p.element_size() for p in params if p.is_floating_point()]
    if not sizes or len(sizes) < len(group["params"]):
        return None
    places = {p.device.type for p in params}
    if device.type in FUSED_ON and places <= {device.type, "cpu"}:
        return "fused"
    if places == {"cpu"} and device.type == "cpu" and max(sizes) <= SMALL and sum(sizes) <= FEW:
        return "foreach"
    return None


def _bring_steps(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Move the counts of steps to where the parameters are, since fused kernels read them there.
    Other implementations and loaded states keep them on the host.
    """
    for param in params:
        step = optimizer.state[param].get("step") if param in optimizer.state else None
        if isinstance(step, torch.Tensor) and step.device != param.device:
            optimizer.state[param]["step"] = step.to(param.device, torch.float32)


# -- stepping other tensors in the parameters' place -----------------------------------------------
#
# An optimizer's own step over other tensors than its parameters.
#
# A torch optimizer steps the tensors in its `param_groups` and keeps its states in `state`. For the
# time of one step, the groups are replaced by copies that hold only what is to be stepped: some of
# the parameters, or stand-ins. A stand-in is a part of a parameter, with that part of its gradient
# and states.


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
            (runtime/stepper.py); None leaves that to torch.
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
