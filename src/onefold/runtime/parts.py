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
    a whole on each rank  ──── `from_own` (no traffic) ────────────►   this rank's `write`
    this rank's `place`   ──── `accounted` (no traffic) ───────────►   this rank's file

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
| `full_state_dict`, `EMA.state_dict`, `optimizer.state_dict`  | `to_first`                     |
| `load_full_state_dict`, `EMA.load_state_dict`, `shard`       | `from_first`                   |
| `optimizer.load_state_dict`                                  | `from_first`, or `from_own`    |
| `full_params`, `parameter.onefold.gather()`, `unshard`       | `whole_masters`                |
| leaving `full_params(write=True)`                            | `within_holders`               |
| `save`, `export`                                             | `accounted`                    |
| `load`                                                       | `place`, for what it reads     |

`to_first` and `from_first` move at most `CHUNK` elements at a time: a device never holds more of an
item than that. A host other than rank 0's holds only the elements of its own rank. All moves between
ranks are collective. Callers enter `disable_torch_function` and `torch.no_grad`: sharded parameters
would gather themselves otherwise.
"""  # fmt: skip

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onefold.comm import CollectiveContext, Group, StallError
from onefold.layout import overlap
from onefold.recipe.moments import BLOCK
from onefold.runtime.boxes import Box
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.gather_paths import state_context
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.runtime.resources import Resources
from onefold.runtime.storage import OnDisk, in_memory

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
    """

    entry: Entry
    key: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The parameter's first name."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole; of a box, that of the global tensor."""
        return self.entry.shape

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

    def accounting(self, entry: Entry, x: int, y: int) -> Iterable[int]:
        """Return the positions of ranks that may account for some of elements [x, y)."""
        return _owners(entry, x, y)

    @abstractmethod
    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor | OnDisk:
        """Return where the elements are: [y - x], in memory or on disk. A packed state has items
        that stand for some elements each.
        """

    def read(self, item: StateItem, entry: Entry, x: int, y: int) -> torch.Tensor:
        """Return the elements, [y - x], in the item's dtype on any device."""
        return in_memory(self.place(entry, item.key, x, y)).to(item.dtype)

    @abstractmethod
    def write(self, item: StateItem, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        """Overwrite the elements by `values`, [y - x], in the item's dtype on any device."""

    def finish(self) -> None:
        """Bring up to date what is made of the elements. Called after the last `write`."""


class MasterParts(HeldParts):
    """The master weights, wherever they are stored. Callers of `write` and `target` wait for copies
    of masters first (`MasterAccess.about_to_write`), and call `Engine.make_stale` after `finish`.

    One flat buffer is open at a time: its masters in memory, decoded if they are stored encoded.
    Neighbouring items of a flat buffer therefore decode it once, and encode it once.

    Args:
        building: a flat buffer that is being built, and the tensor [owned] of its first values.
    """

    def __init__(self, building: tuple[Flat, torch.Tensor] | None = None) -> None:
        self._flat: Flat | None = None
        self._values: torch.Tensor | None = None  # None: they are on disk, or in no buffer
        if building is not None:
            self._flat, self._values = building
        self._written = False

    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor | OnDisk:
        here = self.here(entry, x, y)
        if here is not None and entry.flat.storage.encoded:
            return here
        # A view of the parameter, whose version counter tells of the user's writes
        return entry.flat.storage.elements(entry, "", entry.param, x, y)

    def read(self, item: StateItem, entry: Entry, x: int, y: int) -> torch.Tensor:
        here = self.here(entry, x, y)
        return super().read(item, entry, x, y) if here is None else here.to(item.dtype)

    def write(self, item: StateItem, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        here, self._written = self.here(entry, x, y), True
        if here is not None:
            here.copy_(values)
        else:  # in place: a backward pass over the old values of an unsharded parameter must raise
            entry.flat.storage.overwrite(entry, "", entry.param, x, y, values)

    def target(self, entry: Entry) -> torch.Tensor | OnDisk:
        """Return where this rank's masters of `entry` are, to be overwritten before `finish`."""
        here, self._written = self.here(entry, *entry.owned()), True
        if here is not None:
            return here
        if entry.flat.storage.on_disk:
            return self.place(entry, "", *entry.owned())
        torch.autograd.graph.increment_version(entry.param)
        return entry.param.data

    def finish(self) -> None:
        flat, values, written = self._flat, self._values, self._written
        self._flat, self._values, self._written = None, None, False
        if flat is not None and written and values is not None:
            flat.storage.store(values)
        elif flat is not None and written:
            flat.storage.renew()

    def here(self, entry: Entry, x: int, y: int) -> torch.Tensor | None:
        """Open the flat buffer of `entry`. Return the elements if they are in memory, in a buffer."""
        flat = entry.flat
        if flat is not self._flat:
            self.finish()
            self._flat = flat
            there = not (flat.unsharded or flat.storage.on_disk)
            self._values = flat.storage.load() if there else None
        first = entry.slot.start - flat.owned[0]
        return None if self._values is None else self._values[first + x : first + y]


# -- moves between ranks ---------------------------------------------------------------------------


def to_first(resources: Resources, parts: HeldParts, item: StateItem) -> torch.Tensor | None:
    """Return the item whole in rank 0's host memory; None on other ranks. Collective. If rank 0
    holds all elements (stage 0, one rank), nothing is sent.
    """
    entry, group = item.entry, item.entry.flat.group
    here = parts.held(entry, 0)
    whole = own_whole(parts, item) if group.rank == 0 else None
    for x, y in _chunks(entry):
        if overlap(here, (x, y)) == (x, y) or group.alone:
            continue
        sends, recvs, landing = [], [], []
        for peer in parts.accounting(entry, x, y):
            a, b = overlap(parts.accounted(entry, peer), (x, y))
            if a == b or peer == 0 or overlap((a, b), here) == (a, b):
                continue
            if whole is not None:
                recvs.append((peer, _room(resources, item, b - a)))
                landing.append(whole.view(-1)[a:b])
            elif group.rank == peer:
                part = parts.read(item, entry, a, b)
                sends.append((0, part.to(resources.device).contiguous()))
        _exchange(resources, group, item, sends, recvs)
        for place, (_, part) in zip(landing, recvs, strict=True):
            place.copy_(part)
    return whole if item.box is None else _boxes_to_first(resources, item, item.box, whole)


def own_whole(parts: HeldParts, item: StateItem) -> torch.Tensor:
    """Return a tensor of the item's shape on the host, with the elements that this rank holds. Local."""
    whole = torch.zeros(item.entry.slot.shape, dtype=item.dtype, device="cpu")
    for x, y in _chunks(item.entry):
        a, b = overlap(parts.held(item.entry), (x, y))
        if a < b:
            whole.view(-1)[a:b].copy_(parts.read(item, item.entry, a, b))
    return whole


def from_first(
    resources: Resources, parts: HeldParts, item: StateItem, whole: torch.Tensor | None
) -> None:
    """Write rank 0's `whole` (any shape and device; None on other ranks) into the parts of all
    ranks. Collective.
    """
    if item.box is not None:
        whole = boxes_from_first(resources, item, item.box, whole)
    within_holders(resources, parts, item, whole)


def within_holders(
    resources: Resources, parts: HeldParts, item: StateItem, whole: torch.Tensor | None
) -> None:
    """Do the same from the first rank of the holders, whose `whole` is their box of the item."""
    entry, group = item.entry, item.entry.flat.group
    mine = whole.reshape(-1) if group.rank == 0 and whole is not None else None
    for x, y in _chunks(entry):
        a, b = overlap(parts.held(entry), (x, y))
        part, sends, recvs = None, [], []
        if mine is not None:
            part = mine[a:b]
            chunk = mine[x:y] if group.alone else mine[x:y].to(resources.device, item.dtype)
            for peer in () if group.alone else range(1, group.size):
                i, j = overlap(parts.held(entry, peer), (x, y))
                if i < j:
                    sends.append((peer, chunk[i - x : j - x]))
        elif a < b and not group.alone:
            part = _room(resources, item, b - a)
            recvs.append((0, part))
        _exchange(resources, group, item, sends, recvs)
        if a < b and part is not None:
            parts.write(item, entry, a, b, part.to(item.dtype))


def whole_masters(resources: Resources, flat: Flat) -> torch.Tensor:
    """Return a new buffer, [numel], with the masters of all ranks; other addresses are zero.
    Collective.
    """
    full = torch.zeros(flat.layout.numel, dtype=flat.dtypes.master, device=resources.device)
    parts = MasterParts()
    with disable_torch_function(), torch.no_grad():
        for item in master_items(flat.entries):
            entry, (a, b) = item.entry, item.entry.owned()
            if a < b:
                at = entry.slot.start
                full[at + a : at + b].copy_(parts.read(item, entry, a, b))
        if not flat.whole_master:
            context = state_context(resources, flat.unit_name)
            flat.owners_group.all_gather(full, context, flat.index, move="state").wait()
    return full


def rewrite_masters(resources: Resources, flat: Flat, full: torch.Tensor) -> None:
    """Replace the masters of every rank by `full`, [numel], of the first of its holders: the reverse
    of `whole_masters`. Collective.
    """
    parts = MasterParts()
    for item in master_items(flat.entries):
        within_holders(resources, parts, item, flat.view(full, item.entry))
    parts.finish()


def tell_all(resources: Resources, call: str, value: Any) -> list[Any]:
    """Return every rank's `value`, in rank order. `call` is the user's call, for messages.
    Collective.

    Raises:
        StallError: another rank did not call it in time.
        RuntimeError: another rank has called something else.
    """
    group = resources.group
    if group.alone:
        return [value]
    text = pickle.dumps((call, value))
    context = CollectiveContext(
        "control", f"({call}, which every rank must call)", resources.progress.step_count, "state"
    )
    try:
        length = torch.tensor([len(text)], device="cpu").view(torch.uint8)
        lengths = group.exchange_control(length, context, "call")
        longest = max(int(part.view(torch.int64)) for part in lengths)
        mine = torch.frombuffer(bytearray(text.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = group.exchange_control(mine, context, "call")
    except StallError as error:
        raise StallError(
            f"{call} is a collective on this model: call it on every rank, at the same place."
            f" {error}"
        ) from None
    by_number = sorted(range(group.size), key=lambda position: group.ranks[position])
    said = [pickle.loads(bytes(parts[p].numpy())) for p in by_number]  # stops before the zeros
    other = next((rank for rank, (name, _) in enumerate(said) if name != call), None)
    if other is not None:
        raise RuntimeError(
            f"rank {group.ranks[group.rank]} called {call} while rank {sorted(group.ranks)[other]}"
            f" called {said[other][0]}: every rank must call the same, in the same order."
        )
    return [value for _, value in said]


def _chunks(entry: Entry) -> list[tuple[int, int]]:
    numel = entry.slot.numel
    return [(x, min(x + CHUNK, numel)) for x in range(0, numel, CHUNK)]


def _owners(entry: Entry, x: int, y: int) -> range:
    """Return the positions of the ranks whose intervals have some of elements [x, y)."""
    each = entry.flat.layout.shard_numel
    return range((entry.slot.start + x) // each, (entry.slot.start + y - 1) // each + 1)


def _room(resources: Resources, item: StateItem, numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=item.dtype, device=resources.device)


def _exchange(
    resources: Resources,
    group: Group,
    item: StateItem,
    sends: list[tuple[int, torch.Tensor]],
    recvs: list[tuple[int, torch.Tensor]],
) -> None:
    flat = item.entry.flat
    context = state_context(resources, flat.unit_name)
    group.exchange(sends, recvs, context, flat.index, move="state").wait()


# -- boxes -----------------------------------------------------------------------------------------


def _boxes_to_first(
    resources: Resources, item: StateItem, box: Box, local: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the global tensor in rank 0's host memory, from each box that the first rank of its
    holders has (`local`). None on other ranks. Collective.
    """
    group = resources.group
    if local is None:
        return None
    if group.rank != 0:
        sends = [(0, local.reshape(-1).to(resources.device))]
        _exchange(resources, group, item, sends, [])
        return None
    # One exchange for all: messages of one rank to several others are counted together
    others = [p for p in box.firsts(group.ranks) if p]
    whole = torch.zeros(item.shape, dtype=item.dtype, device="cpu")
    places = {p: box.part(whole, group.ranks[p]) for p in [0, *others]}
    recvs = [(p, _room(resources, item, places[p].numel())) for p in others]
    _exchange(resources, group, item, [], recvs)
    for p, part in [(0, local), *recvs]:
        places[p].copy_(part.reshape(places[p].shape))
    return whole


def boxes_from_first(
    resources: Resources, item: StateItem, box: Box, whole: torch.Tensor | None
) -> torch.Tensor | None:
    """Return this rank's box of rank 0's global tensor, on the first rank of its holders; None on
    other ranks. Collective.
    """
    group = resources.group
    if group.rank == 0:
        assert whole is not None
        whole = whole.reshape(item.shape)
        sends = [
            (p, box.part(whole, group.ranks[p]).reshape(-1).to(resources.device, item.dtype))
            for p in box.firsts(group.ranks)
            if p
        ]
        _exchange(resources, group, item, sends, [])
        return box.part(whole, group.ranks[0]).reshape(box.local_shape)
    if item.entry.flat.group.rank != 0:
        return None
    mine = _room(resources, item, box.numel)
    _exchange(resources, group, item, [], [(0, mine)])
    return mine.view(box.local_shape)


# -- moves on one rank -----------------------------------------------------------------------------


def from_own(parts: HeldParts, item: StateItem, whole: torch.Tensor) -> None:
    """Write the elements of `whole` (any shape and device) that this rank holds. Local."""
    if item.box is not None:
        whole = item.box.part(whole.reshape(item.shape))
    a, b = parts.held(item.entry)
    parts.write(item, item.entry, a, b, whole.reshape(-1)[a:b].to(item.dtype))


class Accounted(NamedTuple):
    """Elements [start, stop) of an item of `shape` (in items that stand for elements, for a packed
    state), which this rank accounts for.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    place: torch.Tensor | OnDisk

    def pieces(self) -> Iterable[torch.Tensor]:
        """Return the elements in order, in tensors that fit into memory."""
        if isinstance(self.place, OnDisk):
            return self.place.pieces()
        return [self.place] if self.place.numel() else []


def accounted(parts: HeldParts, entry: Entry, key: str = "") -> Accounted:
    """Return what this rank accounts for of a parameter or of its state `key`, for its file. Local.
    All ranks together account for each element once.
    """
    start, stop = parts.accounted(entry)
    return Accounted(*entry.outside(start, stop, key), parts.place(entry, key, start, stop))
