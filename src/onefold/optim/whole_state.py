"""`optimizer.state_dict()` and `load_state_dict()` of an optimizer over sharded parameters: whole
states, as torch itself has them.

    state_dict()        parts of all ranks ──► rank 0's host, one state at a time      the other ranks: the same groups, an empty state
    load_state_dict()   the same whole dict on every rank: each takes its part on its own host, nothing travels
                        whole on rank 0, empty elsewhere: each is sent its part

| what a part is                      | what stands in the dict                                                   |
|-------------------------------------|---------------------------------------------------------------------------|
| this rank's interval                | the whole, in the parameter's shape                                       |
| a tile of a parameter               | the parameter, where it would stand without tiles                         |
| a place for a state on NVMe         | the state                                                                 |
| codes and scales, or bf16 moments   | what they stand for, in fp32 or the master weights' dtype                 |
| a number (`step`)                   | the number of a rank that has some of the parameter's elements            |

Both are collective wherever there is more than one rank and something is divided. At stage 0 states
are whole on every rank: `state_dict()` is torch's own there, on every rank, and moves nothing.
`local_state_dict` and `load_local_state_dict` are about this rank's part alone.

[Note: how an optimizer is found] torch's hooks on `state_dict` are an optimizer's own, and a script
that resumes calls `load_state_dict` right behind the constructor. `Optimizer.add_param_group` asks
each parameter whether it is a leaf: a sharded one sees who asks (runtime/parameter.py). Optimizers
made before `shard()` are looked for once among Python's objects, if anything but the model refers
to its parameters; any other is met at its first step.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import onefold.optim.faced_states as faced_states
import onefold.quant.moments as moments
from onefold.recipe.moments import SIGNED, grain_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.on_disk import OnDisk
from onefold.runtime.parameter import disable_torch_function, leaf_asked_by
from onefold.runtime.stream import (
    Put,
    Read,
    dist_rank,
    from_first,
    tell_all,
    to_first,
)

#: A top-level key of `local_state_dict`, by which the other loader knows it.
LOCAL = "onefold_local"
_STATE_DICT, _LOAD = "optimizer.state_dict()", "optimizer.load_state_dict()"
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# Inside local_state_dict or load_local_state_dict
_locally: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that step nothing sharded
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: (parameter groups, some parameters are divided) when it was last looked at.
_divided: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
#: States with elements on their way: read by the hook before torch's load, set by the one behind
#: it.
_landed: weakref.WeakKeyDictionary[Optimizer, list[_Landing]] = weakref.WeakKeyDictionary()


# -- which optimizers ------------------------------------------------------------------------------


def held_elsewhere(module: nn.Module) -> bool:
    """Whether anything but modules refers to a parameter of `module`: an optimizer may. (To look
    for one takes a second at worst.)
    """
    places = Counter(
        id(p) for m in module.modules() for p in m._parameters.values() if p is not None
    )
    [(_, alone)] = _references({"": object()})
    return any(
        n > alone + places[i] - 1 for m in module.modules() for i, n in _references(m._parameters)
    )


def _references(things: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(id(thing), sys.getrefcount(thing)) for thing in things.values() if thing is not None]


def follow(engine: Engine, held: bool) -> None:
    """From now on the state dicts of optimizers over the engine's parameters are whole; also of
    those that exist (`held`: some may).
    """
    _engines.add(engine)
    _passed.clear()
    if engine.unsharded and not _in_another_format(engine):
        return  # its parameters hold what torch's own would
    leaf_asked_by[0] = meet
    if not held:
        return
    mine, kinds = {id(entry.param) for entry in engine.entries}, _kinds(Optimizer)
    # By type(), which runs no code of theirs, unlike isinstance(): there are lazy modules and
    # proxies among them.
    for optimizer in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        groups: list[dict[str, Any]] = optimizer.__dict__.get("param_groups", [])
        if any(id(p) in mine for group in groups for p in group["params"]):
            meet(optimizer)
            with disable_torch_function():  # it may have stepped whole parameters before
                faced_states.make_all_plain(optimizer)
                show_states(optimizer)


def _kinds(kind: type) -> set[type]:
    """`kind` and everything that derives from it."""
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _in_another_format(engine: Engine) -> bool:
    return engine.recipe.moments is not None or engine.recipe.stochastic_rounding


def meet(optimizer: Any) -> None:
    """`optimizer` has, or is about to get, sharded parameters."""
    if (
        not isinstance(optimizer, Optimizer)
        or optimizer in _hooked
        or "_optimizer_state_dict_post_hooks" not in optimizer.__dict__
    ):
        return
    _hooked.add(optimizer)
    optimizer.register_state_dict_post_hook(_after_state_dict, prepend=True)
    hooks = optimizer._optimizer_load_state_dict_pre_hooks = _OursLast(
        optimizer._optimizer_load_state_dict_pre_hooks
    )
    hooks.ours = _before_load
    optimizer.register_load_state_dict_post_hook(_after_load, prepend=True)


def meet_at_step(optimizer: Optimizer) -> None:
    """As `meet`, before a step: of an optimizer that nobody has heard of yet, or whose states are
    about to be packed.
    """
    if optimizer not in _hooked and optimizer not in _passed:
        (meet if _Outline(optimizer).engine is not None else _passed.add)(optimizer)
    # States that a constructor made of sharded parameters (Adagrad's sums)
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        faced_states.make_all_plain(optimizer)
    faced_states.hide(optimizer)


def show_states(optimizer: Optimizer) -> None:
    """Behind a step, or a load: code outside sees states of divided parameters with the face of the
    whole.
    """
    if optimizer not in _hooked:
        return
    groups = len(optimizer.param_groups)
    if _divided.get(optimizer, (0, False))[0] != groups:
        _divided[optimizer] = groups, _Outline(optimizer).divided
    if _divided[optimizer][1]:
        faced_states.show(optimizer)


class _OursLast(OrderedDict[int, Any]):
    """Hooks of the user's, who registers them when ours is there, and wants to see what was given:
    ours comes after them.
    """

    ours: Callable[..., Any] | None = None

    def values(self) -> Any:
        return [*super().values(), *([self.ours] if self.ours is not None else [])]


# -- what an optimizer's groups consist of ---------------------------------------------------------


@dataclass
class _Param:
    """A parameter as torch's own state dict counts them.

    Attributes:
        numbers: of the optimizer's objects: one, or that of each tile. entries: theirs; [] for a
            parameter that is not sharded.
    """

    numbers: list[int]
    entries: list[Entry] = field(default_factory=list)
    name: str = ""
    shape: tuple[int, ...] = ()

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


class _Outline:
    """The parameters of an optimizer, group by group, tiles put together.

    Attributes:
        groups: [[parameter, ...], ...]. objects: the optimizer's own, by number. engine: whose they
            are; None if none is sharded.
        divided: some are divided among ranks. special: what this rank holds is something else than
            torch would hold.

    Raises:
        ValueError: they belong to models that are divided among different ranks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        known = {id(e.param): e for engine in _engines for e in engine.entries}
        self.groups: list[list[_Param]] = []
        self.objects: list[torch.Tensor] = []
        engines: dict[int, Engine] = {}
        tiled: dict[tuple[int, str], _Param] = {}
        for group in optimizer.param_groups:
            params: list[_Param] = []
            for p in group["params"]:
                number = len(self.objects)
                self.objects.append(p)
                entry = known.get(id(p))
                engine = entry.engine() if entry is not None else None
                if entry is None or engine is None:
                    params.append(_Param([number], [], "", tuple(p.shape)))
                    continue
                engines[id(engine)] = engine
                part = entry.part
                if part.numel == entry.slot.numel:
                    params.append(_Param([number], [entry], part.names[0], tuple(part.shape)))
                elif (id(engine), part.names[0]) in tiled:
                    tiled[id(engine), part.names[0]].numbers.append(number)
                    tiled[id(engine), part.names[0]].entries.append(entry)
                else:
                    found = tiled[id(engine), part.names[0]] = _Param(
                        [number], [entry], part.names[0], tuple(part.shape)
                    )
                    # A module in tiles lists its weight behind its bias, torch's lists it before
                    at = len(params)
                    while at and params[at - 1].entries and params[at - 1].module == found.module:
                        at -= 1
                    params.insert(at, found)
            self.groups.append(params)
        self.params = [param for group in self.groups for param in group]
        self.engines = list(engines.values())
        self.engine = self.engines[0] if engines else None
        entries = [e for param in self.params for e in param.entries]
        self.divided = any(e.flat.divided for e in entries)
        self.special = self.divided or any(_special(optimizer, e, e.engine()) for e in entries)
        if any(sorted(e.group.ranks) != sorted(self.engines[0].group.ranks) for e in self.engines):
            raise ValueError(
                f"this {type(optimizer).__name__} steps parameters of models that are divided among"
                " different ranks, so that its state cannot be put together. Give each model an"
                " optimizer of its own, or use onefold.save and onefold.load."
            )


def _special(optimizer: Optimizer, entry: Entry, engine: Any) -> bool:
    tiled = entry.flat.tiled
    return entry.flat.storage.on_disk or tiled or _rests(optimizer, entry, engine) is not None


def _rests(optimizer: Optimizer, entry: Entry, engine: Engine) -> moments.MomentPolicy | None:
    if not _in_another_format(engine) and moments.torchao_format(optimizer) is None:
        return None
    return moments.rests(optimizer, engine.recipe, entry.flat)


def _held_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of what the optimizer has of a parameter."""
    a, b = entry.held()
    return (b - a,) if entry.flat.divided else tuple(entry.slot.shape)


# -- state_dict ------------------------------------------------------------------------------------


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    if optimizer in _locally:
        return None
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = _Outline(optimizer)
        engine = outline.engine
        if engine is None or not outline.special:
            return None
        _check_moment(engine, "state_dict")
        for each in outline.engines:
            each.transfers.check()
        said = _say(optimizer, outline)
        plan = _plan(
            optimizer, outline, tell_all(engine, _STATE_DICT, said) if outline.divided else [said]
        )
        first = engine.rank == 0 or not outline.divided
        state, error = _bring(optimizer, outline, plan, first)
        if outline.divided:
            error = _first_of(tell_all(engine, _STATE_DICT, error))
        if error is not None:
            raise RuntimeError(f"{_STATE_DICT}: the states could not be read. {error}")
        others = {
            key: value for key, value in state_dict.items() if key not in ("state", "param_groups")
        }
        if first:
            kept: Mapping[Any, Any] = optimizer.state
            state |= {
                key: value for key, value in kept.items() if not isinstance(key, torch.Tensor)
            }
        return {
            "state": state if first else {},
            "param_groups": _whole_groups(optimizer, outline),
            **others,
        }


def _first_of(errors: list[str | None]) -> str | None:
    """The first error of the ranks, with who met it."""
    return next((f"rank {rank}: {told}" for rank, told in enumerate(errors) if told), None)


def _check_moment(engine: Engine, call: str) -> None:
    if engine.stack:
        raise RuntimeError(
            f"optimizer.{call}() of a sharded model was called inside a forward pass: call it"
            " between steps."
        )


#: What a rank says of one parameter: None if it answers for none of its elements, {} if it has no
#: state, else {key: (dtype of elements or None, the value if it is none of elements)}.
_Said = dict[Any, tuple[torch.dtype | None, Any]] | None


def _say(optimizer: Optimizer, outline: _Outline) -> tuple[list[_Said], str | None]:
    """What this rank holds, for those parameters of which it answers for some elements; and what
    cannot be put together.
    """
    held: dict[int, Any] = {n: optimizer.state.get(p) for n, p in enumerate(outline.objects)}
    shapes = {
        n: _held_shape(e)
        for param in outline.params
        for n, e in zip(param.numbers, param.entries, strict=False)
    }
    odd: set[Any] = {
        key for n, shape in shapes.items() for key, value in (held[n] or {}).items()
        if packed(key) is None and isinstance(value, torch.Tensor) and (tuple(value.shape) != shape or key == "step")
    }  # fmt: skip
    said: list[_Said] = []
    wrong: str | None = None
    for param in outline.params:
        found: _Said = None
        if not param.entries and (state := held[param.numbers[0]]):
            found = {key: (None, value) for key, value in state.items()}
        for n, entry in zip(param.numbers, param.entries, strict=False):
            a, b = entry.accounted() if outline.divided else entry.held()
            state = held[n]
            if found or (a == b and entry.slot.numel):
                continue
            found = {}
            if not state:
                continue
            how = _rests(optimizer, entry, _engine(entry))
            for key, value in state.items():
                part, number = (
                    packed(key),
                    isinstance(value, torch.Tensor) and value.numel() == 1 and key in odd,
                )
                if part is not None:
                    found.setdefault(part.key, (torch.float32, None))
                elif (
                    isinstance(value, torch.Tensor)
                    and tuple(value.shape) == shapes[n]
                    and not (number and value.ndim == 0)
                ):
                    dtype = value.dtype
                    if how is not None and key in SIGNED:
                        dtype = torch.promote_types(dtype, entry.flat.dtypes.master)
                    found[key] = dtype, None
                elif (
                    isinstance(value, torch.Tensor)
                    and not number
                    and (outline.divided or entry.flat.tiled)
                ):
                    wrong = wrong or (
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)}"
                        f" for parameter {param.name!r}: neither one number nor one for each"
                        " element, so that the parts of several ranks cannot be put together."
                        " local_state_dict has this rank's."
                    )
                else:
                    found[key] = (
                        None,
                        (
                            value.detach().cpu().clone()
                            if isinstance(value, torch.Tensor)
                            else value
                        ),
                    )
        said.append(found)
    return said, wrong


def _plan(
    optimizer: Optimizer, outline: _Outline, told: list[tuple[list[_Said], str | None]]
) -> list[_Said]:
    """Of each parameter what all ranks together hold.

    Raises:
        ValueError: on every rank: it does not go together.
    """
    wrong = next((complaint for _, complaint in told if complaint), None)
    if wrong is not None:
        raise ValueError(f"{_STATE_DICT}: {wrong}")
    plan: list[_Said] = []
    for at, param in enumerate(outline.params):
        found = [said[at] for said, _ in told if said[at] is not None]
        kinds = [{key: dtype for key, (dtype, _) in (said or {}).items()} for said in found]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{_STATE_DICT}: the ranks keep different states of parameter {param.name!r}"
                f" ({kinds[0]} and {next(k for k in kinds if k != kinds[0])}): an optimizer must"
                " step on all ranks alike."
            )
        plan.append(found[0] if found and found[0] else None)
    return plan


def _bring(
    optimizer: Optimizer, outline: _Outline, plan: list[_Said], first: bool
) -> tuple[dict[int, Any], str | None]:
    """The whole states on the first rank, and what went wrong while this one read its parts, if
    anything did.
    """
    state: dict[int, Any] = {}
    reader = _PartReader(optimizer)
    for number, (param, said) in enumerate(zip(outline.params, plan, strict=True)):
        if said is None:
            continue
        state[number] = {}
        for key, (dtype, value) in said.items():
            if dtype is None:
                state[number][key] = value
                continue
            whole = torch.zeros(param.shape, dtype=dtype, device="cpu") if first else None
            for entry in param.entries:
                out = None
                if whole is not None:
                    out = whole.view(-1)[entry.part.first : entry.part.first + entry.slot.numel]
                to_first(_engine(entry), entry, dtype, reader.of(entry, key, dtype), out)
            state[number][key] = whole
    return state, reader.error


class _PartReader:
    """Reads this rank's parts; keeps the first error for the end, so that no other rank is left
    waiting.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.error: str | None = None

    def of(self, entry: Entry, key: str, dtype: torch.dtype) -> Read:
        def read(x: int, y: int) -> torch.Tensor:
            try:
                return _part(self.optimizer, entry, key, x, y).to(dtype)
            except Exception as error:
                self.error = self.error or f"{type(error).__name__}: {error}"
                return torch.zeros(y - x, dtype=dtype)

        return read


def _part(optimizer: Optimizer, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
    """Elements [x, y) of `entry`, counted from its first, of the state `key`; they begin with a
    block where there are blocks.
    """
    found = {
        name: value
        for name, value in optimizer.state.get(entry.param, {}).items()
        if name == key or ((part := packed(name)) is not None and part.key == key)
    }
    if not found:
        # A tile that was never stepped, of a parameter of which others were
        return torch.zeros(y - x)
    parts: dict[str, torch.Tensor] = {}
    for name, value in found.items():
        held = entry.flat.storage.elements(entry, name, value, x, y)
        parts[name] = held.read() if isinstance(held, OnDisk) else held
    if key in parts:
        return parts[key]
    how = _rests(optimizer, entry, _engine(entry))
    assert how is not None
    return moments.unpacked(how, parts, key, y - x)


def _whole_groups(optimizer: Optimizer, outline: _Outline) -> list[dict[str, Any]]:
    """The groups as torch's own state dict has them, with parameters for tiles."""
    out, start = [], 0
    names = [group.get("param_names") for group in optimizer.param_groups]
    first = 0
    for group, params, named in zip(optimizer.param_groups, outline.groups, names, strict=True):
        packed_group = {key: value for key, value in group.items() if key != "params"}
        if named is not None:
            packed_group["param_names"] = [
                p.name if len(p.numbers) > 1 else named[p.numbers[0] - first] for p in params
            ]
        packed_group["params"] = list(range(start, start + len(params)))
        out.append(packed_group)
        start, first = start + len(params), first + len(group["params"])
    return out


def _engine(entry: Entry) -> Engine:
    engine = entry.engine()
    assert engine is not None
    return engine


# -- load_state_dict -------------------------------------------------------------------------------


@dataclass
class _Landing:
    """A state on its way into the optimizer: given elements [x, y) of `entry`, in order. An error
    is kept for the end, so that no other rank is left waiting.
    """

    entry: Entry
    parts: dict[str, torch.Tensor]
    put: Put
    error: str | None = None

    def __call__(self, x: int, y: int, values: torch.Tensor) -> None:
        if self.error is None:
            try:
                self.put(x, y, values)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    _landed.pop(optimizer, None)
    if optimizer in _locally:
        return None
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = _Outline(optimizer)
        engine = outline.engine
        if engine is None or (engine.group.size == 1 and not outline.special):
            return None
        _check_moment(engine, "load_state_dict")
        try:
            complaint, digest = _look(optimizer, outline, state_dict)
        except Exception as error:  # the others wait to be told
            complaint, digest = (
                f"expected what optimizer.state_dict() returned ({type(error).__name__}: {error}).",
                b"",
            )
        told = tell_all(engine, _LOAD, (complaint, digest, bool(state_dict.get("state"))))
        scattered = told[0][2] and not all(full for _, _, full in told)
        _refuse(engine, told, scattered)
        if not scattered and not outline.special:
            return None
        for each in outline.engines:
            each.about_to_write()
            each.transfers.check()
        given = state_dict
        if scattered:  # what is no tensor of elements is said, the rest is sent
            given = tell_all(
                engine, _LOAD, _said_by_first(outline, state_dict) if engine.rank == 0 else None
            )[0]
        return _take(optimizer, outline, given, state_dict, scattered)


def _refuse(engine: Engine, told: list[tuple[str | None, bytes, bool]], scattered: bool) -> None:
    """Raise ValueError, on every rank, unless what they were given can be loaded."""
    ranks = sorted(engine.group.ranks)
    for rank, (complaint, digest, full) in enumerate(told[:1] if scattered else told):
        if complaint is not None:
            raise ValueError(
                f"{_LOAD}: {complaint}" + (f" (rank {ranks[rank]})" if len(told) > 1 else "")
            )
        if full and not told[0][2]:
            raise ValueError(
                f"{_LOAD}: rank {ranks[0]} was given an empty state and rank {ranks[rank]} was not."
                f" Give every rank the same whole dict, or rank {ranks[0]} the whole one and the"
                " others what state_dict() returned there."
            )
        if digest != told[0][1]:
            raise ValueError(
                f"{_LOAD}: rank {ranks[0]} and rank {ranks[rank]} were given different dicts. Give"
                f" every rank the same whole one (the file that rank 0 saved), or rank {ranks[0]}"
                " the whole one and the others what state_dict() returned there; what"
                " local_state_dict() returned goes to onefold.optim.load_local_state_dict."
            )


def _look(
    optimizer: Optimizer, outline: _Outline, given: Mapping[str, Any]
) -> tuple[str | None, bytes]:
    """What is wrong with a dict, and a digest of what it says but for the elements."""
    if LOCAL in given:
        said = given[LOCAL]
        return (
            (
                f"this is the part of rank {said['rank']} of {said['ranks']}, as local_state_dict()"
                " returned it. Give it to onefold.optim.load_local_state_dict(optimizer, state) on"
                " as many ranks, or give what optimizer.state_dict() returned."
            ),
            b"",
        )
    state, groups = given.get("state", {}), given.get("param_groups", [])
    if not state and not groups:
        return (
            (
                "the dict has neither 'state' nor 'param_groups'; expected what"
                " optimizer.state_dict() returned."
            ),
            b"",
        )
    ours, theirs = (
        [len(params) for params in outline.groups],
        [len(group["params"]) for group in groups],
    )
    if ours != theirs:
        return (
            (
                f"the dict has {_counted(theirs)}, this {type(optimizer).__name__} has"
                f" {_counted(ours)}. Make the groups as they were when it was saved, of the same"
                " model."
            ),
            b"",
        )
    text: list[Any] = [[sorted((str(k), _simple(v)) for k, v in group.items()) for group in groups]]
    numbers = [number for group in groups for number in group["params"]]
    odd = _odd(outline, state, numbers)
    for number, param in zip(numbers, outline.params, strict=True):
        for key, value in state.get(number, {}).items():
            text.append((number, str(key), _simple(value)))
            if (
                param.entries
                and not _is_elements(param, key, value, odd)
                and _cannot_be_cut(outline, param, value)
            ):
                return (
                    (
                        f"state {key!r} of parameter {number} ({param.name!r}) has shape"
                        f" {tuple(value.shape)}, expected {param.shape}. It is of another model, or"
                        " one rank's part: those are saved by onefold.optim.local_state_dict and"
                        " loaded by load_local_state_dict."
                    ),
                    b"",
                )
    return None, hashlib.sha256(repr(text).encode()).digest()


def _counted(groups: list[int]) -> str:
    one = len(groups) == 1
    return (
        f"one parameter group of {groups[0]}"
        if one
        else f"{len(groups)} parameter groups of {', '.join(map(str, groups))}"
    )


def _simple(value: Any) -> Any:
    """What a value says by itself, the same on every rank: no addresses, no elements."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), (
            value.item() if value.numel() == 1 and value.device.type != "meta" else ""
        )
    return (
        value
        if isinstance(value, (int, float, str, bool, type(None), list, tuple))
        else type(value).__name__
    )


def _odd(outline: _Outline, state: Mapping[Any, Any], numbers: list[Any]) -> set[Any]:
    """Keys that are not element-wise: a parameter of no dimensions looks like a step count, but its
    neighbours tell them apart.
    """
    return {
        key for number, param in zip(numbers, outline.params, strict=True) for key, value in state.get(number, {}).items()
        if isinstance(value, torch.Tensor) and (tuple(value.shape) != param.shape or key == "step")
    }  # fmt: skip


def _is_elements(param: _Param, key: Any, value: Any, odd: set[Any]) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and tuple(value.shape) == param.shape
        and not (key in odd and value.ndim == 0)
    )


def _cannot_be_cut(outline: _Outline, param: _Param, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    return (
        outline.divided
        or param.entries[0].flat.tiled
        or (value.numel() > 1 and any(e.flat.storage.on_disk for e in param.entries))
    )


@dataclass(frozen=True)
class _Elements:
    """Stands for a tensor of a parameter's elements, of which rank 0 sends each rank its part."""

    dtype: torch.dtype


def _said_by_first(outline: _Outline, given: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 tells: its dict, with what is to be sent left out."""
    state, numbers = (
        dict(given["state"]),
        [number for group in given["param_groups"] for number in group["params"]],
    )
    odd = _odd(outline, state, numbers)
    for number, param in zip(numbers, outline.params, strict=True):
        if param.entries and number in state:
            values = {key: _plain(value) for key, value in state[number].items()}
            state[number] = {
                k: _Elements(v.dtype) if _is_elements(param, k, v, odd) else v
                for k, v in values.items()
            }
    return {**given, "state": state}


def _plain(value: Any) -> Any:
    """torchao's packed states as what they stand for."""
    return (
        value.dequantize()
        if isinstance(value, torch.Tensor) and type(value).__module__.startswith("torchao.")
        else value
    )


def _take(
    optimizer: Optimizer,
    outline: _Outline,
    given: Mapping[str, Any],
    wholes: Mapping[str, Any],
    scattered: bool,
) -> dict[str, Any]:
    """This rank's part as torch is to load it; states with elements are made here, and set behind
    torch's own load (`_after_load`).
    """
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    state = given["state"]
    odd = set() if scattered else _odd(outline, state, numbers)

    def in_elements(param: _Param, key: Any, value: Any) -> bool:
        return bool(param.entries) and (
            isinstance(value, _Elements) if scattered else _is_elements(param, key, value, odd)
        )

    mine: dict[Any, Any] = {key: value for key, value in state.items() if key not in set(numbers)}
    landing, error = _landed.setdefault(optimizer, []), None
    for number, param in zip(numbers, outline.params, strict=True):
        values = {key: _plain(value) for key, value in state.get(number, {}).items()}
        if number not in state:
            continue
        for n in param.numbers:
            mine[n] = {
                # The dict stays as it was given
                key: value.clone() if isinstance(value, torch.Tensor) and param.entries else value
                for key, value in values.items()
                if not in_elements(param, key, value)
            }
        for key, value in values.items():
            if not in_elements(param, key, value):
                continue
            whole = (
                _plain(wholes["state"][number][key]) if number in wholes.get("state", {}) else None
            )
            for entry in param.entries:
                flat = None
                if whole is not None:
                    flat = whole.detach().reshape(-1)[
                        entry.part.first : entry.part.first + entry.slot.numel
                    ]
                put = _landing(optimizer, entry, key, value.dtype)
                landing.append(put)
                if scattered:
                    from_first(_engine(entry), entry, value.dtype, flat, put)
                elif flat is not None:
                    a, b = entry.held()
                    put(a, b, flat[a:b])
                error = error or put.error
    for each in outline.engines:
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            each.transfers.flush() if each.on_disk else None
    engine = outline.engine
    assert engine is not None
    wrong = _first_of(tell_all(engine, _LOAD, error))
    if wrong is not None:
        _landed.pop(optimizer, None)
        raise RuntimeError(f"{_LOAD}: the states could not be put in their places. {wrong}")
    local = []
    for group, params in zip(given["param_groups"], outline.groups, strict=True):
        # In the optimizer's own order, as torch goes by it.
        local.append({**group, "params": sorted(n for param in params for n in param.numbers)})
    _local_names(optimizer, local)
    return {**given, "state": mine, "param_groups": local}


def _local_names(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Names stay those of the optimizer's objects, of which there may be more than the dict has."""
    for group, ours in zip(groups, optimizer.param_groups, strict=True):
        if "param_names" in group and len(group["param_names"]) != len(group["params"]):
            group["param_names"] = ours.get("param_names", group["param_names"])


def _landing(optimizer: Optimizer, entry: Entry, key: str, dtype: torch.dtype) -> _Landing:
    """Where the state `key` of `entry` goes on this rank: memory, or NVMe; as it is, rounded, or
    packed.
    """
    flat, device = entry.flat, entry.param.device
    how = _rests(optimizer, entry, _engine(entry)) if key in SIGNED else None
    if entry.flat.dtypes.master.is_floating_point:
        dtype = flat.dtypes.master  # as torch's own load has it
    format = how.of(entry) if how is not None else None
    dtypes = {key: dtype} if format is None else {key: format.dtype}
    if format is not None and format.packed:
        dtypes = {
            name: part.dtype for name in format.keys(key) if (part := packed(name)) is not None
        }
    in_memory = how.small(entry) if how is not None else entry.param.dim() == 0
    parts = {
        name: flat.storage.new_state(entry, name, kind, in_memory) for name, kind in dtypes.items()
    }

    def put(x: int, y: int, values: torch.Tensor) -> None:
        new = {key: values}
        if how is not None and format is not None and format.packed:
            values = values.to(device, torch.float32)
            new = {
                name: torch.zeros(-(-(y - x) // grain_of(name)), dtype=kind, device=values.device)
                for name, kind in dtypes.items()
            }
            piece = moments.Piece(entry, entry.part.first + x, values, values, new, {}, False)
            moments.pack(replace(how, seed=None), piece, key, values, torch.zeros(()), again=True)
        for name, value in new.items():
            into = flat.storage.elements(entry, name, parts[name], x, y)
            into.write(0, value) if isinstance(into, OnDisk) else into.copy_(value)

    return _Landing(entry, parts, put)


def _after_load(optimizer: Optimizer) -> None:
    for landing in _landed.pop(optimizer, ()):
        optimizer.state[landing.entry.param].update(landing.parts)
    with disable_torch_function():
        show_states(optimizer)


# -- this rank's part ------------------------------------------------------------------------------


def local_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """This rank's part of the optimizer's state: its own intervals of the states, which loads on
    the same rank of as many. Local.

    Tensors alias the optimizer's. Where states rest on NVMe they are places only, which cannot be
    copied or pickled.
    """
    with disable_torch_function(), _only_local(optimizer):
        faced_states.make_all_plain(optimizer)
        state = optimizer.state_dict()
    return {**state, LOCAL: _rank_and_size(optimizer)}


def load_local_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load what `local_state_dict` returned on this rank. Local.

    Raises:
        ValueError: it is no such part, or that of another rank, or of another number of ranks.
    """
    if LOCAL not in state_dict:
        raise ValueError(
            "load_local_state_dict was given no part of one rank: give a whole state dict to"
            " optimizer.load_state_dict()."
        )
    said, here = state_dict[LOCAL], _rank_and_size(optimizer)
    if said != here:
        raise ValueError(
            f"load_local_state_dict was given the part of rank {said['rank']} of {said['ranks']} on"
            f" rank {here['rank']} of {here['ranks']}. What optimizer.state_dict() returns loads on"
            " any number of ranks."
        )
    with disable_torch_function():
        for engine in _Outline(optimizer).engines:
            engine.about_to_write()
    with _only_local(optimizer):
        optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != LOCAL})


@contextlib.contextmanager
def _only_local(optimizer: Optimizer) -> Iterator[None]:
    _locally.add(optimizer)
    try:
        yield
    finally:
        _locally.discard(optimizer)


def _rank_and_size(optimizer: Optimizer) -> dict[str, int]:
    with disable_torch_function():
        engine = _Outline(optimizer).engine
    return (
        {"rank": dist_rank(engine), "ranks": engine.group.size}
        if engine is not None
        else {"rank": 0, "ranks": 1}
    )
