"""What the update of an optimizer looks at, found out by trial, for each parameter group.

| verdict        | the trial                                                              | may step                     |
|----------------|------------------------------------------------------------------------|------------------------------|
| "element-wise" | a small matrix, and the same matrix cut into pieces, come out the same | intervals of parameters      |
| "whole"        | they do not, but two matrices together come out as each by itself      | whole parameters             |
| "refused"      | neither, or the trial failed                                           | all parameters, in one place |

The results, and every number that the optimizer keeps, must be equal bit for bit. Optimizers with a
factored second moment, or with a norm of a matrix or a layer, are "whole". Optimizers that learn from
all their parameters are "refused", and those whose step communicates: only one rank makes it. With
intervals all of them would silently compute something else.

"whole" is tried as owners step (optim/whole_step.py): one matrix at a time, in other memory, and then
the groups without them. What an optimizer remembers outside of `self.state[p]` would be lost there.

A group is tried with its own options, since they may decide what is done with its parameters: by an
optimizer that is made with them, or by a twin of the given one, with a copy of the group. If neither
can be tried, the verdict on the optimizer's defaults stands. Code may keep numbers for a parameter, in
attributes and tables: the matrices of a trial have those of a parameter of each sort.

`verdict_for` also knows what the recipe says: its `whole` names groups, and its
`elementwise_optimizer` takes what cannot be told for element-wise. A group that a trial finds to be
"whole" stays so.
"""

from __future__ import annotations

import fnmatch
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.optim.fresh import Communicates, alone, give_tables, probe, twin_of
from onefold.recipe import Recipe
from onefold.recipe.optimizers import ELEMENTWISE, REFUSED, WHOLE
from onefold.runtime.parameters.interval import spec_of
from onefold.runtime.stepper import (
    GroupVerdict,
    Part,
    TouchesReal,
    groups_of,
    held_inside,
    kept_by,
    not_elementwise,
    own_attributes,
    own_numbers,
    step_parts,
    switches_of,
)

_ELEMENTWISE = GroupVerdict(ELEMENTWISE)
#: From the best to the worst.
_ORDER = (ELEMENTWISE, WHOLE, REFUSED)
#: In the order of the groups.
_verdicts: weakref.WeakKeyDictionary[Optimizer, list[GroupVerdict]] = weakref.WeakKeyDictionary()
#: The switches of the groups that these verdicts are of.
_switches: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
#: {class: {everything that a trial depends on: its verdict}}. A second optimizer of the same kind
#: in this process needs no trial.
_tried: weakref.WeakKeyDictionary[type, dict[Any, GroupVerdict | None]] = (
    weakref.WeakKeyDictionary()
)


def verdict_for(recipe: Recipe) -> Callable[[Optimizer, int], GroupVerdict]:
    """Return what to ask for the verdict on a group: the recipe's word, or the trial."""
    return lambda optimizer, group: _told(recipe, optimizer, group) or verdict_of(optimizer, group)


def _told(recipe: Recipe, optimizer: Optimizer, group: int) -> GroupVerdict | None:
    """Return the verdict that the recipe gives; None if it leaves it to the trial."""
    if recipe.whole is False:
        return _ELEMENTWISE
    if recipe.whole is True or (recipe.whole and _named(recipe.whole, optimizer, group)):
        return GroupVerdict(WHOLE, f"the recipe says whole={recipe.whole!r}.")
    if recipe.elementwise_optimizer and verdict_of(optimizer, group).update == REFUSED:
        return _ELEMENTWISE
    return None


def _named(patterns: Sequence[str], optimizer: Optimizer, group: int) -> bool:
    entries = [
        entry
        for p in optimizer.param_groups[group]["params"]
        if (known := p.__dict__.get("_onefold_entry")) is not None and (entry := known())
    ]
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for entry in entries
        for name in entry.names
        for pattern in patterns
    )


def verdict_of(optimizer: Optimizer, group: int) -> GroupVerdict:
    """Return what the update of a parameter group looks at. Verdicts are cached, until switches of a
    group change.

    If one group is refused, all are: its update may look at the parameters of the others.

    Raises:
        ValueError: a group that has states is stepped in another way since its switches have changed.
    """
    known, now = _verdicts.get(optimizer), [switches_of(g) for g in optimizer.param_groups]
    if known is None or _switches.get(optimizer, now) != now or len(known) < len(now):
        before = known or []
        trials = _Trials(optimizer)
        known = [trials.verdict_of(each) for each in optimizer.param_groups]
        refused = next((v for v in known if v.update == REFUSED), None)
        known = known if refused is None else [refused] * len(known)
        for number, (old, new) in enumerate(zip(before, known, strict=False)):
            if old.update != new.update and REFUSED not in (old.update, new.update):
                _refuse_states(optimizer, number, old, new)
        _verdicts[optimizer], _switches[optimizer] = known, now
    return known[group]


def _refuse_states(optimizer: Optimizer, number: int, old: GroupVerdict, new: GroupVerdict) -> None:
    """Raise ValueError if a group has states, which lie as its update needed them before."""
    params = optimizer.param_groups[number]["params"]
    # On every rank a parameter with states has a key
    if any(dict.__contains__(optimizer.state, p) for p in params):
        raise ValueError(
            f"the update of group {number} of {type(optimizer).__name__} was {old.update} and is"
            f" {new.update} since its options have changed, and its states are divided as before. Give"
            " the optimizer these options when it is made, or clear its states first"
            " (optimizer.state.clear())."
        )


def takes_stacks(optimizer: Optimizer) -> bool:
    """Return whether the optimizer steps a stack of matrices, [matrices, rows, columns], each by
    itself: the halves of a stack come out as they do in the whole. Tried once for a class.
    """
    known = _stacks.get(type(optimizer))
    if known is None:
        known = _stacks[type(optimizer)] = _Trials(optimizer).takes_stacks()
    return known


_stacks: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def tell_verdict(optimizer: Optimizer, verdict: GroupVerdict) -> None:
    """Let `verdict` stand for all groups without a trial, which needs real values."""
    _verdicts[optimizer] = [verdict] * len(optimizer.param_groups)


def refuse_unless_elementwise(optimizer: Optimizer) -> None:
    """Raise if the optimizer's update is not element-wise.

    Raises:
        ValueError: the update of a group is not element-wise, or the trial failed.
    """
    for number in range(len(optimizer.param_groups)):
        verdict = verdict_of(optimizer, number)
        if verdict.update != ELEMENTWISE:
            raise not_elementwise(optimizer, verdict)


#: The shapes of the matrices of a trial. Some optimizers treat only large matrices as matrices.
_MATRICES = ((16, 24), (160, 144))


class _Trials:
    """The trials of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, kind = optimizer, type(optimizer)
        self.device = next(
            (p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu")
        )
        arguments = _arguments(optimizer)
        # The class may have been patched since the last trial
        inside = tuple((name, id(value)) for c in kind.__mro__ for name, value in vars(c).items())
        self._depends = (inside, repr(arguments), str(self.device))
        self._known = _tried.setdefault(kind, {}) if _is_plain(arguments) else {}

    def verdict_of(self, group: dict[str, Any]) -> GroupVerdict:
        """Return the worst verdict over the group's parameters."""
        found = [self._verdict_like(group, like) for like in self._sorts(group)]
        return max(found, key=lambda verdict: _ORDER.index(verdict.update))

    def _sorts(self, group: dict[str, Any]) -> list[Any]:
        """Return a parameter of each sort, by what code keeps for it: of a number it matters whether
        it is zero. Many different texts are names, and make no sorts.
        """
        found: dict[str, Any] = {}
        for kinds in ((bool, str, type(None)), (bool, type(None))):
            found = {}
            for p in group["params"]:
                kept = [
                    (n, str(k) if not n else "", t[k])
                    for n, t, keys in kept_by(self.optimizer, p)
                    for k in keys
                ]
                sort = sorted(
                    (
                        n,
                        k,
                        repr(v) if isinstance(v, kinds) else isinstance(v, (int, float)) and v != 0,
                    )
                    for n, k, v in kept
                )
                found.setdefault(repr(sort), p if kept else None)
            if len(found) <= _SORTS:
                break
        return list(found.values()) or [None]

    def _verdict_like(self, group: dict[str, Any], like: Any) -> GroupVerdict:
        """Return the verdict on parameters like `like`. None: there is nothing kept for them."""
        options, told = self._own_options(group)
        dims = sorted({max(2, len((spec_of(p) or p).shape)) for p in group["params"]})
        # A third dimension (convolutions) may change the kind of update
        shapes = [*_MATRICES, *((*(2,) * (n - 3), 8, 6, 16) for n in dims if n > 2)]
        own = self._worst(shapes, _How(options, None, like)) if options else None
        if own is not None and own.update == ELEMENTWISE and told:
            return own
        if options and (own is None or not told):
            twin = self._worst(shapes, _How(options, group, like))
            if twin is not None:
                return twin
        by_default = self._worst(shapes, _How({}, None, like))
        assert by_default is not None
        if not options and by_default.update == REFUSED:  # its constructor may want groups
            return self._worst(shapes, _How({}, group, like)) or by_default
        # Without a trial: these options may make sense for the group's own parameters only
        if own is None or own.update == ELEMENTWISE:
            return by_default
        return (
            own if by_default.update == ELEMENTWISE else GroupVerdict(own.update, by_default.reason)
        )

    def takes_stacks(self) -> bool:
        generator = torch.Generator().manual_seed(0)

        def drawn() -> torch.Tensor:
            return torch.randn((4, 24, 16), generator=generator, device="cpu").to(self.device)

        start, grads, how = drawn(), [drawn() for _ in range(_TRIED)], _How({})
        halves = [(start[i : i + 2], [g[i : i + 2] for g in grads]) for i in (0, 2)]
        try:
            with alone(self.optimizer, self.device):
                (whole,) = _run(self.optimizer, [(start, grads)], how)
                parts = [run for half in halves for run in _run(self.optimizer, [half], how)]
        except Exception:
            return False
        return torch.equal(whole.param, torch.cat([part.param for part in parts]))

    def _own_options(self, group: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the options in which a group differs from the optimizer's defaults, and whether a
        trial can be told all of them.
        """
        own = {k: v for k, v in group.items() if k not in _OF_THE_USER}
        plain = {
            k: v
            for k, v in own.items()
            if isinstance(v, (bool, int, float, str, tuple, type(None)))
        }
        return {k: v for k, v in plain.items() if self.optimizer.defaults.get(k) != v}, own == plain

    def _worst(self, shapes: Sequence[tuple[int, ...]], how: _How) -> GroupVerdict | None:
        """Return the worst verdict over tensors of these shapes; None: it would be element-wise, but the
        optimizer cannot be tried with such options on all of them.
        """
        found, failed = _ELEMENTWISE, False
        for shape in shapes:
            # What is not element-wise is not cut again: pieces of the large matrix are vectors, for
            # which some optimizers would keep square matrices
            verdict = self._one(shape, how, found.reason)
            if verdict is None:
                failed = True
            elif _ORDER.index(verdict.update) > _ORDER.index(found.update):
                found = GroupVerdict(verdict.update, found.reason or verdict.reason)
        return None if failed and found.update == ELEMENTWISE else found

    def _one(self, shape: tuple[int, ...], how: _How, known: str) -> GroupVerdict | None:
        key = how.key(self.optimizer)
        depends = (*self._depends, shape, key, known)
        if depends not in self._known:
            with alone(self.optimizer, self.device):
                found = _try(self.optimizer, shape, how, self.device, known)
            if key is None:
                return found
            self._known[depends] = found
        return self._known[depends]


@dataclass(frozen=True)
class _How:
    """How the optimizer of a trial is made.

    Attributes:
        options: in which its group differs from the optimizer's defaults.
        group: it is a twin of the optimizer, with a copy of this group; None: its constructor makes
            it, of the options.
        like: the parameter whose numbers those of the trial have, in attributes and tables.
    """

    options: dict[str, Any]
    group: dict[str, Any] | None = None
    like: Any = None

    def key(self, optimizer: Optimizer) -> str | None:
        """Everything that the result depends on; None if that cannot be told."""
        own = {k: v for k, v in (self.group or self.options).items() if k not in _OF_THE_USER}
        # A twin has the attributes of the optimizer, which may say how it updates
        attributes = own_attributes(optimizer) if self.group is not None else {}
        if self.group is not None and not (_is_plain(own) and _is_plain(attributes)):
            return None
        some = kept_by(optimizer, self.like) if self.like is not None else ()
        kept = [
            (n, own_numbers({str(k) if not n else "": t[k] for k in keys})) for n, t, keys in some
        ]
        if not _is_plain(kept):
            return None
        # For weight decay only zero or not matters. Its value does not change the kind of update.
        plain = sorted((k, v != 0 if k == "weight_decay" else v) for k, v in own.items())
        return repr((self.group is not None, plain, kept, attributes))

    def make(self, optimizer: Optimizer, params: list[nn.Parameter]) -> Any:
        if self.group is None:
            if held_inside(optimizer):  # made anew, it might hold these: a trial would step them
                raise TypeError("it holds other optimizers")
            given = [{"params": params, **self.options}] if self.options else params
            return type(optimizer)(given, **_arguments(optimizer))
        return twin_of(
            optimizer, self.group | ({"lr": _RATE} if "lr" in self.group else {}), params
        )


#: So many sorts of parameters are tried by their texts.
_SORTS = 8
#: Of a group: what does not change the kind of its update.
_OF_THE_USER = ("params", "param_names", "lr", "initial_lr")
#: The learning rate of a trial: far from 0, so that the update shows.
_RATE = 0.05


class _LeftOut(RuntimeError):
    """A step fails over groups without parameters."""


class _Remembers(RuntimeError):
    """A state of a parameter is kept outside of `self.state`."""


def _is_plain(value: Any) -> bool:
    """Return whether `repr(value)` describes `value` completely."""
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return value is None or type(value) in (bool, int, float, str)


#: Steps of a trial. An optimizer may begin with steps of a millionth (Prodigy), so the trial also
#: compares the numbers that the optimizer keeps.
_TRIED = 4
_Start = tuple[torch.Tensor, Sequence[torch.Tensor]]  # (a parameter, its gradient in each step)


@dataclass
class _Trial:
    """The result of a trial: the parameter, and every number that the optimizer keeps for it or for
    its group.
    """

    param: torch.Tensor
    numbers: dict[str, Any]


def _try(
    optimizer: Optimizer, shape: tuple[int, ...], how: _How, device: torch.device, known: str
) -> GroupVerdict | None:
    """Compare steps of a parameter of this shape with steps of its parts, and with steps beside
    another one. Return None if the optimizer cannot be tried with these options.

    The cuts are at multiples of 128 elements, where SIMD vectors end. `known`: why the update is not
    element-wise, if that is known; then nothing is cut.
    """
    generator, numel = torch.Generator().manual_seed(0), prod(shape)

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device)

    start, way = drawn(), drawn()
    # All gradients point roughly one way, as in training. An optimizer that estimates a distance
    # (Prodigy) then finds one.
    grads = [way + 0.3 * drawn() for _ in range(_TRIED)]
    try:
        (whole,) = _run(optimizer, [(start, grads)], how)
    except Communicates as error:
        return GroupVerdict(
            REFUSED,
            f"its step communicates by itself ({error}), and Onefold has one rank step each matrix."
            " Use its version for one device.",
        )
    except TouchesReal as error:
        return GroupVerdict(REFUSED, f"it cannot be tried: {error}")
    except Exception as error:
        if how.options or how.group is not None:
            return None
        return GroupVerdict(
            REFUSED,
            f"its constructor or step could not be tried on a small matrix ({type(error).__name__}:"
            f" {error}).",
        )
    cut = (numel // 3 // 128 * 128, 2 * numel // 3 // 128 * 128)
    cuts = zip(_split(start, cut), *(_split(g, cut) for g in grads), strict=True)
    reason = known or _reason(optimizer, whole, [(s, gs) for s, *gs in cuts], shape, how)
    if reason is None:
        return _ELEMENTWISE
    # Far from the first, so that what is summed over both shows
    other = (3.0 * drawn(), [7.0 * drawn() for _ in range(_TRIED)])
    try:
        together = _run(optimizer, [(start, grads), other], how)
        alone = [whole, *_run(optimizer, [other], how)]
    except Exception:
        return GroupVerdict(REFUSED, reason)
    if not all(map(_equal, together, alone)):
        return GroupVerdict(REFUSED, reason)
    if not known and (why := _why_not_apart(optimizer, [(start, grads), other], how, together)):
        return GroupVerdict(REFUSED, f"{reason} {why}")
    return GroupVerdict(WHOLE, reason)


def _why_not_apart(
    optimizer: Optimizer, starts: Sequence[_Start], how: _How, together: Sequence[_Trial]
) -> str | None:
    """Return why owners cannot step these parameters with the optimizer, as a sentence; None if they
    can: then they come out as in `together`.
    """
    try:
        apart = _run(optimizer, starts, how, by_owners=True)
    except _Remembers:
        apart = []
    except _LeftOut as error:
        cause = error.__cause__
        return (
            "Its step fails for a group whose parameters have all been stepped by their owners"
            f" ({type(cause).__name__}: {cause}): let it pass over a group without parameters."
        )
    except Exception as error:
        return f"Its step of one matrix at a time fails ({type(error).__name__}: {error})."
    if apart and all(map(_equal, apart, together)):
        return None
    return (
        "It remembers more than numbers outside of `self.state[p]`, which is all that the owner of p"
        " has of it: keep states of a parameter there."
    )


def _reason(
    optimizer: Optimizer,
    whole: _Trial,
    cuts: Sequence[_Start],
    shape: tuple[int, ...],
    how: _How,
) -> str | None:
    """Step the pieces `cuts` of the parameter of the trial `whole`. Return None if they come out
    equal, else the reason for a refusal.
    """
    try:
        # Each piece has an optimizer of its own, as on each rank. What one optimizer sums over all
        # its parameters, the others do not know.
        pieces = [piece for each in cuts for piece in _run(optimizer, [each], how)]
    except Exception as error:
        return (
            f"its step does not work on one-dimensional pieces ({type(error).__name__}: {error})."
        )
    what = "matrix" if len(shape) == 2 else f"tensor of {len(shape)} dimensions"
    with_options = (
        f", with a group's {', '.join(f'{k}={v!r}' for k, v in how.options.items())},"
        if how.options
        else ""
    )
    if not torch.equal(whole.param.reshape(-1), torch.cat([piece.param for piece in pieces])):
        return (
            "its update of an element depends on other elements (cutting a small"
            f" {what}{with_options} changed the result)."
        )
    learned = next((key for piece in pieces if (key := _differs(whole, piece))), None)
    if learned is not None:
        return (
            f"its update depends on what it sums over all elements ({learned} came out otherwise"
            f" for parts of a small {what})."
        )
    return None


def _equal(a: _Trial, b: _Trial) -> bool:
    return torch.equal(a.param, b.param) and _differs(a, b) is None


def _differs(a: _Trial, b: _Trial) -> str | None:
    """Return the first number that `b` keeps otherwise than `a`."""
    return next((k for k, v in a.numbers.items() if not _same(v, b.numbers.get(k))), None)


def _split(t: torch.Tensor, cut: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    return t.reshape(-1).tensor_split(cut)


def _run(
    optimizer: Optimizer, starts: Sequence[_Start], how: _How, by_owners: bool = False
) -> list[_Trial]:
    """Step these parameters with one new optimizer. `by_owners`: as their owners step them."""
    params = [probe(start.clone(), optimizer, how.like) for start, _ in starts]
    trial = how.make(optimizer, params)
    give_tables(trial, optimizer, params, how.like)
    if callable(getattr(trial, "train", None)):  # schedule-free optimizers have two modes
        trial.train()
    for grads in zip(*(grads for _, grads in starts), strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if by_owners and not held_inside(trial):
            _step_by_owners(trial, params)
        else:
            trial.step()
    if by_owners and any(
        isinstance(table[key], torch.Tensor) and table[key].numel() > 1
        for param in params
        for _, table, keys in kept_by(trial, param)
        for key in keys
    ):
        raise _Remembers
    group = {f"{key!r} of its groups": value for key, value in trial.param_groups[0].items()}
    return [_trial(param, group, trial.state[param]) for param in params]


def _step_by_owners(trial: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Step each of `params` by itself, as `WholeStep` does, and then what is left of the groups."""
    groups = groups_of(trial)
    for param in params:
        known: Any = trial.state.get(param)
        part = Part(param, param.detach().clone(), param.grad, known or None)
        step_parts(trial, groups, [part])
        if part.state is not None:
            trial.state[param] = part.state
        param.data.copy_(part.data)
    every = [group["params"] for group in trial.param_groups]
    for group in trial.param_groups:
        group["params"] = []
    try:
        trial.step()
    except Exception as error:
        raise _LeftOut from error
    finally:
        for group, mine in zip(trial.param_groups, every, strict=True):
            group["params"] = mine


def _trial(param: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> _Trial:
    kept = group | {f"{key!r} of a parameter's state": value for key, value in state.items()}
    return _Trial(param.detach(), {key: value for key, value in kept.items() if _is_number(value)})


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _same(a: Any, b: Any) -> bool:
    same = a == b
    return b is not None and bool(same.all() if isinstance(same, torch.Tensor) else same)


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the constructor's arguments, as far as `optimizer.defaults` has them, or attributes of
    their names. The learning rate is replaced by one far from 0, with which the update shows.
    """
    known = inspect.signature(type(optimizer).__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    arguments = {k: v for k, v in vars(optimizer).items() if k in known and _is_plain(v)}
    arguments |= {k: v for k, v in optimizer.defaults.items() if anything or k in known}
    if "lr" in arguments:
        arguments["lr"] = _RATE
    if arguments.get("capturable"):
        arguments["capturable"] = False
    return arguments
