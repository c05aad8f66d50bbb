"""What the update of an optimizer looks at, for each parameter group.

| verdict        | when                                                                   | may step                     |
|----------------|------------------------------------------------------------------------|------------------------------|
| "element-wise" | a small matrix, and the same matrix cut into pieces, come out the same | intervals of parameters      |
| "whole"        | they do not, and the class is known to step each matrix by itself      | whole parameters             |
| "refused"      | any other                                                              | all parameters, in one place |

The results, and every number that the optimizer keeps, must be equal bit for bit. "whole" is not
tried: a table of classes says it (recipe/optimizers.py), or the recipe's `whole`. An update that is
neither would silently compute something else with intervals, so it is refused. So is one that
communicates: only one rank makes the trial. The recipe's `whole=False` takes all for element-wise.

[Note: trials] The optimizer itself steps a parameter of its own, which has the values of a small matrix
for that time. So whatever code keeps by the parameter or by the optimizer holds there. Afterwards all
of it is as it was. A group is tried with its own options, since they may decide what is done with its
parameters, and with a parameter of each sort: code may keep numbers for a parameter.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.memory import storage_of
from onefold.recipe import Recipe
from onefold.recipe.optimizers import ELEMENTWISE, REFUSED, STEP_MATRICES, WHOLE
from onefold.runtime.differentiate import written_by
from onefold.runtime.parameters.interval import entry_of, spec_of
from onefold.runtime.parameters.parameter import bare, disable_torch_function, face
from onefold.runtime.stepper import (
    GroupVerdict,
    TouchesReal,
    give,
    held_inside,
    kept_by,
    note,
    own_attributes,
    own_numbers,
    raw,
    raw_step,
    switches_of,
    undo,
)

_ELEMENTWISE = GroupVerdict(ELEMENTWISE)
#: {optimizer: (whether its groups have parameters, and their switches; the verdicts on them)}
_verdicts: weakref.WeakKeyDictionary[Optimizer, tuple[list[Any], list[GroupVerdict]]] = (
    weakref.WeakKeyDictionary()
)
_stacks: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

#: The shapes of the matrices of a trial. Some optimizers treat only large matrices as matrices.
_MATRICES = ((16, 24), (160, 144))
#: The shape of a stack of matrices.
_STACK = (4, 24, 16)
#: Steps of a trial. An optimizer may begin with steps of a millionth (Prodigy), so the trial also
#: compares the numbers that the optimizer keeps.
_STEPS = 4
#: The learning rate of a trial: far from 0, so that the update shows.
_RATE = 0.05
#: So many sorts of parameters are tried by their texts.
_SORTS = 8
#: Of a group: what does not change the kind of its update.
_OF_THE_USER = ("params", "param_names", "lr", "initial_lr")


# -- verdicts --------------------------------------------------------------------------------------


def _named(patterns: Sequence[str], optimizer: Optimizer, group: int) -> bool:
    found = map(entry_of, optimizer.param_groups[group]["params"])
    names = [name for entry in found if entry is not None for name in entry.names]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def verdict_of(recipe: Recipe, optimizer: Optimizer, group: int) -> GroupVerdict:
    """Return what the update of a parameter group looks at: the recipe's word, or what trials show. These
    are cached, until switches of a group change, or an empty one gets parameters.

    If a trial refuses one group, all are refused: its update may look at the parameters of the others.

    Raises:
        ValueError: a group that has states is stepped in another way since its switches have changed.
    """
    said = recipe.whole
    if said is False:
        return _ELEMENTWISE
    if said is True or (said and _named(said, optimizer, group)):
        return GroupVerdict(WHOLE, f"the recipe says whole={said!r}.")
    now = _looked_at(optimizer)
    then, known = _verdicts.get(optimizer, ([], []))
    if then != now:
        tried: dict[str, GroupVerdict] = {}
        found = [_of_group(optimizer, each, tried) for each in optimizer.param_groups]
        refused = next((v for v in found if v.update == REFUSED), None)
        found = found if refused is None else [refused] * len(found)
        for number, (old, new) in enumerate(zip(known, found, strict=False)):
            params = optimizer.param_groups[number]["params"]
            # On every rank a parameter with states has a key
            stepped = any(dict.__contains__(optimizer.state, p) for p in params)
            if old.update != new.update and REFUSED not in (old.update, new.update) and stepped:
                raise ValueError(
                    f"the update of group {number} of {type(optimizer).__name__} was {old.update} and"
                    f" is {new.update} since its options have changed, and its states are divided as"
                    " before. Give the optimizer these options when it is made, or clear its states"
                    " first (optimizer.state.clear())."
                )
        _verdicts[optimizer], known = (now, found), found
    return known[group]


def tell_verdict(optimizer: Optimizer, verdicts: list[GroupVerdict]) -> None:
    """Let `verdicts` stand for the groups without a trial, which needs real values."""
    _verdicts[optimizer] = _looked_at(optimizer), verdicts


def _looked_at(optimizer: Optimizer) -> list[Any]:
    return [(bool(group["params"]), switches_of(group)) for group in optimizer.param_groups]


def takes_stacks(optimizer: Optimizer) -> bool:
    """Return whether the optimizer steps a stack of matrices, [matrices, rows, columns], each by
    itself: the halves of a stack come out as they do in the whole. Tried once for a class.
    """
    kind, group = type(optimizer), next(g for g in optimizer.param_groups if g["params"])
    like = group["params"][0]
    if kind not in _stacks:
        _stacks[kind] = False
        with contextlib.suppress(Exception), _alone(optimizer, like.device):
            _stacks[kind] = not _dependence(optimizer, group, like, _STACK)
    return _stacks[kind]


def _of_group(
    optimizer: Optimizer, group: dict[str, Any], tried: dict[str, GroupVerdict]
) -> GroupVerdict:
    """Return the verdict on the first sort of the group's parameters that is not element-wise.

    `tried`: the verdicts on groups of the same options before, by all that a trial depends on.
    """
    dims = sorted({max(2, len((spec_of(p) or p).shape)) for p in group["params"]})
    # A third dimension (convolutions) may change the kind of update
    shapes = [*_MATRICES, *((*(2,) * (n - 3), 8, 6, 16) for n in dims if n > 2)]
    # For weight decay only zero or not matters. Its value does not change the kind of update
    own = {
        k: v != 0 if k == "weight_decay" else v for k, v in group.items() if k not in _OF_THE_USER
    }
    for kept, like in _sorts(optimizer, group).items():
        for shape in shapes:
            key = repr((own, kept, shape, like.device))
            if key not in tried:
                with _alone(optimizer, like.device):
                    tried[key] = _try(optimizer, group, like, shape)
            if tried[key].update != ELEMENTWISE:
                return tried[key]
    return _ELEMENTWISE


def _sorts(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter of each sort, by what code keeps for it: of a number it matters whether
    it is zero. Many different texts are names, and make no sorts.
    """
    found: dict[str, Any] = {}
    for texts in ((bool, str, type(None)), (bool, type(None))):
        found = {}
        for p in group["params"]:
            kept = [
                (name, "" if name else str(key), _sort_of(table[key], texts))
                for name, table, keys in kept_by(optimizer, p)
                for key in keys
            ]
            found.setdefault(repr(sorted(kept)), p)
        if len(found) <= _SORTS:
            break
    return found


def _sort_of(value: Any, texts: tuple[type, ...]) -> str:
    return repr(
        value if isinstance(value, texts) else isinstance(value, (int, float)) and value != 0
    )


# -- trials ----------------------------------------------------------------------------------------


def _try(
    optimizer: Optimizer, group: dict[str, Any], like: Any, shape: tuple[int, ...]
) -> GroupVerdict:
    """Compare steps of a parameter of this shape with steps of its pieces."""
    known_whole = any(c.__name__.lower() in STEP_MATRICES for c in type(optimizer).__mro__)
    otherwise = WHOLE if known_whole else REFUSED
    try:
        reason = _dependence(optimizer, group, like, shape)
    except TouchesReal as error:
        return GroupVerdict(REFUSED, f"it cannot be tried: {error}")
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        reason = f"its step failed on a small matrix, or on a part of one ({said})."
    return GroupVerdict(otherwise, reason) if reason else _ELEMENTWISE


def _dependence(
    optimizer: Optimizer, group: dict[str, Any], like: Any, shape: tuple[int, ...]
) -> str:
    """Return what tells that the update of an element depends on others; "" if nothing does."""
    values = _drawn(shape, like.device)
    whole, numbers = _run(optimizer, group, like, values)
    numel = prod(shape)
    # The cuts are at multiples of 128 elements, where SIMD vectors end; of a stack between matrices
    cut = (numel // 3 // 128 * 128, 2 * numel // 3 // 128 * 128)
    parts = (t.split(2) if shape == _STACK else t.reshape(-1).tensor_split(cut) for t in values)
    # Each piece is stepped by itself, as on each rank. What one optimizer sums over all its parameters,
    # the others do not know.
    pieces = [_run(optimizer, group, like, piece) for piece in zip(*parts, strict=True)]
    if not torch.equal(whole.reshape(-1), torch.cat([piece.reshape(-1) for piece, _ in pieces])):
        return (
            "its update of an element depends on other elements (cutting a small tensor of shape"
            f" {shape} changed the result)."
        )
    for key, value in numbers.items():
        if any(key not in others or bool(value != others[key]) for _, others in pieces):
            return (
                f"its update depends on what it sums over all elements ({key} came out otherwise"
                " for parts of a small matrix)."
            )
    return ""


def _drawn(shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Return a start, and the gradient of each step. All point roughly one way, as in training: an
    optimizer that estimates a distance (Prodigy) then finds one.
    """
    generator = torch.Generator().manual_seed(0)
    count = 2 + _STEPS
    start, way, *noise = (
        torch.randn(shape, generator=generator, device="cpu").to(device) for _ in range(count)
    )
    return [start, *(way + 0.3 * each for each in noise)]


def _run(
    optimizer: Optimizer, group: dict[str, Any], like: Any, values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Step a parameter. Return it, and every number that the optimizer keeps for it or its group."""
    start, *grads = values
    with _knows_only(optimizer, group, like, start.clone(), _RATE):
        if callable(train := getattr(optimizer, "train", None)):  # schedule-free: of two modes
            train()
        for grad in grads:
            like.grad = grad.clone()
            raw_step(optimizer)
        kept = {f"{key!r} of its groups": v for key, v in optimizer.param_groups[0].items()}
        state = optimizer.state[like].items()
        kept |= {f"{key!r} of a parameter's state": value for key, value in state}
        return like.detach(), {key: value for key, value in kept.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def fresh_state(
    optimizer: Optimizer,
    group: dict[str, Any],
    param: Any,
    shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the state that `optimizer` would give a parameter of a group with these options at its
    first step: `step` is 0. No parameter, hook or count changes.

    `shape`: of the parameter, if the optimizer steps it in another one than it has here.

    In contrast, torch's `_init_optim_state` steps the real optimizer, with zero gradients and a
    learning rate of zero, and leaves `step` at 1.

    Raises:
        Exception: what the optimizer's step raises, for instance because it needs a closure.
    """
    with disable_torch_function():
        zeros = torch.zeros_like(param.detach()) if shape is None else param.new_zeros(shape)
        with _alone(optimizer, zeros.device), _knows_only(optimizer, group, param, zeros):
            param.grad = torch.zeros_like(zeros)
            raw_step(optimizer)
            state = dict(optimizer.state.get(param, {}))
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step.zero_()
    elif step is not None:
        state["step"] = 0
    return state


# -- the optimizer itself, as another one ----------------------------------------------------------


_CONTAINERS = (dict, list, set, defaultdict, OrderedDict)


@contextlib.contextmanager
def _knows_only(
    optimizer: Optimizer,
    group: dict[str, Any],
    param: Any,
    data: torch.Tensor,
    rate: float | None = None,
) -> Iterator[None]:
    """Inside, the optimizer, and those that it holds, know `param` alone, with this data. They have no
    states and no hooks, and count apart. See [Note: trials].

    Args:
        group: the options. rate: the learning rate, if it is another one.
    """
    noted = len(raw.notes)
    tried = [optimizer, *{id(each): each for each in held_inside(optimizer).values()}.values()]
    try:
        note(setattr, raw, "tried", raw.tried)
        raw.tried = (*raw.tried, *tried)
        for each in tried:
            own = own_attributes(each)
            groups = [group] if each is optimizer else each.param_groups
            note(_restore, each.__dict__, dict(each.__dict__))
            tables = {k: copy.copy(v) for k, v in own.items() if type(v) in _CONTAINERS}
            each.__dict__.update(tables | own_numbers(own))
            for name in ("grad_scale", "found_inf"):  # a GradScaler's, for the step under way
                each.__dict__.pop(name, None)
            each.state = defaultdict(dict)
            each.param_groups = [{**some, **own_numbers(some)} for some in groups]
            for some in each.param_groups:
                some["params"] = [p for p in some["params"] if p is param]
                some |= {"lr": rate} if rate is not None and "lr" in some else {}
            each._optimizer_step_pre_hooks = OrderedDict()
            each._optimizer_step_post_hooks = OrderedDict()
        note(_restore, param.__dict__, dict(param.__dict__))
        param.__dict__.update(own_numbers(param.__dict__))
        note(face, [param])
        bare([param])
        note(give, {}, param, param.data, param.grad, None)
        with _unsafe_preserve_version_counter(param):
            give({}, param, data, None, None)
            yield
    finally:
        undo(noted)


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)


class _Alone(TorchDispatchMode):
    """Refuses writes to `real` storages, and collectives: another rank may make this trial at another
    time, or not at all. Random numbers are the same in every call, so that an update that draws some
    comes out alike. Leave the generators as they were around it.
    """

    def __init__(self, real: set[int], device: torch.device) -> None:
        super().__init__()
        self.real, self.device = real, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            raise TouchesReal(
                f"its step communicates by itself (it calls {func.name()}), and Onefold has one rank"
                " step each matrix. Use its version for one device."
            )
        if any(storage_of(some) in self.real for some in written_by(func, args, kwargs)):
            raise TouchesReal(
                "its step of one parameter writes to the model's own parameters or gradients. Let it"
                " find them in `self.param_groups` alone."
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.default_generator.manual_seed(0)
            if self.device.type != "cpu":
                torch.get_device_module(self.device).manual_seed(0)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _alone(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Inside, nothing communicates, nothing that the optimizer steps is written to, and no generator
    of random numbers moves.
    """
    apart = [device] if device.type != "cpu" else []
    kind = {"device_type": device.type} if apart else {}
    # Compiled functions run as they are written: under a dispatch mode the compiler would pass them
    # over, and never compile them again. Importing the compiler takes a second
    compiled = "torch._dynamo" in sys.modules
    stance: Any = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with disable_torch_function():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        real = {storage_of(t) for p in params for t in (p, p.grad) if t is not None}
        with (
            torch.random.fork_rng(devices=apart, **kind),
            torch.enable_grad(),
            stance,
            _Alone(real, device),
        ):
            yield
