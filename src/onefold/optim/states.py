"""The states of an optimizer: as parts, which the moves of runtime/parts.py make whole, and as the whole
dicts of `state_dict()` and `load_state_dict()`.

    state_dict()        parts of all ranks ──► rank 0's host, one state at a time      the other ranks: the same groups, an empty state
    load_state_dict()   rank 0's dict counts: rank 0 sends each rank its part

`kinds_of` (optim/faced_states.py) says what a state is, and `OptimizerParts` reads and writes it:

| kind       | the value                                    | such as          | in a whole dict                                 |
|------------|----------------------------------------------|------------------|-------------------------------------------------|
| "elements" | a tensor of the parameter's shape            | exp_avg          | in the parameter's shape                        |
| "packed"   | codes or scales of moments in fewer bits     | exp_avg.int8     | the moments: `exp_avg`                          |
| "number"   | one number, or no tensor; every rank has it  | step             | that of a rank that has some of the parameter   |
| "other"    | a tensor of a shape of its own               | Adafactor's rows | itself, if one rank has all of the parameter    |

If there is more than one rank, a load is collective, and so is `state_dict()` where a state is divided.
At stage 0 every rank holds whole states: `state_dict()` is torch's own and communicates nothing. An error of one rank is
told to all before any of them raises: the others would wait for it.

[Note: how an optimizer is met] torch registers hooks of state dicts per optimizer. Onefold registers
its own when it meets an optimizer that has sharded parameters: at its first step, or when its state
dict is first asked for (optim/steps.py). Until then it keeps the states that it has: whole, and right.
"""  # fmt: skip

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

import onefold.optim.faced_states as faced_states
import onefold.quant.moments as moments
from onefold.optim.faced_states import Shape, kinds_of, policy_of, stored_as
from onefold.optim.whole import Owned, epoch, owned_by, put_elsewhere
from onefold.recipe.moments import moment_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.interval import disable_torch_function, owner_of
from onefold.runtime.parts import (
    HeldParts,
    StateItem,
    from_first,
    own_whole,
    said_by_first,
    tell_all,
    to_first,
)

_SAVE, _LOAD = "optimizer.state_dict()", "optimizer.load_state_dict()"
#: The entries of parameters that stay as they are (`Flat.unsharded`) and carry no mark of an engine,
#: by the ids of the parameters. Kept in optim/steps.py.
unmarked: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()


def engine_of_param(param: Any) -> tuple[Any, Any]:
    """Return the entry of a parameter that an optimizer steps, and its engine; (None, None) if no model
    of shard() has it.
    """
    entry, engine = owner_of(param)
    if entry is None and (entry := unmarked.get(id(param))) is not None:
        engine = entry.engine()
    return (None, None) if engine is None else (entry, engine)


# -- parts -----------------------------------------------------------------------------------------


#: States that were created for a load: {entry: {key: state}}.
Made = dict[Entry, dict[str, torch.Tensor]]


class OptimizerParts(HeldParts):
    """The states that an optimizer keeps for each element of its parameters, wherever and however they
    are stored: in memory, on NVMe, packed. An owner of a matrix has all of it (optim/whole.py).

    Attributes:
        made: states that were created for a load, and are not in the optimizer yet.
        error: the first error of a read or a write. It is kept for the end: raising at once would
            leave the other ranks waiting.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._owned = optimizer, owned_by(optimizer)
        self.made: Made = {}
        self.error: str | None = None

    def owned(self, entry: Entry) -> Owned | None:
        """Return how the optimizer steps `entry` whole; None if it does not."""
        return self._owned.get(id(entry.param))

    def held(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        if (whole := self.owned(entry)) is None:
            return entry.owned(position)
        return (0, entry.slot.numel * whole.at(position))

    def accounted(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        if (whole := self.owned(entry)) is None:
            return entry.accounted(position)
        return (0, entry.slot.numel * whole.counts(position))

    def shape(self, entry: Entry) -> Shape:
        whole = self.owned(entry)
        return tuple(entry.param.shape) if whole is None else whole.matrix.shape

    def stored(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        """Return elements [x, y) of the state `key`, or the items that stand for them."""
        value = self._states(entry)[key]
        if self.owned(entry) is not None:
            return value.detach().reshape(-1)[x:y]
        return entry.flat.storage.read(entry, key, value, x, y)

    def store(self, entry: Entry, key: str, x: int, y: int, new: torch.Tensor) -> None:
        """Overwrite them by `new`."""
        value = self._states(entry)[key]
        if self.owned(entry) is not None:
            value.view(-1)[x:y].copy_(new)
        else:
            entry.flat.storage.write(entry, key, value, x, y, new)

    def read(self, item: StateItem, x: int, y: int) -> torch.Tensor:
        with self.keeping_errors():
            return self.values(item.entry, item.key, x, y).to(item.dtype)
        return torch.zeros(y - x, dtype=item.dtype, device="cpu")

    def write(self, item: StateItem, x: int, y: int, values: torch.Tensor) -> None:
        """Write into states that `create` has made: values as they are, rounded, or packed. If they
        are packed, x is at a block boundary.
        """
        entry, key = item.entry, item.key
        with self.keeping_errors():
            if x == y or self.error is not None:
                return
            how, new = policy_of(self.optimizer, entry, key), {key: values}
            if how is not None:
                new = moments.as_stored(how.of(entry), key, values.to(entry.param.device))
            for name, part in new.items():
                self.store(entry, name, x, y, part)

    def create(self, entry: Entry, key: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Create this rank's parts of the state `key` of `entry` where the step keeps them: in memory, or
        on NVMe. On ranks that do not own a matrix they have no elements, and are not the optimizer's.
        """
        whole, how = self.owned(entry), policy_of(self.optimizer, entry)
        small = how.small(entry) if how is not None else entry.param.dim() == 0
        out: dict[str, torch.Tensor] = {}
        for name, kind in stored_as(self.optimizer, entry, key, dtype).items():
            if whole is None:
                out[name] = entry.flat.storage.new_state(entry, name, kind, in_memory=small)
            else:
                shape = whole.matrix.shape if whole.mine else (0,)
                out[name] = torch.zeros(shape, dtype=kind, device=entry.param.device)
        if whole is None or whole.mine:
            self.made.setdefault(entry, {}).update(out)
        return out

    def _states(self, entry: Entry) -> Mapping[str, Any]:
        return self.made.get(entry) or self.optimizer.state.get(entry.param) or {}

    def values(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        """Return elements [x, y) of the state `key`, unpacked. Then x is at a block boundary."""
        names = [name for name in self._states(entry) if moment_of(name) == key]
        found = {name: self.stored(entry, name, x, y) for name in names}
        return dict(moments.unpacked(found, y - x))[key]

    @contextlib.contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Inside, an error is kept as `error`, to be told to the other ranks."""
        try:
            yield
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def tell(self, call: str, among: Engine | None, value: Any = None) -> list[Any]:
        """Return every rank's `value`. Collective; `among` is None: this rank's alone.

        Raises:
            RuntimeError: on every rank, if one has an error.
        """
        told = [(self.error, value)]
        if among is not None:
            told = tell_all(among, call, told[0])
        for rank, (error, _) in enumerate(told):
            if error is not None:
                raise RuntimeError(f"{call}: rank {rank} could not move its states. {error}")
        return [each for _, each in told]


def placed(value: Any, param: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return `value` on the device where the optimizer's kernel expects its step count."""
    if isinstance(value, torch.Tensor) and (group.get("fused") or group.get("capturable")):
        return value.to(param.device)
    return value


# -- parameters, as a state dict numbers them ------------------------------------------------------


class Param(NamedTuple):
    """A parameter. `entry`, `engine`: None if it is not sharded."""

    param: torch.Tensor
    entry: Any
    engine: Any
    shape: Shape


class Outline:
    """The parameters of an optimizer.

    Attributes:
        params: in the order of the groups: a parameter's place is its number in a state dict.
        engines: those of these parameters.
        divided: whether any parameter is divided among ranks.
        special: whether this rank's state dict would differ from torch's for the unsharded model.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Raises:
        ValueError: its models are divided among different ranks.
        """
        self.params: list[Param] = []
        found: dict[Engine, None] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            entry, engine = engine_of_param(p)
            if engine is not None:
                found[engine] = None
            shape = tuple(p.shape if entry is None else entry.shape)
            self.params.append(Param(p, entry, engine, shape))
        self.engines = list(found)
        entries = [param.entry for param in self.params if param.entry is not None]
        self.divided = any(e.flat.divided for e in entries)
        self.special = self.divided or any(
            e.flat.storage.on_disk or policy_of(optimizer, e) is not None for e in entries
        )
        if len({tuple(sorted(engine.group.ranks)) for engine in self.engines}) > 1:
            raise ValueError(
                f"this {type(optimizer).__name__} steps parameters of models that are divided among"
                " different ranks, so that its state cannot be put together. Give each model an"
                " optimizer of its own, or use onefold.save and onefold.load."
            )


# -- which optimizers ------------------------------------------------------------------------------


@dataclass
class _Met:
    """An optimizer at the last look.

    Attributes:
        looked_at: what changes when parameters come, or come to be sharded.
        divided: whether any parameter is divided among ranks.
        hook: the number of its hook before a load, once it has one.
    """

    looked_at: Any = None
    divided: bool = False
    hook: int | None = None


#: The optimizers that were looked at, in the order in which they were met.
met: weakref.WeakKeyDictionary[Optimizer, _Met] = weakref.WeakKeyDictionary()


def meet(optimizer: Optimizer) -> None:
    """Hook the state dict of an optimizer, and make its states this rank's parts, if it has sharded
    parameters that it did not have at the last look. See [Note: how an optimizer is met]. Collective,
    if its constructor has made states from sharded parameters that owners step.
    """
    hooks = optimizer.__dict__.get("_optimizer_load_state_dict_pre_hooks")
    if hooks is None:  # it wraps an optimizer, which is met by itself
        return
    known = met.setdefault(optimizer, _Met())
    if known.hook in hooks:  # ours is last: the user's see the dict as it was given
        hooks.move_to_end(known.hook)
    now = epoch[0], len(optimizer.param_groups)
    if known.looked_at == now:
        return
    with disable_torch_function():
        outline = Outline(optimizer)
        known.looked_at, known.divided = now, outline.divided
        if not outline.engines:
            return
        if known.hook is None:
            known.hook = optimizer.register_load_state_dict_pre_hook(_before_load).id
            optimizer.register_state_dict_post_hook(_after_state_dict, prepend=True)
            optimizer.register_load_state_dict_post_hook(_after_load, prepend=True)
        faced_states.make_plain(optimizer)
        show_states(optimizer)


def show_states(optimizer: Optimizer) -> None:
    """After a step or a load: show states of divided parameters in the whole parameter's shape."""
    if optimizer in met and met[optimizer].divided:
        put_elsewhere(optimizer)
        faced_states.show(optimizer)


# -- state_dict() ----------------------------------------------------------------------------------
#
# every rank   a description of its states ──► all ranks: the same plan, or the same error
# every rank   its elements, one state at a time ──► rank 0


#: What a rank reports for one parameter: None if it accounts for none of the elements, {} if it has
#: no state, else {key: ((dtype, shape of its own or None), None)} for a state that moves, and
#: {key: (None, value)} for a number.
_Said = dict[Any, tuple[tuple[torch.dtype, Shape | None] | None, Any]] | None


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `state_dict` hook: return the whole dict; None if `state_dict` is whole."""
    with disable_torch_function(), torch.inference_mode(False), torch.no_grad():
        outline = Outline(optimizer)
        if not outline.special:
            return None
        among = outline.engines[0] if outline.divided else None
        parts, said = OptimizerParts(optimizer), list[_Said]()
        with parts.keeping_errors():
            for each in outline.engines:
                each.transfers.check()
            said = _described(optimizer, outline, parts)
        state: dict[Any, Any] = {}
        for number, found in enumerate(zip(*parts.tell(_SAVE, among, said), strict=True)):
            param, here = outline.params[number], [each for each in found if each is not None]
            kinds = [{key: kind for key, (kind, _) in each.items()} for each in here]
            if any(kind != kinds[0] for kind in kinds):
                name = "" if param.entry is None else param.entry.name
                raise ValueError(
                    f"{_SAVE}: the ranks keep different states of parameter {name!r} ({kinds}): an"
                    " optimizer must step on all ranks alike."
                )
            for key, (kind, value) in here[0].items() if here else ():
                if kind is not None:
                    item = StateItem(param.entry, key, *kind)
                    value = (
                        to_first(param.engine, parts, item)
                        if outline.divided
                        else own_whole(parts, item)
                    )
                state.setdefault(number, {})[key] = value
        parts.tell(_SAVE, among)
        if outline.engines[0].rank == 0 or not outline.divided:
            kept: Mapping[Any, Any] = optimizer.state
            state |= {k: value for k, value in kept.items() if not isinstance(k, torch.Tensor)}
        else:
            state = {}
        return {**state_dict, "state": state}


def _described(optimizer: Optimizer, outline: Outline, parts: OptimizerParts) -> list[_Said]:
    """Return what this rank holds for each parameter. Those without elements that this rank accounts
    for are None.

    Raises:
        ValueError: it has a state that cannot be combined.
    """
    states: list[dict[Any, Any]] = [optimizer.state.get(p.param) or {} for p in outline.params]
    shapes = [p.shape if p.entry is None else parts.shape(p.entry) for p in outline.params]
    kinds = kinds_of(list(zip(shapes, states, strict=True)))
    said: list[_Said] = []
    for param, state, kind_of in zip(outline.params, states, kinds, strict=True):
        entry = param.entry
        if entry is None:
            said.append({key: (None, value) for key, value in state.items()} or None)
            continue
        a, b = parts.accounted(entry) if outline.divided else parts.held(entry)
        if a == b and entry.numel:
            said.append(None)
            continue
        found: dict[Any, Any] = {}
        for key, kind in kind_of.items():
            value = state[key]
            if kind == "packed":
                found.setdefault(moment_of(key), ((torch.float32, None), None))
            elif kind == "elements":
                how, dtype = policy_of(optimizer, entry, key), value.dtype
                if how is not None:
                    dtype = torch.promote_types(dtype, entry.flat.dtypes.master)
                found[key] = (dtype, None), None
            elif kind == "other" and parts.owned(entry) is not None and entry.region is None:
                found[key] = (value.dtype, tuple(value.shape)), None
            elif kind == "other" and outline.divided:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)}"
                    f" for parameter {entry.name!r}: neither one number nor one for each"
                    " element, so that the parts of several ranks cannot be put together."
                )
            else:
                tensor = isinstance(value, torch.Tensor)
                found[key] = None, value.detach().cpu().clone() if tensor else value
        said.append(found)
    return said


# -- load_state_dict() -----------------------------------------------------------------------------
#
# before torch's load   rank 0 tells its dict ──► element-wise states are created and filled from rank 0
# torch's load          numbers and groups
# after it              the element-wise states are put into `optimizer.state`


#: Element-wise states being loaded: filled before torch's load, given to the optimizer after it.
_loaded: weakref.WeakKeyDictionary[Optimizer, Made] = weakref.WeakKeyDictionary()


def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The `load_state_dict` hook: return this rank's part in place of rank 0's dict; None if torch
    can load the dict as it is.
    """
    _loaded.pop(optimizer, None)
    with disable_torch_function(), torch.inference_mode(False), torch.no_grad():
        outline = Outline(optimizer)
        if not outline.engines or (outline.engines[0].group.size == 1 and not outline.special):
            return None
        engine, parts = outline.engines[0], OptimizerParts(optimizer)
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if any(theirs != sizes for theirs in tell_all(engine, _LOAD, sizes)):
            raise ValueError(f"{_LOAD}: the ranks' optimizers have different parameter groups.")
        look = partial(_heads, optimizer, outline, parts, state_dict)
        return _take(outline, parts, said_by_first(engine, _LOAD, look), state_dict)


def _heads(
    optimizer: Optimizer, outline: Outline, parts: OptimizerParts, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the dict with dtypes in the place of its element-wise tensors, which move by themselves.

    Raises:
        ValueError: it does not fit the optimizer.
    """
    state, groups = given.get("state"), given.get("param_groups")
    if not isinstance(state, Mapping) or not groups:
        raise ValueError(
            "the dict has no 'state' or no 'param_groups'; expected what optimizer.state_dict()"
            " returned."
        )
    state = dict(state)
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if ours != theirs:
        raise ValueError(
            f"the dict has parameter groups of {theirs} parameters, this {type(optimizer).__name__}"
            f" has groups of {ours}. Make the groups as they were when it was saved, of the same"
            " model."
        )
    numbered = zip(numbers_of(given), outline.params, strict=True)
    there = [(n, param) for n, param in numbered if n in state]
    kinds = kinds_of([(param.shape, state[n]) for n, param in there])
    for (number, (_, entry, _, shape)), kind_of in zip(there, kinds, strict=True):
        state[number] = own = dict(state[number])
        for key, value in own.items():
            if entry is not None and kind_of[key] == "elements":
                if value.is_meta:
                    raise ValueError(
                        f"state {key!r} of parameter {number} ({entry.name!r}) is on the meta device,"
                        " which has no values: load the dict with map_location='cpu'."
                    )
                own[key] = value.dtype
            elif isinstance(value, torch.Tensor):
                own[key] = value.cpu()
                owned = entry is None or (parts.owned(entry) is not None and entry.region is None)
                if owned or not value.ndim:
                    continue
                if outline.divided or (value.numel() > 1 and entry.flat.storage.on_disk):
                    raise ValueError(
                        f"state {key!r} of parameter {number} ({entry.name!r}) has shape"
                        f" {tuple(value.shape)}, expected {shape}: it is of another model."
                    )
    return {**given, "state": state}


def _take(
    outline: Outline, parts: OptimizerParts, heads: dict[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Make of rank 0's dict this rank's part, for torch to load. Element-wise states are created here,
    and given to the optimizer after torch's own load.

    Args:
        heads: the dict with dtypes in their place. given: the dict with its tensors, on rank 0.
    """
    with parts.keeping_errors():
        for each in outline.engines:
            each.transfers.check()
    for number, (_, entry, engine, _) in zip(numbers_of(heads), outline.params, strict=True):
        state = heads["state"].get(number, {}) if entry is not None else {}
        whole = parts.owned(entry) if state else None
        for key, value in list(state.items()):
            if isinstance(value, torch.dtype):
                with parts.keeping_errors():  # in the masters' dtype, as torch's own load gives it
                    master = entry.flat.dtypes.master
                    parts.create(entry, key, master if master.is_floating_point else value)
                first = given["state"][number][key] if engine.rank == 0 else None
                from_first(engine, parts, StateItem(entry, key, value), first)
            if isinstance(value, torch.dtype) or (whole is not None and not whole.mine):
                del state[key]
            elif isinstance(value, torch.Tensor):  # the caller's dict must not change
                state[key] = value.clone()
    with parts.keeping_errors():
        for each in outline.engines:
            if each.on_disk:
                each.transfers.flush()
    parts.tell(_LOAD, outline.engines[0])
    _loaded[parts.optimizer] = parts.made
    return heads


def _after_load(optimizer: Optimizer) -> None:
    with disable_torch_function():
        for entry, made in _loaded.pop(optimizer, {}).items():
            optimizer.state[entry.param].update(made)
        show_states(optimizer)


def numbers_of(state_dict: Any) -> list[Any]:
    """Return the numbers of all parameters in a state dict, group after group."""
    return [number for group in state_dict["param_groups"] for number in group["params"]]
