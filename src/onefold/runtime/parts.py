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
    every rank's `read`   ──── `to_all` ───────────────────────────►   a whole flat buffer on every rank
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
| `full_params`, `parameter.onefold.gather()`, `unshard`       | `to_all`                       |
| `save`, `export`                                             | `accounted`                    |
| `load`                                                       | `place`, for what it reads     |

`to_first` and `from_first` move at most `CHUNK` elements at a time: a device never holds more of an
item than that. A host other than rank 0's holds only the elements of its own rank. All moves between
ranks are collective. Callers enter `disable_torch_function` and `torch.no_grad`: sharded parameters
would gather themselves otherwise.
"""  # fmt: skip

from __future__ import annotations

import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onefold.comm import CollectiveContext, StallError
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

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a state with an element for each of its
        parameter's.
        """
        return tuple(entry.param.shape)

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
    """The master weights, wherever they are stored. Callers of `write` and `values` wait for copies
    of masters first (`MasterAccess.about_to_write`), and call `Engine.make_stale` after `finish`.

    One flat buffer is open at a time: its masters in memory, decoded if they are stored encoded.
    Neighbouring items of a flat buffer therefore decode it once, and encode it once.

    Args:
        building: a flat buffer that is being built, and the tensor [owned] of its first values.
    """

    def __init__(self, building: tuple[Flat, torch.Tensor] | None = None) -> None:
        self._building = building is not None
        self._flat: Flat | None = None
        self._values: torch.Tensor | None = None
        if building is not None:
            self._flat, self._values = building
        self._written = False

    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor | OnDisk:
        self._open(entry.flat)
        if entry.flat.storage.encoded:
            return self._slice(entry, x, y)
        # A view of the parameter, whose version counter tells of the user's writes
        return entry.flat.storage.elements(entry, "", entry.param, x, y)

    def read(self, item: StateItem, entry: Entry, x: int, y: int) -> torch.Tensor:
        self._open(entry.flat)
        if self._values is None:
            return super().read(item, entry, x, y)
        return self._slice(entry, x, y).to(item.dtype)

    def write(self, item: StateItem, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        self._open(entry.flat)
        self._written = True
        if self._values is not None:
            self._slice(entry, x, y).copy_(values)
            return
        entry.flat.storage.overwrite(entry, "", entry.param.data, x, y, values)
        if entry.flat.unsharded:
            _count_write(entry)

    def target(self, entry: Entry) -> torch.Tensor | OnDisk:
        """Return where this rank's masters of `entry` are, to be overwritten before `finish`."""
        self._open(entry.flat)
        self._written = True
        if entry.flat.unsharded:
            _count_write(entry)
            return entry.param.data
        x, y = entry.owned()
        return self.place(entry, "", x, y) if self._values is None else self._slice(entry, x, y)

    def values(self, flat: Flat, device: torch.device) -> torch.Tensor:
        """Return all masters of `flat` on this rank, [owned], for writing: themselves, or a copy on
        `device` that `finish` stores.
        """
        self._open(flat, load=False)
        values = flat.storage.landing(device)
        if values is not flat.master:
            values.copy_(flat.storage.load())
        self._values, self._written = values, True
        return values

    def finish(self) -> None:
        flat, values, written = self._flat, self._values, self._written
        if self._building:
            return
        self._flat, self._values, self._written = None, None, False
        if flat is not None and written:
            if values is not None:
                flat.storage.store(values)
            else:
                flat.storage.renew()

    def _open(self, flat: Flat, load: bool = True) -> None:
        """Finish the flat buffer before, and open `flat`."""
        if flat is not self._flat:
            self.finish()
            self._flat = flat
            there = load and not (flat.unsharded or flat.storage.on_disk)
            self._values = flat.storage.load() if there else None

    def _slice(self, entry: Entry, x: int, y: int) -> torch.Tensor:
        first = entry.slot.start - entry.flat.owned[0]
        assert self._values is not None
        return self._values[first + x : first + y]


def _count_write(entry: Entry) -> None:
    """Count a write to an unsharded parameter, which autograd may have saved: a backward pass over
    the old values must raise.
    """
    torch.autograd.graph.increment_version(entry.param)


# -- moves between ranks ---------------------------------------------------------------------------


def to_first(
    resources: Resources, parts: HeldParts, item: StateItem, everywhere: bool = False
) -> torch.Tensor | None:
    """Return the item whole in rank 0's host memory; None on other ranks. Collective. If rank 0
    holds all elements (stage 0, one rank), nothing is sent.

    Args:
        everywhere: return it on every rank. Only if every rank holds all elements.
    """
    entry, whole, out = item.entry, None, None
    group, here = entry.flat.group, parts.held(entry, 0)
    if everywhere or group.rank == 0:
        whole = torch.zeros(entry.slot.shape, dtype=item.dtype, device="cpu")
        out = whole.view(-1)
    for x, y in _chunks(entry):
        mine = overlap(here, (x, y))
        if out is not None and mine[0] < mine[1]:
            out[slice(*mine)].copy_(parts.read(item, entry, *mine))
        if mine == (x, y) or group.alone:
            continue
        sends, recvs, landing = [], [], []
        for peer in parts.accounting(entry, x, y):
            a, b = overlap(parts.accounted(entry, peer), (x, y))
            if a == b or peer == 0 or overlap((a, b), here) == (a, b):
                continue
            if group.rank == 0:
                recvs.append((peer, _room(resources, item, b - a)))
                landing.append((a, b))
            elif group.rank == peer:
                part = parts.read(item, entry, a, b)
                sends.append((0, part.to(resources.device).contiguous()))
        _exchange(resources, entry, sends, recvs)
        for (a, b), (_, part) in zip(landing, recvs, strict=True):
            assert out is not None
            out[a:b].copy_(part)
    if item.box is None:
        return whole
    assert not everywhere, "no rank holds all of it"
    return _boxes_to_first(resources, item, item.box, whole)


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
        part = None
        sends, recvs = [], []
        if group.rank == 0:
            assert mine is not None
            if not group.alone:
                chunk = mine[x:y].to(resources.device, item.dtype)
                for peer in range(1, group.size):
                    i, j = overlap(parts.held(entry, peer), (x, y))
                    if i < j:
                        sends.append((peer, chunk[i - x : j - x]))
            part = mine[a:b]
        elif a < b and not group.alone:
            part = _room(resources, item, b - a)
            recvs.append((0, part))
        _exchange(resources, entry, sends, recvs)
        if a < b and part is not None:
            parts.write(item, entry, a, b, part.to(item.dtype))


def to_all(resources: Resources, parts: HeldParts, items: Sequence[StateItem]) -> torch.Tensor:
    """Return a whole flat buffer, [numel], that holds `items` on every rank. All are entries of one
    flat buffer, with one dtype; other addresses are zero. Collective.
    """
    flat = items[0].entry.flat
    full = torch.zeros(flat.layout.numel, dtype=items[0].dtype, device=resources.device)
    with disable_torch_function(), torch.no_grad():
        for item in items:
            entry, (a, b) = item.entry, parts.held(item.entry)
            if a < b:
                at = entry.slot.start
                full[at + a : at + b].copy_(parts.read(item, entry, a, b))
        if not flat.whole_master:
            context = state_context(resources, flat.unit_name)
            flat.owners_group.all_gather(full, context, flat.index, move="state").wait()
    return full


def whole_masters(resources: Resources, flat: Flat) -> torch.Tensor:
    """Return a new buffer, [numel], with the masters of all ranks. Collective."""
    dtype = flat.dtypes.master
    return to_all(resources, MasterParts(), [StateItem(e, "", dtype) for e in flat.entries])


def scatter_masters(
    resources: Resources, flat: Flat, full: torch.Tensor | None, master: torch.Tensor
) -> None:
    """Send each rank its part of `full` ([numel], master precision), which the first of its holders
    has (None elsewhere), into `master`, [owned]: the reverse of `whole_masters`, in one exchange.
    Collective.
    """
    group, context = flat.group, state_context(resources, flat.unit_name)
    with torch.no_grad():
        if group.rank == 0:
            assert full is not None
            others = range(1, 1 if group.alone else group.size)
            sends = [(p, full[slice(*flat.owned_by(p))]) for p in others]
            group.exchange(sends, [], context, flat.index, move="state").wait()
            master.copy_(full[flat.owned[0] : flat.owned[1]])
        else:
            group.exchange([], [(0, master)], context, flat.index, move="state").wait()


def rewrite_masters(resources: Resources, flat: Flat, full: torch.Tensor | None) -> None:
    """Replace the masters of every rank by rank 0's `full`. Collective. See `scatter_masters`."""
    landing = flat.storage.landing(resources.device)
    scatter_masters(resources, flat, full, landing)
    flat.storage.store(landing)


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
        head = group.exchange_control(
            torch.frombuffer(bytearray(struct.pack("<q", len(text))), dtype=torch.uint8),
            context,
            "call",
        )
        lengths = [struct.unpack("<q", bytes(part.tolist()))[0] for part in head]
        mine = torch.frombuffer(bytearray(text.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        parts = group.exchange_control(mine, context, "call")
    except StallError as error:
        raise StallError(
            f"{call} is a collective on this model: call it on every rank, at the same place."
            f" {error}"
        ) from None
    by_number = sorted(range(group.size), key=lambda position: group.ranks[position])
    said = [pickle.loads(bytes(parts[p][: lengths[p]].numpy())) for p in by_number]
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
    entry: Entry,
    sends: list[tuple[int, torch.Tensor]],
    recvs: list[tuple[int, torch.Tensor]],
) -> None:
    context = state_context(resources, entry.flat.unit_name)
    entry.flat.group.exchange(sends, recvs, context, entry.flat.index, move="state").wait()


# -- boxes -----------------------------------------------------------------------------------------


def _boxes_to_first(
    resources: Resources, item: StateItem, box: Box, local: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the global tensor in rank 0's host memory, from each box that the first rank of its
    holders has (`local`). None on other ranks. Collective.
    """
    group, entry = resources.group, item.entry
    context = state_context(resources, entry.flat.unit_name)
    if local is None:
        return None
    if group.rank != 0:
        sends = [(0, local.reshape(-1).to(resources.device))]
        group.exchange(sends, [], context, entry.flat.index, move="state").wait()
        return None
    # One exchange for all: messages of one rank to several others are counted together
    others = [p for p in box.firsts(group.ranks) if p]
    whole = torch.zeros(item.shape, dtype=item.dtype, device="cpu")
    places = {p: box.part(whole, group.ranks[p]) for p in [0, *others]}
    recvs = [(p, _room(resources, item, places[p].numel())) for p in others]
    group.exchange([], recvs, context, entry.flat.index, move="state").wait()
    for p, part in [(0, local), *recvs]:
        places[p].copy_(part.reshape(places[p].shape))
    return whole


def boxes_from_first(
    resources: Resources, item: StateItem, box: Box, whole: torch.Tensor | None
) -> torch.Tensor | None:
    """Return this rank's box of rank 0's global tensor, on the first rank of its holders; None on
    other ranks. Collective.
    """
    group, entry = resources.group, item.entry
    context = state_context(resources, entry.flat.unit_name)
    if group.rank == 0:
        assert whole is not None
        whole = whole.reshape(item.shape)
        sends = [
            (p, box.part(whole, group.ranks[p]).reshape(-1).to(resources.device, item.dtype))
            for p in box.firsts(group.ranks)
            if p
        ]
        group.exchange(sends, [], context, entry.flat.index, move="state").wait()
        return box.part(whole, group.ranks[0]).reshape(box.local_shape)
    if entry.flat.group.rank != 0:
        return None
    mine = _room(resources, item, box.numel)
    group.exchange([], [(0, mine)], context, entry.flat.index, move="state").wait()
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
