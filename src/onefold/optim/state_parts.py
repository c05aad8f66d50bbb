"""The states of an optimizer as parts, which the moves of runtime/parts.py make whole.

`OptimizerParts` reads and writes this rank's elements of a state, wherever and however it is stored:

| this rank stores                        | the item                                                          |
|-----------------------------------------|-------------------------------------------------------------------|
| a tensor of its elements                | these, under the same key                                         |
| a placeholder for a state on NVMe       | the elements on NVMe                                              |
| codes and scales (`exp_avg.int8`, ...)  | `exp_avg`: the values; or the codes and the scales, each as it is |
| a whole state, as the owner of a matrix | all of it; other ranks have nothing (optim/whole.py)              |

`sort_of` says what a state is, for code that saves states or combines those of several ranks:

| sort       | the value                                                      | such as            |
|------------|----------------------------------------------------------------|--------------------|
| "packed"   | codes or scales of moments in fewer bits                       | exp_avg.int8       |
| "elements" | a tensor of the parameter's shape                              | exp_avg            |
| "number"   | one number, or no tensor at all; every rank has it             | step               |
| "other"    | a tensor of a shape of its own: an owner has it whole, and else it cannot be divided | Adafactor's rows   |

`Outline` numbers the parameters of an optimizer as torch's state dict does, by group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.comm import CollectiveContext
from onefold.optim.whole import Owned, owned_by
from onefold.recipe.moments import SIGNED, grain_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.gather_paths import state_context
from onefold.runtime.hooks import engine_of_entry
from onefold.runtime.parts import HeldParts, StateItem
from onefold.runtime.storage import OnDisk, in_memory

#: The engines over whose parameters optimizers step, in their order. Kept in optim/step_hooks.py.
engines: dict[Engine, None] = {}


# -- sorts -----------------------------------------------------------------------------------------


Sort = Literal["packed", "elements", "number", "other"]
Shape = tuple[int, ...]


def odd_keys(states: Iterable[tuple[Shape, Mapping[Any, Any]]]) -> set[Any]:
    """Return the keys whose value differs in shape from its parameter, for any `(shape, state)`.

    The shape does not tell a step count from an element-wise state of a 0-dim parameter. The other
    parameters do.
    """
    return {
        key
        for shape, state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and packed(key) is None
        and (tuple(value.shape) != shape or key == "step")
    }


def sort_of(key: Any, value: Any, shape: Shape, odd: set[Any]) -> Sort:
    """Return the sort of the state `key` of a parameter of `shape`; `odd`: from `odd_keys`."""
    if packed(key) is not None:
        return "packed"
    if not isinstance(value, torch.Tensor):
        return "number"
    same = tuple(value.shape) == shape
    if key in odd and value.numel() == 1 and (value.ndim == 0 or not same):
        return "number"
    return "elements" if same else "other"


# -- parts -----------------------------------------------------------------------------------------


def in_another_format(engine: Engine) -> bool:
    return engine.recipe.moments is not None or engine.recipe.stochastic_rounding


def moment_policy(optimizer: Optimizer, entry: Entry) -> moments.MomentPolicy | None:
    """Return how the moments of `entry` are stored; None: as the optimizer makes them."""
    engine = engine_of(entry)
    if not in_another_format(engine) and moments.torchao_format(optimizer) is None:
        return None
    return moments.moment_policy(optimizer, engine.recipe, entry.flat)


def engine_of(entry: Entry) -> Engine:
    engine = engine_of_entry(entry)
    assert engine is not None
    return engine


#: States that were created for a load: {entry: {key: state}}.
Made = dict[Entry, dict[str, torch.Tensor]]


class OptimizerParts(HeldParts):
    """The states that an optimizer keeps for each element of its parameters.

    Attributes:
        made: states that were created for a load, and are not in the optimizer yet.
        error: the first error of a read or a write. It is kept for the end: raising at once would
            leave the other ranks waiting.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._owned: dict[int, Owned] | None = None
        self.made: Made = {}
        self.error: str | None = None

    def held(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        if (whole := self.owned(entry)) is None:
            return entry.owned(position)
        return (0, entry.slot.numel) if whole.at(position) else (0, 0)

    def accounted(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        if (whole := self.owned(entry)) is None:
            return entry.accounted(position)
        return (0, entry.slot.numel) if whole.counts(position) else (0, 0)

    def accounting(self, entry: Entry, x: int, y: int) -> Iterable[int]:
        if self.owned(entry) is None:
            return super().accounting(entry, x, y)
        return range(entry.flat.group.size)

    def shape(self, entry: Entry) -> tuple[int, ...]:
        whole = self.owned(entry)
        return tuple(entry.param.shape) if whole is None else whole.matrix.shape

    def owned(self, entry: Entry) -> Owned | None:
        """Return how the optimizer steps `entry` whole; None if it does not."""
        if self._owned is None:
            self._owned = owned_by(self.optimizer)
        return self._owned.get(id(entry.param))

    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor | OnDisk:
        value = self._states(entry)[key]
        if self.owned(entry) is not None:
            return value.detach().reshape(-1)[x:y]
        return entry.flat.storage.elements(entry, key, value, x, y)

    def read(self, item: StateItem, entry: Entry, x: int, y: int) -> torch.Tensor:
        with self.keeping_errors():
            return self._values(entry, item.key, x, y).to(item.dtype)
        return torch.zeros(y - x, dtype=item.dtype, device="cpu")

    def write(self, item: StateItem, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        """Write into states that `create` has made: values as they are, rounded, or packed. If they
        are packed, x is at a block boundary.
        """
        if self.error is None:
            with self.keeping_errors():
                if self.owned(entry) is not None:
                    if x < y:
                        self.made[entry][item.key].view(-1)[x:y].copy_(values)
                    return
                for key, new in self._stored(entry, item.key, x, values).items():
                    made = self.made[entry][key]
                    entry.flat.storage.overwrite(entry, key, made, x, y, new)

    def create(self, item: StateItem) -> None:
        """Create this rank's states for a load of `item`, in memory or on NVMe. They have the dtype
        of the master weights, as torch's own load gives it to states.
        """
        entry = item.entry
        with self.keeping_errors():
            master = entry.flat.dtypes.master
            dtype = master if master.is_floating_point else item.dtype
            for key, kind in self.kinds(entry, item.key, dtype).items():
                self.create_one(entry, key, kind)

    def create_one(self, entry: Entry, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Create this rank's state `key` of `entry` where the step keeps it. On ranks that do not
        own a matrix it has no elements, and is not the optimizer's.
        """
        if (whole := self.owned(entry)) is not None:
            shape, device = whole.matrix.shape if whole.mine else (0,), entry.param.device
            made = torch.zeros(shape, dtype=dtype, device=device)
            if whole.mine:
                self.made.setdefault(entry, {})[key] = made
            return made
        how = moment_policy(self.optimizer, entry)
        small = how.small(entry) if how is not None else entry.param.dim() == 0
        made = entry.flat.storage.new_state(entry, key, dtype, in_memory=small)
        self.made.setdefault(entry, {})[key] = made
        return made

    def _states(self, entry: Entry) -> Mapping[str, Any]:
        return self.made.get(entry) or self.optimizer.state.get(entry.param) or {}

    def _values(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        """Return elements [x, y) of the state `key`, unpacked. Then x is at a block boundary."""
        there = self._states(entry)
        names = [key] if key in there else [n for n in there if _is_part(n, key)]
        found = {name: in_memory(self.place(entry, name, x, y)) for name in names}
        if key in found:
            return found[key]
        how = moment_policy(self.optimizer, entry)
        assert how is not None
        return moments.unpacked(how, found, key, y - x)

    def kinds(self, entry: Entry, key: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return {key: dtype} of what is stored for the state `key`."""
        how = moment_policy(self.optimizer, entry) if key in SIGNED else None
        if how is None:
            return {key: dtype}
        format = how.of(entry)
        parts = {name: packed(name) for name in format.keys(key)}
        return {n: part.dtype if part is not None else format.dtype for n, part in parts.items()}

    def _stored(
        self, entry: Entry, key: str, x: int, values: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return `values`, the elements of the state `key` from x on, as they are stored."""
        how = moment_policy(self.optimizer, entry) if key in SIGNED else None
        if how is None or not how.of(entry).packed:
            return {key: values}
        values = values.to(entry.param.device, torch.float32)
        new = {
            name: torch.zeros(
                -(-values.numel() // grain_of(name)), dtype=kind, device=values.device
            )
            for name, kind in self.kinds(entry, key, values.dtype).items()
        }
        piece = moments.Piece(entry, x, values, values, new, {}, False)
        step = torch.zeros((), device="cpu")
        moments.pack(replace(how, seed=None), piece, key, values, step, again=True)
        return new

    @contextlib.contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Inside, an error is kept as `error`, to be told to the other ranks."""
        try:
            yield
        except Exception as error:
            self.error = self.error or f"{type(error).__name__}: {error}"


def placed(value: Any, param: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Return `value` on the device where the optimizer's kernel expects its step count."""
    if isinstance(value, torch.Tensor) and (group.get("fused") or group.get("capturable")):
        return value.to(param.device)
    return value


def _is_part(name: Any, key: str) -> bool:
    part = packed(name)
    return part is not None and part.key == key


# -- numbers ---------------------------------------------------------------------------------------


@dataclass
class Param:
    """A parameter of the whole state dict.

    Attributes:
        number: of its object in the optimizer.
        entry: None for a parameter that is not sharded.
    """

    number: int
    entry: Entry | None
    shape: tuple[int, ...]
    name: str = ""

    @property
    def whole(self) -> bool:
        """Whether it is no box of a global tensor."""
        return self.entry is None or self.entry.box is None or not self.entry.box.divided

    def item(self, key: str, dtype: torch.dtype) -> StateItem:
        assert self.entry is not None
        return StateItem(self.entry, key, dtype)


@dataclass
class Outline:
    """See this module.

    Attributes:
        groups: [[parameter, ...], ...].
        objects: the optimizer's parameters, by number.
        engines: the engines of these parameters.
        divided: whether any parameter is divided among ranks.
        special: whether this rank's state dict would differ from torch's for the unsharded model.
    """

    groups: list[list[Param]] = field(default_factory=list)
    objects: list[torch.Tensor] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    divided: bool = False
    special: bool = False

    @classmethod
    def of(cls, optimizer: Optimizer, among: Iterable[Engine] | None = None) -> Outline:
        """Return the outline of `optimizer`. If `among` is given, parameters of other engines count
        as not sharded.

        Raises:
            ValueError: its models are divided among different ranks.
        """
        known = {id(e.param): e for each in among or list(engines) for e in each.entries}
        out, found = cls(), dict[int, Engine]()
        for group in optimizer.param_groups:
            params: list[Param] = []
            for p in group["params"]:
                number = len(out.objects)
                out.objects.append(p)
                entry = known.get(id(p))
                engine = engine_of_entry(entry) if entry is not None else None
                if entry is None or engine is None:
                    params.append(Param(number, None, tuple(p.shape)))
                    continue
                found[id(engine)] = engine
                params.append(Param(number, entry, tuple(entry.shape), entry.name))
            out.groups.append(params)
        out.engines = list(found.values())
        entries = [param.entry for param in out.params if param.entry is not None]
        out.divided = any(e.flat.divided for e in entries)
        out.special = out.divided or any(
            e.flat.storage.on_disk or moment_policy(optimizer, e) is not None for e in entries
        )
        if len({tuple(sorted(engine.group.ranks)) for engine in out.engines}) > 1:
            raise ValueError(
                f"this {type(optimizer).__name__} steps parameters of models that are divided among"
                " different ranks, so that its state cannot be put together. Give each model an"
                " optimizer of its own, or use onefold.save and onefold.load."
            )
        return out

    @property
    def params(self) -> list[Param]:
        return [param for group in self.groups for param in group]

    @property
    def engine(self) -> Engine | None:
        """One of the engines, which represents all; None if no parameter is sharded."""
        return self.engines[0] if self.engines else None


# -- what the ranks hold ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnShape:
    """Placeholder for a state of an owner's that has a shape of its own: it moves by itself, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def own_shape(
    entry: Entry, whole: Owned, said: OwnShape, value: Any, everywhere: bool = False
) -> torch.Tensor | None:
    """Return a state of the owner's on the host of the first rank of the entry's holders (None on
    other ranks), or on every rank's. `value`: the owner's. Collective.
    """
    resources, group = engine_of(entry).resources, entry.flat.group
    (source,) = [p for p in range(group.size) if whole.counts(p)]
    wanting = [p for p in (range(group.size) if everywhere else [0]) if p != source]
    sends, recvs = [], []
    if group.rank == source:
        row = value.detach().reshape(-1).to(resources.device)
        sends = [(p, row) for p in wanting]
    elif group.rank in wanting:
        got = torch.empty(prod(said.shape), dtype=said.dtype, device=resources.device)
        recvs = [(source, got)]
    # Every rank calls it: messages are told apart by their count
    group.exchange(sends, recvs, _moving(entry), entry.flat.index, move="state").wait()
    if recvs:
        return got.cpu().view(said.shape)
    return value.detach().cpu().clone() if everywhere or group.rank == 0 else None


def _moving(entry: Entry) -> CollectiveContext:
    return state_context(engine_of(entry).resources, entry.flat.unit_name)


#: What a rank reports for one parameter: None if it accounts for none of the elements, {} if it has
#: no state, else {key: (dtype, None)} for an element-wise state, {key: (None, value)} for others.
Said = dict[Any, tuple[torch.dtype | None, Any]] | None


def described(optimizer: Optimizer, outline: Outline) -> tuple[list[Said], str | None]:
    """Return what this rank holds for each parameter, and a complaint if it has a state that cannot
    be combined. Parameters without elements that this rank accounts for are None.
    """
    states = [optimizer.state.get(p) or {} for p in outline.objects]
    parts = OptimizerParts(optimizer)
    odd = odd_keys(
        (parts.shape(p.entry), states[p.number]) for p in outline.params if p.entry is not None
    )
    said: list[Said] = []
    wrong: str | None = None
    for param in outline.params:
        entry, state = param.entry, states[param.number]
        if entry is None:
            said.append({key: (None, value) for key, value in state.items()} or None)
            continue
        a, b = parts.accounted(entry) if outline.divided else parts.held(entry)
        if a == b and entry.numel:
            said.append(None)
            continue
        found: dict[Any, Any] = {}
        how = moment_policy(optimizer, entry) if state else None
        for key, value in state.items():
            sort = sort_of(key, value, parts.shape(entry), odd)
            if (part := packed(key)) is not None:
                found.setdefault(part.key, (torch.float32, None))
            elif sort == "elements":
                dtype = value.dtype
                if how is not None and key in SIGNED:
                    dtype = torch.promote_types(dtype, entry.flat.dtypes.master)
                found[key] = dtype, None
            elif sort == "other" and parts.owned(entry) is not None and param.whole:
                found[key] = None, OwnShape(tuple(value.shape), value.dtype)
            elif sort == "other" and outline.divided:
                wrong = wrong or (
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)}"
                    f" for parameter {param.name!r}: neither one number nor one for each"
                    " element, so that the parts of several ranks cannot be put together."
                )
            else:
                tensor = isinstance(value, torch.Tensor)
                found[key] = None, value.detach().cpu().clone() if tensor else value
        said.append(found)
    return said, wrong


def agreed(call: str, outline: Outline, told: list[tuple[list[Said], str | None]]) -> list[Said]:
    """Return for each parameter what all ranks together hold. `told`: what `described` has returned
    on each rank.

    Raises:
        ValueError: on every rank, if the ranks' states cannot be combined.
    """
    wrong = next((complaint for _, complaint in told if complaint), None)
    if wrong is not None:
        raise ValueError(f"{call}: {wrong}")
    plan: list[Said] = []
    for at, param in enumerate(outline.params):
        found = [here for said, _ in told if (here := said[at]) is not None]
        kinds = [{key: dtype for key, (dtype, _) in here.items()} for here in found]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError(
                f"{call}: the ranks keep different states of parameter {param.name!r}"
                f" ({kinds[0]} and {next(k for k in kinds if k != kinds[0])}): an optimizer must"
                " step on all ranks alike."
            )
        plan.append(found[0] if found and found[0] else None)
    return plan
