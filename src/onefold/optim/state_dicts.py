"""Whole state dicts of optimizers over sharded parameters: `state_dict()` and `load_state_dict()`.

    state_dict()        parts of all ranks ──► rank 0's host, one state at a time      the other ranks: the same groups, an empty state
    load_state_dict()   the same whole dict on every rank: each takes its part on its own host, without traffic
                        whole on rank 0, empty elsewhere: rank 0 sends each rank its part

| state         | the whole dict holds                                                      |
|---------------|---------------------------------------------------------------------------|
| element-wise  | the whole, in the parameter's shape; moved by `OptimizerParts`            |
| a number      | the number of a rank that has some of the parameter's elements            |
| any other     | the state itself, if its owner, or every rank, has all of the parameter   |

Both calls are collective if there is more than one rank and a state is divided. At stage 0 every
rank holds whole states: `state_dict()` is torch's own and communicates nothing.

[Note: how an optimizer is met] torch registers `state_dict` hooks per optimizer. Onefold registers
its own when it meets an optimizer that has sharded parameters: when it is made (`add_param_group`,
optim/torch_methods.py). One from before `shard()` is met at its first step, or when its state dict is
first asked for, whichever is first. Until then it keeps the states that it has: whole, and right.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.optim.faced_states as faced_states
from onefold.optim.state_parts import (
    Made,
    OptimizerParts,
    Outline,
    OwnShape,
    Param,
    agreed,
    described,
    engine_of,
    odd_keys,
    own_shape,
    sort_of,
)
from onefold.optim.whole import put_elsewhere
from onefold.runtime.engine import Engine
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import from_first, from_own, tell_all, to_first

_SAVE, _LOAD = "optimizer.state_dict()", "optimizer.load_state_dict()"


# -- which optimizers ------------------------------------------------------------------------------


#: The optimizers that have sharded parameters, in the order in which they were met.
met: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
_passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those without sharded parameters
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
#: (number of parameter groups, whether any parameter is divided), at the last look.
_divided: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()


def follow(engine: Engine) -> None:
    """From now on make the state dicts of optimizers over the engine's parameters whole."""
    _passed.clear()
    mine = {id(entry.param) for entry in engine.entries}
    for known in met.keyrefs():  # after onefold.unshard
        if (optimizer := known()) is not None and any(
            id(p) in mine for group in optimizer.param_groups for p in group["params"]
        ):
            _take_over(optimizer)


def meet(optimizer: Optimizer) -> bool:
    """Hook the state dict of `optimizer` if it has sharded parameters. Returns whether it was not
    met before.
    """
    if optimizer in met or optimizer in _passed:
        return False
    if not Outline.of(optimizer).engines:
        _passed.add(optimizer)
        return False
    return _hook(optimizer)


def _hook(optimizer: Optimizer) -> bool:
    hooks = optimizer.__dict__.get("_optimizer_load_state_dict_pre_hooks")
    if optimizer in met or hooks is None:  # None: it wraps an optimizer, which is met by itself
        return False
    met[optimizer] = None
    optimizer.register_state_dict_post_hook(_after_state_dict, prepend=True)
    ours = optimizer._optimizer_load_state_dict_pre_hooks = _OursLast(hooks)
    ours.ours = _before_load
    optimizer.register_load_state_dict_post_hook(_after_load, prepend=True)
    return True


def meet_when_made(optimizer: Optimizer) -> None:
    """Meet an optimizer that has got a group of parameters."""
    _passed.discard(optimizer)
    if any("_onefold_entry" in p.__dict__ for p in optimizer.param_groups[-1]["params"]):
        _hook(optimizer)


def meet_when_asked(optimizer: Optimizer) -> None:
    """Meet an optimizer whose states are about to be saved or loaded."""
    with disable_torch_function():
        if meet(optimizer):
            _take_over(optimizer)


def _take_over(optimizer: Optimizer) -> None:
    """Make the states this rank's parts, of an optimizer that may have stepped before `shard()`."""
    with disable_torch_function():
        faced_states.make_all_plain(optimizer)
        put_elsewhere(optimizer)
        show_states(optimizer)


def meet_at_step(optimizer: Optimizer) -> None:
    """Prepare an optimizer for a step: call `meet` if it is new, and make its states plain
    tensors.
    """
    meet(optimizer)
    # The constructor may have made states from sharded parameters (Adagrad's sums)
    if optimizer not in _stepped:
        _stepped.add(optimizer)
        faced_states.make_all_plain(optimizer)
        faced_states.make_owned_whole(optimizer)
        put_elsewhere(optimizer)
    faced_states.hide(optimizer)


def show_states(optimizer: Optimizer) -> None:
    """After a step or a load: show states of divided parameters in the whole parameter's shape."""
    if optimizer not in met:
        return
    groups = len(optimizer.param_groups)
    if _divided.get(optimizer, (0, False))[0] != groups:
        _divided[optimizer] = groups, Outline.of(optimizer).divided
    if _divided[optimizer][1]:
        faced_states.show(optimizer)


def _after_load(optimizer: Optimizer) -> None:
    with disable_torch_function():
        for entry, made in _loaded.pop(optimizer, {}).items():
            optimizer.state[entry.param].update(made)
        put_elsewhere(optimizer)
        show_states(optimizer)


class _OursLast(OrderedDict[int, Any]):
    """The load hooks of an optimizer, with ours always last. The user's hooks, registered later,
    then see the dict as it was given.
    """

    ours: Callable[..., Any] | None = None

    def values(self) -> Any:
        return [*super().values(), *([self.ours] if self.ours is not None else [])]


# -- state_dict() ----------------------------------------------------------------------------------
#
# every rank   a description of its states ──► all ranks: the same plan, or the same error
# every rank   its elements, one state at a time ──► rank 0


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `state_dict` hook: return the whole dict in place of this rank's part; None if
    `state_dict` is already whole.
    """
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = Outline.of(optimizer)
        engine = outline.engine
        if engine is None or not outline.special:
            return None
        refuse_moment(engine, "state_dict")
        said, parts = None, OptimizerParts(optimizer)
        with parts.keeping_errors():
            for each in outline.engines:
                each.transfers.check()
            said = described(optimizer, outline)
        told = [(said, parts.error)]
        if outline.divided:
            told = tell_all(engine.resources, _SAVE, told[0])
        _refuse_unread(error for _, error in told)
        plan = agreed(_SAVE, outline, [each for each, _ in told if each is not None])
        state: dict[Any, Any] = {
            number: {
                key: _whole(optimizer, outline, parts, param, key, dtype, value)
                for key, (dtype, value) in found.items()
            }
            for number, (param, found) in enumerate(zip(outline.params, plan, strict=True))
            if found is not None
        }
        errors = [parts.error]
        if outline.divided:
            errors = tell_all(engine.resources, _SAVE, parts.error)
        _refuse_unread(errors)
        if engine.rank == 0 or not outline.divided:
            kept: Mapping[Any, Any] = optimizer.state
            state |= {k: value for k, value in kept.items() if not isinstance(k, torch.Tensor)}
        else:
            state = {}
        whole = {"state": state, "param_groups": _whole_groups(optimizer, outline)}
        return whole | {key: value for key, value in state_dict.items() if key not in whole}


def _refuse_unread(errors: Iterable[str | None]) -> None:
    """Raise RuntimeError on every rank if one of them could not read its states."""
    if (error := first_of(errors)) is not None:
        raise RuntimeError(f"{_SAVE}: the states could not be read. {error}")


def _whole(
    optimizer: Optimizer, outline: Outline, parts: OptimizerParts, param: Param,
    key: str, dtype: torch.dtype | None, value: Any,
) -> Any:  # fmt: skip
    """Return what the first rank's whole dict holds of a state."""
    if isinstance(value, OwnShape):
        entry = param.entry
        assert entry is not None
        held = parts.owned(entry)
        assert held is not None
        own = optimizer.state.get(entry.param) or {}
        return own_shape(entry, held, value, own.get(key))
    if dtype is None:
        return value
    item = param.item(key, dtype)
    resources = engine_of(item.entry).resources
    return to_first(resources, parts, item, everywhere=not outline.divided)


def _whole_groups(optimizer: Optimizer, outline: Outline) -> list[dict[str, Any]]:
    """Return the groups as torch's state dict has them."""
    return [
        {key: group[key] for key in group if key != "params"}
        | {"params": [param.number for param in params]}  # last, as torch's has it
        for group, params in zip(optimizer.param_groups, outline.groups, strict=True)
    ]


# -- load_state_dict() -----------------------------------------------------------------------------
#
# before torch's load   the ranks compare their dicts ──► element-wise states are created and filled
# torch's load          numbers and groups
# after it              the element-wise states are put into `optimizer.state`


#: Element-wise states being loaded: filled before torch's load, given to the optimizer after it.
_loaded: weakref.WeakKeyDictionary[Optimizer, Made] = weakref.WeakKeyDictionary()


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `load_state_dict` hook: return this rank's part in place of the whole dict; None if torch
    can load the dict as it is.
    """
    _loaded.pop(optimizer, None)
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        outline = Outline.of(optimizer)
        engine = outline.engine
        if engine is None or (engine.group.size == 1 and not outline.special):
            return None
        refuse_moment(engine, "load_state_dict")
        complaint, digest = None, b""
        try:
            digest = _look(optimizer, outline, state_dict)
        except _Refused as error:
            complaint = str(error)
        except Exception as error:  # not raised yet: the other ranks wait for this one's report
            complaint = (
                f"expected what optimizer.state_dict() returned ({type(error).__name__}: {error})."
            )
        told = tell_all(engine.resources, _LOAD, (complaint, digest, bool(state_dict.get("state"))))
        scattered = told[0][2] and not all(full for _, _, full in told)
        _refuse(engine, told, scattered)
        if not scattered and not outline.special:
            return None
        mine = not scattered or engine.rank == 0
        given = _outlined(outline, state_dict) if mine else {}
        if scattered:  # rank 0 tells all but the element-wise tensors, which follow one by one
            given = tell_all(engine.resources, _LOAD, given)[0]
        return _take(optimizer, outline, engine, given, state_dict, scattered)


# -- checking the given dict -----------------------------------------------------------------------


class _Refused(ValueError):
    """The dict cannot be loaded here."""


def _refuse(engine: Engine, told: list[tuple[str | None, bytes, bool]], scattered: bool) -> None:
    """Raise ValueError on every rank if the ranks' dicts cannot be loaded."""
    ranks = sorted(engine.group.ranks)
    for rank, (complaint, digest, full) in enumerate(told[:1] if scattered else told):
        if complaint is not None:
            who = f" (rank {ranks[rank]})" if len(told) > 1 else ""
            raise ValueError(f"{_LOAD}: {complaint}{who}")
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
                " the whole one and the others what state_dict() returned there."
            )


def _look(optimizer: Optimizer, outline: Outline, given: Mapping[str, Any]) -> bytes:
    """Check a dict, and return a digest of all but its elements. Raises: _Refused."""
    state, groups = given.get("state", {}), given.get("param_groups", [])
    if not state and not groups:
        raise _Refused(
            "the dict has neither 'state' nor 'param_groups'; expected what"
            " optimizer.state_dict() returned."
        )
    ours = [len(params) for params in outline.groups]
    theirs = [len(group["params"]) for group in groups]
    if ours != theirs:
        raise _Refused(
            f"the dict has {_counted(theirs)}, this {type(optimizer).__name__} has"
            f" {_counted(ours)}. Make the groups as they were when it was saved, of the same"
            " model."
        )
    text: list[Any] = [[sorted((str(k), _simple(v)) for k, v in group.items()) for group in groups]]
    outlined, parts = _outlined(outline, given)["state"], OptimizerParts(optimizer)
    for number, param in zip(numbers_of(given), outline.params, strict=True):
        for key, value in state.get(number, {}).items():
            text.append((number, str(key), _simple(value)))
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise _Refused(
                    f"state {key!r} of parameter {number} ({param.name!r}) is on the meta device,"
                    " without values: give tensors with values."
                )
            if param.entry is not None and _cannot_be_cut(
                outline, parts, param, outlined[number][key]
            ):
                raise _Refused(
                    f"state {key!r} of parameter {number} ({param.name!r}) has shape"
                    f" {tuple(value.shape)}, expected {param.shape}: it is of another model."
                )
    return hashlib.sha256(repr(text).encode()).digest()


def _counted(groups: list[int]) -> str:
    if len(groups) == 1:
        return f"one parameter group of {groups[0]}"
    return f"{len(groups)} parameter groups of {', '.join(map(str, groups))}"


def _simple(value: Any) -> Any:
    """Return a description of a value that is the same on every rank: no addresses, no elements."""
    if isinstance(value, torch.Tensor):
        number = value.numel() == 1 and value.device.type != "meta"
        return tuple(value.shape), value.item() if number else ""
    plain = isinstance(value, (int, float, str, bool, type(None), list, tuple))
    return value if plain else type(value).__name__


def _cannot_be_cut(outline: Outline, parts: OptimizerParts, param: Param, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    assert param.entry is not None
    if param.whole and parts.owned(param.entry) is not None:
        return False  # its owner takes it whole
    return outline.divided or (value.numel() > 1 and param.entry.flat.storage.on_disk)


# -- storing this rank's part ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Elements:
    """Placeholder for an element-wise tensor, which is moved by itself."""

    dtype: torch.dtype


def _outlined(outline: Outline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict with placeholders for its element-wise tensors."""
    state = dict(given.get("state", {}))
    numbered = [*zip(numbers_of(given), outline.params, strict=True)]
    odd = odd_keys((param.shape, state.get(number, {})) for number, param in numbered)
    for number, param in numbered:
        if param.entry is not None and number in state:
            state[number] = {
                k: _Elements(v.dtype) if sort_of(k, v, param.shape, odd) == "elements" else v
                for k, v in state[number].items()
            }
    return {**given, "state": state}


def _plain(value: Any) -> Any:
    """Return the values of a packed state of torchao's; any other value as it is."""
    packed_by_torchao = type(value).__module__.startswith("torchao.")
    return value.dequantize() if packed_by_torchao and isinstance(value, torch.Tensor) else value


def _take(
    optimizer: Optimizer, outline: Outline, engine: Engine, given: Mapping[str, Any],
    wholes: Mapping[str, Any], scattered: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return this rank's part for torch to load. Element-wise states are created here, and given to
    the optimizer after torch's own load.

    Args:
        given: the outlined dict. wholes: the dict with its tensors, which only rank 0 has if they
            are `scattered`.
    """
    numbers, state = numbers_of(given), given["state"]
    mine: dict[Any, Any] = {key: value for key, value in state.items() if key not in set(numbers)}
    parts = OptimizerParts(optimizer)
    with parts.keeping_errors():
        for each in outline.engines:
            each.transfers.check()
    for number, param in zip(numbers, outline.params, strict=True):
        if number not in state:
            continue
        elements = {k: v.dtype for k, v in state[number].items() if isinstance(v, _Elements)}
        entry = param.entry
        held = parts.owned(entry) if entry is not None else None
        mine[number] = {
            # clone: the caller's dict must not change
            key: value.clone() if isinstance(value, torch.Tensor) and entry is not None else value
            for key, value in state[number].items()
            if key not in elements and (held is None or held.mine)
        }
        for key, dtype in elements.items():
            item = param.item(key, dtype)
            parts.create(item)
            if not scattered:
                with parts.keeping_errors():
                    from_own(parts, item, _plain(wholes["state"][number][key]))
                continue
            whole = _plain(wholes["state"][number][key]) if engine.rank == 0 else None
            from_first(engine_of(item.entry).resources, parts, item, whole)
    for each in outline.engines:
        if each.on_disk:
            with parts.keeping_errors():
                each.transfers.flush()
    wrong = first_of(tell_all(engine.resources, _LOAD, parts.error))
    if wrong is not None:
        raise RuntimeError(f"{_LOAD}: the states could not be put in their places. {wrong}")
    _loaded[optimizer] = parts.made
    return {**given, "state": mine}


# -- both ------------------------------------------------------------------------------------------


def refuse_moment(engine: Engine, call: str) -> None:
    """Raise RuntimeError inside a forward pass."""
    if engine.stack:
        raise RuntimeError(
            f"optimizer.{call}() of a sharded model was called inside a forward pass: call it"
            " between steps."
        )


def first_of(errors: Iterable[str | None]) -> str | None:
    """Return the first error of the ranks, with the number of its rank."""
    return next((f"rank {rank}: {told}" for rank, told in enumerate(errors) if told), None)


def numbers_of(state_dict: Any) -> list[Any]:
    """Return the numbers of all parameters in a state dict, group after group."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]
