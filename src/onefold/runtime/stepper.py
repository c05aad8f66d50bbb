"""Who steps a shard, and when.

| shard                                   | stepped by                                   | when                         |
|-----------------------------------------|----------------------------------------------|------------------------------|
| on the device                           | the user's optimizer itself                  | at `optimizer.step()`        |
| of whole matrices, also on the host     | the user's optimizer, by owners (optim/whole.py) | before the rest of that step |
| with moments in a format of the recipe  | the user's optimizer, piece by piece (quant/moments.py) | before the rest of that step |
| on the host                             | the user's optimizer, unit by unit (offload/step.py) | before the rest of that step |
| on NVMe                                 | the user's optimizer, chunk by chunk (the same) | before the rest of that step |
| on the host or NVMe, `step_in_backward` | as above, in a thread (the same) | when its gradient has landed |

The user's step leaves out what was stepped "before the rest": such parameters are in no group, and
have no `.grad`, while it runs (optim/steps.py).

[Note: which stepper] Before each step (optim/steps.py) the steppers of the engine are asked in their
order, for each flat buffer and each parameter group with some of its parameters:

    is this shard yours?   no ─► the next one is asked; if there is none, the optimizer's own step follows
                           yes, and it can take this group's update ─► it steps these parameters
                           yes, but it cannot                       ─► ValueError: why, and what to do

A stepper judges by the group's `GroupVerdict`. The groups of one optimizer may have different
verdicts, and so different steppers.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.recipe.optimizers import Update
from onefold.runtime.parameters.parameter import bare, face

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat


@dataclass(frozen=True)
class GroupVerdict:
    """What the update of one parameter group looks at (optim/verdict.py).

    `reason`: why the update is not element-wise, as sentences; "" if it is.
    """

    update: Update
    reason: str = ""


class Stepper:
    """One way to step shards before the optimizer's own step; this one takes none."""

    #: Whether `step` is called in every step, also without entries, because the ranks exchange
    #: something in it.
    collective = False
    #: Whether it steps whole parameters; else each element by itself.
    whole = False

    # -- at optimizer.step() -----------------------------------------------------------------------

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        """Whether it steps those parameters of `flat` that one group of the optimizer has. False:
        the next stepper is asked.

        Args:
            verdict: returns the group's. Asked for only if the answer depends on it, since it may
                take a trial.

        Raises:
            ValueError: the shard is this stepper's, and it cannot take the optimizer.
        """
        return False

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """Step `entries`, which it has accepted, before the optimizer's own step. Collective if
        `collective`.

        Raises:
            TierError: on every rank, if a disk failed on one.
        """


@dataclass(frozen=True)
class Choice:
    """Who steps the parameters of an optimizer, in one engine.

    Attributes:
        asked: the parameters (ids) and switches of all groups, and the entries, that it is for.
        apart: what is stepped before the optimizer's own step, by stepper, in the order of the steps.
            The optimizer's own step steps the rest.
        members: what tells which of the entries each group has, the same on all ranks.
    """

    asked: tuple[list[Any], list[Entry]]
    apart: dict[Stepper, list[Entry]]
    members: dict[int, str]


def is_cut(flat: Flat) -> bool:
    """Whether an optimizer sees parts of the parameters, or steps a few of them at a time."""
    return flat.divided or flat.storage.offloaded


def refuse_unless(optimizer: Optimizer, verdict: GroupVerdict, *allowed: Update) -> None:
    """Raise ValueError, for parameters that are cut, unless the update looks at what is `allowed`."""
    if verdict.update not in allowed:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step sharded parameters: {verdict.reason} Stages 1 to"
            " 3 and offloading serve updates that treat every element alike (SGD, Adam, AdamW, Lion,"
            " ...) or each matrix by itself (Muon, Adafactor, LAMB, ...). Use stage 0 on the device,"
            " or one of those; if you know the update to be element-wise, give the recipe whole=False;"
            " if it steps each matrix by itself, whole=True."
        )


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
# | any other                                          | a loop in Python      | the same: it stays in the cache; DDP's bits            |
#
# For Adam and AdamW, fused differs from the loop in the last bit, on any device. So a model on the
# host keeps the bits that it has under DDP. A model on an accelerator takes what is fastest: its
# gradients are summed in another order than by NCCL's all-reduce anyway. To choose, give the
# optimizer `foreach=False` (the loop), `foreach=True` or `fused=True`.
#
# This holds only for torch's own classes whose groups have both options, and only during a step:
# outside of it `param_groups` are as the user made them.


#: Element-wise, with both options.
_KNOWN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
#: Where torch has fused kernels worth taking.
FUSED_ON = frozenset(("cuda", "xpu"))


def choose_implementation(optimizer: Optimizer, device: torch.device) -> None:
    """Set options of the optimizer's groups until `undo`. `device`: that of the model which the
    parameters belong to.
    """
    for group in optimizer.param_groups:
        if _fuses(optimizer, group, device):
            note(group.__setitem__, "fused", None)
            group["fused"] = True
            _bring_steps(optimizer, group["params"])


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is of one of torch's classes whose implementations are known here.
    Derived classes are not, since they may do anything.
    """
    return type(optimizer) in _KNOWN


def supports_scaling(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a fused kernel would step each group. Such a kernel takes a loss scale, and skips an
    overflow without asking the host.
    """
    return all(_fuses(optimizer, group, device) for group in optimizer.param_groups)


def _fuses(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> bool:
    """Whether a fused kernel is to step `group`; else torch's own choice stands."""
    given = any(group.get(name) is not None for name in ("fused", "foreach"))
    if given or not is_known(optimizer) or group.get("differentiable") or group.get("capturable"):
        return False
    if any(isinstance(rate, torch.Tensor) for rate in (group["lr"], *group.get("betas", ()))):
        return False
    params: Sequence[torch.Tensor] = group["params"]
    here = {device.type, "cpu"}
    return (
        device.type in FUSED_ON
        and bool(params)
        and all(p.is_floating_point() and p.device.type in here for p in params)
    )


def _bring_steps(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Move the counts of steps to where the parameters are, since fused kernels read them there.
    Other implementations and loaded states keep them on the host.
    """
    for param in params:
        step = optimizer.state[param].get("step") if param in optimizer.state else None
        if isinstance(step, torch.Tensor) and step.device != param.device:
            optimizer.state[param]["step"] = step.to(param.device, torch.float32)


# -- stepping a part of the parameters, or parts of parameters ----------------------------------------
#
# A torch optimizer steps the tensors in its `param_groups` and keeps its states in `state`. For the
# time of one step the groups are replaced by copies that hold only what is to be stepped.
#
# [Note: the user's own objects] Where a step sees a piece of a parameter, or all of one that is divided,
# the parameter object is the user's own, with other data, gradient and state for that time. So its
# attributes hold there, and whatever code keeps by it: tables, sets, `id(p)`, closures. An update of
# several pieces may read that, and write to `state[p]` alone.


def groups_of(optimizer: Optimizer) -> dict[int, int]:
    """Return the index of each parameter's group, by the parameter's id."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def switches_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a group's options that may decide on the kind of its update, and are not rates
    or counts.
    """
    return {k: v for k, v in group.items() if v is None or isinstance(v, (bool, str))}


def groups_now(optimizer: Optimizer) -> list[Any]:
    """Return what tells whether the groups are still the same: their parameters and switches."""
    return [(list(map(id, g["params"])), switches_of(g)) for g in optimizer.param_groups]


def held_inside(optimizer: Optimizer) -> dict[int, Optimizer]:
    """Return the parameters that optimizers inside of this one step: {id: the optimizer inside}. An
    optimizer may keep others as attributes, alone or in a list, tuple or dict, and call their
    `step` in its own, such as Muon and AdamW.
    """
    out: dict[int, Optimizer] = {}
    for value in own_attributes(optimizer).values():
        some = value.values() if isinstance(value, dict) else value
        for each in some if isinstance(value, (dict, list, tuple)) else (value,):
            # By its type: a weak proxy of the optimizer itself says that it is an Optimizer
            if issubclass(type(each), Optimizer) and each is not optimizer:
                out |= {id(p): each for group in each.param_groups for p in group["params"]}
    return out


def raw_step(optimizer: Optimizer) -> None:
    """Run the optimizer's own update, without the hooks around it."""
    function: Any = type(optimizer).step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    noted = len(raw.notes)
    try:
        note(setattr, raw, "optimizer", raw.optimizer)
        raw.optimizer = optimizer
        function(optimizer)
    finally:
        undo(noted)


class TouchesReal(ValueError):
    """A part of a step, or a trial, would change parameters that are not its own."""


class _Raw(threading.local):
    """What steps have under way in this thread.

    Attributes:
        optimizer: the one that is tried, or whose own update runs: a `super().step()` in it is no step
            of its own, and one of another optimizer over the model's parameters is refused.
        tried: those that a trial steps, with the ones they hold (optim/verdict.py).
        notes: what undoes what they have changed for a time. See [Note: interrupts].
    """

    optimizer: Optimizer | None = None
    tried: tuple[Optimizer, ...] = ()

    def __init__(self) -> None:
        self.notes: list[Callable[[], Any]] = []


raw = _Raw()


# [Note: interrupts] Ctrl-C may come at any line, also in a `finally`. So what undoes a change is noted
# before the change. It may run twice, and leaves the notes last. What an interrupted `finally` leaves
# is undone at the end of the step around it (optim/steps.py), before the user's code goes on.


def note(function: Callable[..., Any], *args: Any) -> None:
    """Have `undo` call the function."""
    raw.notes.append(partial(function, *args))


def undo(noted: int) -> None:
    """Undo what was noted since there were `noted` notes, the last first."""
    while len(raw.notes) > noted:
        raw.notes[-1]()
        raw.notes.pop()


#: Attributes that torch gives every optimizer, and replaces or hooks by itself.
_TORCHS = ("state", "param_groups", "defaults")


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that the optimizer's class has put into it, and torch has not."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in _TORCHS and not name.startswith("_optimizer_")
    }


def own_numbers(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return copies of what an optimizer counts with among `values` (its attributes, or a group):
    numbers, tensors of one element, and lists and dicts of such.
    """
    memo: dict[int, Any] = {}  # the keys may be parameters, which are not copied
    return {key: copy.deepcopy(value, memo) for key, value in values.items() if _counts(value)}


def _counts(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_leaf and not isinstance(value, nn.Parameter)
    if isinstance(value, (list, tuple)):
        return all(map(_counts, value))
    if isinstance(value, dict):
        return all(_counts(v) and not isinstance(k, torch.Tensor) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def kept_by(optimizer: Optimizer, param: Any) -> Iterator[tuple[str, dict[Any, Any], list[Any]]]:
    """Yield where code keeps something by this parameter: (a name, a dict, the parameter's keys in it).
    These are its attributes, named "", and the optimizer's tables by parameters or their ids.
    """
    own = param.__dict__
    yield "", own, [key for key in own if not key.startswith(("onefold", "_onefold"))]
    for name, table in own_attributes(optimizer).items():
        if isinstance(table, dict) and table:
            # A parameter has its id as its hash, and cannot be compared with it
            key = param if isinstance(next(iter(table)), torch.Tensor) else id(param)
            if key in table:
                yield name, table, [key]


def _kept(optimizer: Optimizer, param: Any) -> dict[Any, Any]:
    """Return what tells whether what code keeps by this parameter is still the same."""
    every = {(n, key): table[key] for n, table, keys in kept_by(optimizer, param) for key in keys}
    tensors = {k: (id(v), v._version) for k, v in every.items() if isinstance(v, torch.Tensor)}
    return own_numbers(every) | tensors


def _count_apart(optimizer: Optimizer, groups: Mapping[int, int]) -> None:
    """Until `undo` the optimizer counts with copies: in its attributes, and in states that are no
    parameter's. Then it has the numbers again that it had before.
    """
    state: Any = optimizer.state  # without what shows states to the user's code

    def tables() -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        own = {key: v for key, v in dict.items(state) if not isinstance(key, torch.Tensor)}
        return [(optimizer.__dict__, own_attributes(optimizer)), (state, own)]

    def numbers(values: Mapping[Any, Any]) -> dict[Any, Any]:
        return own_numbers({key: v for key, v in values.items() if not _by_id(v, groups)})

    before = tables()

    def count_as_before() -> None:
        for (table, had), (_, has) in zip(before, tables(), strict=True):
            for key in numbers(has):  # what is more than numbers by now stays
                if key in had:
                    dict.__setitem__(table, key, had[key])
                else:
                    dict.__delitem__(table, key)

    note(count_as_before)
    for table, had in before:
        for key, value in numbers(had).items():
            dict.__setitem__(table, key, value)


def _by_id(value: Any, groups: Mapping[int, int]) -> bool:
    """Whether it is a table by the ids of parameters."""
    first = next(iter(value), None) if isinstance(value, dict) else None
    return isinstance(first, int) and first in groups


@contextlib.contextmanager
def only(
    optimizer: Optimizer,
    groups: dict[int, int],
    params: Iterable[torch.Tensor],
    device: torch.device | None,
) -> Iterator[None]:
    """Inside this context, the optimizer knows only `params`, each in its group.

    Groups are copies, and so is what the optimizer counts with: a step in pieces counts as one step,
    which the outer step() makes.

    Args:
        device: that of the model. It decides on the implementation of the step
            (runtime/stepper.py); None leaves that to torch.
    """
    wanted: dict[int, list[torch.Tensor]] = {}
    for param in params:
        wanted.setdefault(groups[id(param)], []).append(param)
    before, noted = optimizer.param_groups, len(raw.notes)
    try:
        note(setattr, optimizer, "param_groups", before)
        optimizer.param_groups = [
            {**before[i], **own_numbers(before[i]), "params": some}
            for i, some in sorted(wanted.items())
        ]
        if device is not None:
            choose_implementation(optimizer, device)
        _count_apart(optimizer, groups)
        yield
    finally:
        undo(noted)


@dataclass
class Part:
    """What a parameter is for the time of a step. See [Note: the user's own objects].

    Attributes:
        data, state: those after the step, once it is made. state: None if there is none.
        grad: of the shape of `data`. Dropped by the step.
        piece: there are other parts of its parameter.
    """

    param: Any
    data: torch.Tensor
    grad: torch.Tensor | None
    state: dict[Any, Any] | None
    piece: bool = False


def give(
    state: dict[Any, Any], param: Any, data: torch.Tensor, grad: Any, known: dict[Any, Any] | None
) -> None:
    """Let the parameter have this data, gradient and state."""
    param.grad, param.data = None, data
    param.grad = grad
    if known is not None:
        state[param] = known
    elif state.get(param) is not None:
        del state[param]


def step_parts(
    optimizer: Optimizer,
    groups: dict[int, int],
    parts: Sequence[Part],
    device: torch.device | None,
) -> None:
    """Step `parts`, of different parameters, with the optimizer's own update. `device`: see `only`.

    Raises:
        ValueError: the update has written to what it keeps by the parameter of a piece.
    """
    # Torch has fast implementations for plain classes. On the host a thread may make the step, and
    # other code goes on seeing the shape of the whole
    plain = [part.param for part in parts if part.data.device.type != "cpu"]
    kept = {part.param: _kept(optimizer, part.param) for part in parts if part.piece}
    state, noted = optimizer.state, len(raw.notes)
    try:
        note(face, plain)
        bare(plain)
        for part in parts:
            param = part.param
            note(give, state, param, param.data, param.grad, state.get(param))
            give(state, param, part.data, part.grad, part.state)
        with only(optimizer, groups, [part.param for part in parts], device):
            try:
                raw_step(optimizer)
            finally:
                for part in parts:
                    part.data, part.state = part.param.data, state.get(part.param)
                    part.grad = None
            if any(_kept(optimizer, param) != before for param, before in kept.items()):
                raise ValueError(
                    f"{type(optimizer).__name__} writes to what it keeps for each parameter beside"
                    " self.state, and steps a parameter in pieces: keep it in self.state[p], of which"
                    " each piece has its own."
                )
    finally:
        undo(noted)
