"""Parts and wholes: the one path between what each rank holds and what users see whole.

An item is a tensor as users know it: the master weights of a parameter, or one state that an
optimizer keeps for it. Each rank holds elements [x, y) of an item, on some tier and in some format.
A `HeldParts` reads them (a source) and writes them (a sink). The moves below do the rest, so their
callers know no tiers or formats.

    item            0 ............................ numel      a state dict has it; (name, key, dtype, shape)
    accounted       [ rank 0 ][   rank 1  ][ rank 2 ]         exactly one rank accounts for each element
    owned           [ rank 0 ][   rank 1  ][ rank 2 ]         divided: the same
                    [          every rank           ]         replicated (stage 0): more than it accounts for

    source                      move                                   sink or target
    every rank's `read`   ──── `to_first`  ────────────────────────►   rank 0's host, one item at a time
    rank 0's whole        ──── `from_first` ───────────────────────►   every rank's `write`
    masters of all ranks  ──── `whole_masters` ────────────────────►   a whole flat buffer on every rank
    this rank's `values`  ──── (no traffic) ───────────────────────►   this rank's file

| parts             | file                      | items                                                                |
|-------------------|---------------------------|----------------------------------------------------------------------|
| `MasterParts`     | here                      | master weights: on the device, the host, NVMe; encoded; of one rank  |
| `OptimizerParts`  | optim/states.py      | states of an optimizer: also packed, in 16 bits, on NVMe             |
| `AverageParts`    | ema.py                    | averages of weights                                                  |

A parameter may be a box of a global tensor (runtime/boxes.py). Its holders make their box whole on
their first rank, and these exchange boxes with rank 0:

    rank 0's global tensor   ◄──── boxes ────►   the first rank of each box's holders   ◄──── as above ────►   parts

| caller                                                       | moves                          |
|--------------------------------------------------------------|--------------------------------|
| `full_state_dict`, `EMA.state_dict`, `optimizer.state_dict`, `export` | `to_first`            |
| `load_full_state_dict`, `EMA.load_state_dict`, `optimizer.load_state_dict`, `shard` | `from_first` |
| `full_params`, `parameter.onefold.gather()`, `unshard`, `stream_params` | `whole_masters`     |
| leaving `full_params(write=True)`                            | `within_holders`               |
| `save`                                                       | `values`                       |
| `load`                                                       | `write`, of what it reads      |

`to_first` and `from_first` move at most `CHUNK` elements at a time: a device never holds more of an
item than that. A host other than rank 0's holds only the elements of its own rank. All moves between
ranks are collective. Callers enter `disable_torch_function` and `torch.no_grad`: sharded parameters
would gather themselves otherwise.
"""  # fmt: skip

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from onefold.comm import Group, StallError
from onefold.layout import overlap
from onefold.recipe.moments import BLOCK
from onefold.runtime.boxes import Box
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.interval import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

_T = TypeVar("_T")
#: Elements moved at a time; a multiple of BLOCK, so that blocks of packed moments stay whole.
CHUNK = 8 << 20
assert not CHUNK % BLOCK


# -- items -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateItem:
    """A tensor as users know it.

    Attributes:
        key: "" for the master weights, else the key of the optimizer's state.
        dtype: the dtype of the whole.
        own: the shape of a state that has another one than its parameter. A rank has all of it or
            nothing.
    """

    entry: Entry
    key: str
    dtype: torch.dtype
    own: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The parameter's first name."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole; of a box, that of the global tensor."""
        return self.entry.shape if self.own is None else self.own

    def part(self, held: tuple[int, int]) -> tuple[int, int]:
        """Return the elements that a rank has which has these of the parameter."""
        return held if self.own is None else (0, prod(self.own) * (held[0] < held[1]))

    @property
    def box(self) -> Box | None:
        """What this rank's holders hold of it, if they hold a part only."""
        box = self.entry.box
        return box if box is not None and box.divided else None


def master_items(entries: Iterable[Entry]) -> list[StateItem]:
    """Return the items of the master weights of `entries`."""
    return [StateItem(entry, "", entry.flat.dtypes.master) for entry in entries]


# -- sources and sinks -----------------------------------------------------------------------------


class HeldParts(ABC):
    """This rank's parts of some items: a source, and a sink. Elements [x, y) are counted from the
    first of their entry; this rank must hold them.
    """

    def held(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        """Return the elements that this rank (or that at `position`) reads and writes."""
        return entry.owned(position)

    def accounted(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        """Return those of them that this rank (or that at `position`) accounts for. Exactly one rank
        accounts for each element.
        """
        return entry.accounted(position)

    @abstractmethod
    def values(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        """Return the elements, [y - x], on any device: a view of them where they are in memory."""

    def read(self, item: StateItem, x: int, y: int) -> torch.Tensor:
        """Return the elements, [y - x], in the item's dtype on any device."""
        return self.values(item.entry, item.key, x, y).to(item.dtype)

    @abstractmethod
    def write(self, item: StateItem, x: int, y: int, values: torch.Tensor) -> None:
        """Overwrite the elements by `values`, [y - x], in the item's dtype on any device."""


class MasterParts(HeldParts):
    """The master weights, wherever they are stored. Callers of `write` wait for copies of masters
    first (`Engine.about_to_write`), and call `Engine.make_stale` after `finish`.

    One flat buffer is open at a time, decoded if its masters are stored encoded. Neighbouring items
    of a flat buffer therefore decode it once, and encode it once.

    Args:
        building: a flat buffer that is being built, with the tensor [owned] of its first values.
    """

    def __init__(self, building: Mapping[Flat, torch.Tensor] | None = None) -> None:
        # The open one, with its values; None if they are read and written in their place
        self._open: dict[Flat, torch.Tensor | None] = dict(building or {})
        self._written = False

    def values(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor:
        here = self.here(entry, x, y)
        # A view of the parameter, whose version counter tells of the user's writes
        return entry.flat.storage.read(entry, "", entry.param, x, y) if here is None else here

    def write(self, item: StateItem, x: int, y: int, values: torch.Tensor) -> None:
        entry = item.entry
        here, self._written = self.here(entry, x, y), True
        if here is not None:
            here.copy_(values)
        else:  # in place: a backward pass over the old values of an unsharded parameter must raise
            entry.flat.storage.write(entry, "", entry.param, x, y, values)

    def finish(self) -> None:
        """Bring up to date what is made of the elements. Called after the last `write`."""
        written, self._written = self._written, False
        while self._open:
            flat, values = self._open.popitem()
            if written and values is None:
                flat.storage.renew()
            elif written and values is not None:
                flat.storage.store(values)

    def here(self, entry: Entry, x: int, y: int) -> torch.Tensor | None:
        """Open the flat buffer of `entry`. Return the elements if they are in a buffer of their own."""
        flat = entry.flat
        if flat not in self._open:
            self.finish()
            self._open[flat] = flat.storage.decoded()
        values = self._open[flat]
        return None if values is None else values[entry.among_owned((x, y))]


# -- moves between ranks ---------------------------------------------------------------------------


def to_first(engine: Engine, parts: HeldParts, item: StateItem) -> torch.Tensor | None:
    """Return the item whole in rank 0's host memory; None on other ranks. Collective. If rank 0
    holds all elements (stage 0, one rank), nothing is sent.
    """
    whole, box, group = _to_first_holder(engine, parts, item), item.box, engine.group
    if box is None:
        return whole
    every, places = None, dict[int, torch.Tensor]()
    if group.rank == 0:
        assert whole is not None
        every = torch.zeros(item.shape, dtype=item.dtype, device="cpu")
        places = box.parts(every, group.ranks)
        own = places.pop(0)
        own.copy_(whole.view(own.shape))
        whole = None
    # On every rank, if only to send nothing: on NCCL an exchange is an operation of all ranks
    _exchange(engine, group, item, {} if whole is None else {0: whole}, places)
    return every


def _to_first_holder(engine: Engine, parts: HeldParts, item: StateItem) -> torch.Tensor | None:
    """Do the same among the holders, whose first gets their box of the item."""
    entry, group = item.entry, item.entry.flat.group
    here, first = item.part(parts.held(entry, 0)), group.rank == 0
    whole = own_whole(parts, item) if first else None
    for x, y in _chunks(item):
        if overlap(here, (x, y)) == (x, y) or group.alone:
            continue
        places, mine = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for peer in range(1, group.size) if first else (group.rank,):
            a, b = overlap(item.part(parts.accounted(entry, peer)), (x, y))
            if a == b or overlap((a, b), here) == (a, b):
                continue
            if whole is not None:
                places[peer] = whole.view(-1)[a:b]
            else:
                mine[0] = parts.read(item, a, b)
        _exchange(engine, group, item, mine, places)
    return whole


def own_whole(parts: HeldParts, item: StateItem) -> torch.Tensor:
    """Return a tensor of the item's shape on the host, with the elements that this rank holds. Others
    are undefined. Local.
    """
    shape = item.entry.slot.shape if item.own is None else item.own
    whole = torch.empty(shape, dtype=item.dtype, device="cpu")
    for x, y in _chunks(item):
        a, b = overlap(item.part(parts.held(item.entry)), (x, y))
        if a < b:
            whole.view(-1)[a:b].copy_(parts.read(item, a, b))
    return whole


def from_first(
    engine: Engine, parts: HeldParts, item: StateItem, whole: torch.Tensor | None
) -> None:
    """Write rank 0's `whole` (any shape and device; None on other ranks) into the parts of all
    ranks. Collective.
    """
    box, group = item.box, engine.group
    if box is not None:
        places, came = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        if group.rank == 0:
            assert whole is not None
            places = box.parts(whole.reshape(item.shape), group.ranks)
            whole = places.pop(0)
        elif item.entry.flat.group.rank == 0:
            whole = came[0] = torch.empty(box.numel, dtype=item.dtype, device="cpu")
        _exchange(engine, group, item, places, came)
    within_holders(engine, parts, item, whole)


def within_holders(
    engine: Engine, parts: HeldParts, item: StateItem, whole: torch.Tensor | None
) -> None:
    """Do the same from the first rank of the holders, whose `whole` is their box of the item."""
    entry, group = item.entry, item.entry.flat.group
    row = whole.reshape(-1) if group.rank == 0 and whole is not None else None
    for x, y in _chunks(item):
        a, b = overlap(parts.held(entry), (x, y))
        part, sends, came = None, dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        if row is not None:
            part = row[a:b]
            for peer in range(1, group.size) if not group.alone else ():
                sends[peer] = row[slice(*overlap(parts.held(entry, peer), (x, y)))]
        elif group.rank and not group.alone:
            part = came[0] = torch.empty(b - a, dtype=item.dtype, device=engine.device)
        _exchange(engine, group, item, sends, came)
        if a < b and part is not None:
            parts.write(item, a, b, part.to(item.dtype))


def whole_masters(engine: Engine, flat: Flat, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a new buffer, [numel], with the masters of all ranks, in `dtype` (None: their own);
    other addresses are zero. Collective.
    """
    dtype = dtype or flat.dtypes.master
    full = torch.zeros(flat.layout.numel, dtype=dtype, device=engine.device)
    parts = MasterParts()
    with disable_torch_function(), torch.no_grad():
        for item in master_items(flat.entries):
            entry, (a, b) = item.entry, item.entry.owned()
            if a < b:
                at = entry.slot.start
                full[at + a : at + b].copy_(parts.read(item, a, b))
        if not flat.whole_master:
            context = engine.state_context(flat.unit_name)
            flat.owners_group.all_gather(full, context, flat.index).wait()
    return full


def tell_all(engine: Engine, call: str, value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. `call` is the user's call, for messages.
    Collective.

    Raises:
        StallError: another rank did not call it in time.
        RuntimeError: another rank has called something else.
    """
    group = engine.group
    context = engine.context("control", f"({call}, which every rank must call)", "state")
    try:
        told = group.tell((call, value), context, "call")
    except StallError as error:
        raise StallError(
            f"{call} is a collective on this model: call it on every rank, at the same place."
            f" {error}"
        ) from None
    said = dict(sorted(zip(group.ranks, told, strict=True)))
    other = next((rank for rank, (name, _) in said.items() if name != call), None)
    if other is not None:
        raise RuntimeError(
            f"rank {group.ranks[group.rank]} called {call} while rank {other} called"
            f" {said[other][0]}: every rank must call the same, in the same order."
        )
    return [value for _, value in said.values()]


def said_by_first(engine: Engine, call: str, ask: Callable[[], _T]) -> _T:
    """Return what `ask` returns on rank 0, which alone calls it, on every rank. Collective.

    Raises:
        ValueError: on every rank, if it raises on rank 0.
    """
    value: Any = None
    wrong = None
    if engine.rank == 0:
        try:
            value = ask()
        except Exception as error:  # not raised yet: the other ranks wait to be told
            known = isinstance(error, ValueError)
            wrong = str(error) if known else f"{type(error).__name__}: {error}"
    value, wrong = tell_all(engine, call, (value, wrong))[0]
    if wrong is not None:
        raise ValueError(f"{call}: {wrong}")
    return value


def _chunks(item: StateItem) -> list[tuple[int, int]]:
    _, numel = item.part((0, item.entry.slot.numel))
    return [(x, min(x + CHUNK, numel)) for x in range(0, numel, CHUNK)]


def _exchange(
    engine: Engine,
    group: Group,
    item: StateItem,
    sends: Mapping[int, torch.Tensor],
    places: Mapping[int, torch.Tensor],
) -> None:
    """Send each tensor to the rank at its position in `group`, and copy into each of `places` what
    comes from the rank at its position.
    """
    flat, device, dtype = item.entry.flat, engine.device, item.dtype
    out = [(p, t.reshape(-1).to(device, dtype)) for p, t in sends.items()]
    came = [
        (p, torch.empty(place.numel(), dtype=dtype, device=device)) for p, place in places.items()
    ]
    context = engine.state_context(flat.unit_name)
    group.exchange(out, came, context, flat.index).wait()
    for p, values in came:
        places[p].copy_(values.view(places[p].shape))
