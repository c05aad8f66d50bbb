"""`ShardSpec`: every size of one flat buffer on one rank, in integers. The runtime allocates and
sends by these sizes; the plan adds them up.

Six ranks in groups of three, the buffer of one unit, seen by the rank at position 2:

    position   |    0    |    1    |    2    |    3    |    4    |    5    |
    whole      [===========================================================)   what the unit computes with
    shard                          [===================)                       this rank's part in its group
    interval                       [=========)                                 this rank's part among all

    gathers      interval ── inter-group ──► shard ── intra-group ──► whole    without groups: one hop over all ranks
    reductions   whole ── intra-group ──► shard ── inter-group ──► interval    then back, if other ranks hold the sums too

| kind of memory                 | elements or bytes                                  | property                  |
|--------------------------------|----------------------------------------------------|---------------------------|
| masters of this rank           | whole, shard or interval, by the optimizer's row   | `owned`, `own`            |
| cached shard, gathered from    | e·interval, or e·shard with a second copy          | `cached_bytes`            |
| resident parameters            | whole                                              | `resident`                |
| offloaded                      | `own` in the dtypes of the tiers                   | `offloaded`               |
| moments                        | by their format, for each slot's part              | `moment_bytes`            |
| gathered                       | whole, and N·e·interval while it arrives encoded   | `gathered_bytes`          |
| buffers of a reduction         | sent, received, and the sum if it is apart         | `exchange`                |

e is the number of bytes in which an element is sent (encoded, or in the compute dtype), N the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import torch

from onefold.layout.flat import FlatLayout, Slot, Topology, overlap, round_up
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import FORMATS
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import GROUP, NATIVE

#: Encoded parts begin at multiples of this many bytes: scales are read as 4-byte numbers.
CODED_ALIGNMENT = 16
LOW = (torch.float32, torch.bfloat16, torch.float16)
#: The ranks of a hop: all ranks, those of a group, or one of each group.
Level = Literal["all", "intra-group", "inter-group"]
#: Who adds gradients up (runtime/hops.py). "pairwise": this rank, part by part, as gloo's
#: messages arrive. "at once": this rank, all parts of one NCCL operation together. "backend": NCCL
#: itself, under reduce="native".
Adds = Literal["pairwise", "at once", "backend"]


class Encoding(Protocol):
    """What a spec needs to know of a codec."""

    @property
    def block(self) -> int:
        """Elements that share a scale."""

    def encoded_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` encoded elements, scales included."""


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of computation, of master weights, of gradient sums, of gradients on the wire."""

    compute: torch.dtype
    master: torch.dtype
    sums: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(
        cls, dtype: torch.dtype, trainable: bool, recipe: Recipe, keeps_dtype: bool = False
    ) -> Dtypes:
        """Return the recipe's dtypes for a parameter of `dtype`. Float64 and integer parameters
        keep their own dtype throughout. Parameters of a unit that have equal dtypes share a flat
        buffer.

        A recipe without a compute dtype computes in the parameter's own, and so does a parameter
        that `keeps_dtype`. Gradients are sent in the compute dtype unless the recipe names a wire
        dtype. Frozen parameters have no optimizer, so they are stored in the compute dtype, without
        master weights.
        """
        if dtype not in LOW:
            return cls(dtype, dtype, dtype, dtype)
        compute = dtype if keeps_dtype else recipe.parameters.dtype or dtype
        return cls(
            compute,
            recipe.optimizer.dtype if trainable else compute,
            recipe.gradients.dtype,
            recipe.gradients.wire or compute,
        )


@dataclass(frozen=True)
class Tiers:
    """The tiers of one flat buffer: of its parameters (this rank's part in the compute dtype), of
    its gradients, and of its masters and optimizer states.
    """

    parameters: Tier
    gradients: Tier
    optimizer: Tier

    @classmethod
    def of(cls, trainable: bool, recipe: Recipe) -> Tiers | None:
        """Return the tiers of a flat buffer in an offloaded unit; None if all of it stays on the
        device.

        Frozen weights have no optimizer, so they are stored on the tier of parameters.
        """
        p, o = recipe.parameters.tier, recipe.optimizer.tier
        if not trainable:
            return None if p is Tier.DEVICE else cls(p, p, p)
        return None if o is Tier.DEVICE else cls(p, recipe.gradients.tier, o)

    @property
    def on_disk(self) -> bool:
        return any(tier.on_disk for tier in (self.parameters, self.gradients, self.optimizer))


@dataclass(frozen=True)
class Hop:
    """One step of a reduction: `size` ranks divide the addresses from `start` on into `own`
    elements each. This rank is at `index` among them.
    """

    level: Level
    size: int
    start: int
    own: int
    index: int

    @property
    def span(self) -> int:
        """Elements of the range that is divided."""
        return self.size * self.own


@dataclass(frozen=True)
class Exchange:
    """The buffers of one hop of a reduction, besides the gradient buffer.

    Attributes:
        dtype: the dtype of these buffers: that of the wire, or uint8 if encoded.
        sent: elements of the send buffer; 0 if the gradient buffer itself is sent.
        rows: parts in the receive buffer.
        part: elements of each of these parts.
        apart: elements of one peer's part that is received outside the receive buffer, because the
            sum is made in its memory; 0 if there is none.
    """

    dtype: torch.dtype
    sent: int
    rows: int
    part: int
    apart: int = 0

    @property
    def received(self) -> int:
        """Elements of the receive buffer."""
        return self.rows * self.part


@dataclass(frozen=True)
class ShardSpec:
    """The sizes of one flat buffer; see the docstring of this module.

    Attributes:
        parameters: (name, shape) of parameters of one unit that share a dtype, in order.
        position: this rank's position; see [Note: positions] in layout/flat.py.
        codec: returns a codec by its name.
        trainable: the parameters were trainable when the model was sharded.
        stored: they are frozen weights that are stored encoded, and have no masters.
        tiers: the tiers of a buffer with state off the device; else None.
        in_place: all of them have memory, in the dtypes of `dtypes`, so that a single rank can
            leave them in place.
        native: reductions are the backend's own operations (NCCL), not pairwise messages.
        rooms: as in `FlatLayout.of`.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: Dtypes
    recipe: Recipe
    topology: Topology
    position: int
    codec: Callable[[str], Encoding]
    trainable: bool = True
    stored: bool = False
    tiers: Tiers | None = None
    in_place: bool = False
    native: bool = False
    rooms: tuple[int, ...] | None = None

    # -- what it is --------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> FlatLayout:
        sector = SECTOR if self.tiers is not None and self.tiers.on_disk else 0
        stored = self.recipe.frozen if self.stored else None
        at_rest = self.codec(stored).block if stored is not None else 0
        block = max(self.recipe.block, at_rest)
        return _laid_out(self.parameters, self.ranks, sector, block, self.rooms)

    @property
    def unsharded(self) -> bool:
        """One rank and one dtype: parameters stay in their memory, without a flat buffer."""
        same = self.dtypes.compute == self.dtypes.master and self.tiers is None
        return self.ranks == 1 and self.in_place and same and not self.stored

    @cached_property
    def resident(self) -> bool:
        """The whole always exists; it is gathered only when it has become stale."""
        same, tiers = self.dtypes.compute == self.dtypes.master, self.tiers
        rests_whole = same if tiers is None else tiers.parameters is Tier.DEVICE
        alone = self.ranks == 1 and not self.stored and rests_whole
        return alone or not self.recipe.parameters.sharded

    @cached_property
    def whole_master(self) -> bool:
        """Every rank steps the whole."""
        return self.ranks == 1 or not self.recipe.optimizer.sharded

    @cached_property
    def group_master(self) -> bool:
        """Every group steps the whole, each rank its shard."""
        return self.recipe.optimizer.over == GROUP

    @property
    def has_secondary(self) -> bool:
        """A second copy: the cached shard is this rank's part in its group."""
        over_group = self.recipe.parameters.over == GROUP and not self.group_master
        return over_group and not self.stored and not self.resident and self.topology.outer > 1

    @cached_property
    def gather_codec(self) -> Encoding | None:
        """The codec of gathers; None sends parameters as they are."""
        travels = (self.ranks > 1 or self.stored) and self.dtypes.compute in LOW
        name = self.recipe.frozen if self.stored else self.recipe.parameters.codec
        return self.codec(name) if name is not None and travels and not self.resident else None

    @cached_property
    def reduce_codec(self) -> Encoding | None:
        """The codec of reductions; None sends gradients as they are."""
        name = self.recipe.gradients.codec
        return self.codec(name) if name is not None and self.dtypes.sums == torch.float32 else None

    @property
    def moments(self) -> str | None:
        """The format of Adam's moments; None for the masters' dtype."""
        return self.recipe.moments

    # -- addresses ---------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return self.topology.size

    @property
    def numel(self) -> int:
        """Elements of the whole, padding included."""
        return self.layout.numel

    @property
    def interval(self) -> tuple[int, int]:
        """The addresses of this rank in the division among all ranks."""
        return self.layout.interval(self.position)

    @property
    def shard(self) -> tuple[int, int]:
        """The addresses of this rank in the division among its group."""
        return self.shard_of(self.position)

    def shard_of(self, position: int) -> tuple[int, int]:
        """Return the addresses of the rank at `position` in the division among its group."""
        outer, each = self.topology.outer, self.layout.shard_numel
        first = position // outer * outer
        return first * each, (first + outer) * each

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The addresses whose masters this rank has."""
        return self.owned_by(self.position)

    def owned_by(self, position: int) -> tuple[int, int]:
        """Return the addresses whose masters the rank at `position` has."""
        if self.whole_master:
            return 0, self.numel
        return self.shard_of(position) if self.group_master else self.layout.interval(position)

    @property
    def own(self) -> int:
        """Elements that this rank owns, padding included."""
        return self.owned[1] - self.owned[0]

    def local(self, slot: Slot) -> int:
        """Return the number of elements of `slot` that this rank's optimizer steps."""
        a, b = overlap((slot.start, slot.end), self.owned)
        return b - a

    @cached_property
    def only_padding(self) -> bool:
        """This rank's optimizer steps no element of it."""
        return not any(map(self.local, self.layout.slots))

    # -- at rest -----------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether the masters are a slice of the resident whole, and take no bytes of their own."""
        return self.resident and self.dtypes.compute == self.dtypes.master and self.tiers is None

    @property
    def cached(self) -> tuple[int, int]:
        """The cached shard, as the range of positions of the intervals in it. Gathers read it in
        place of the masters.

        It is a second copy, this rank's part encoded, or the stored frozen weights. The range is
        empty if there is no cached shard.
        """
        if self.has_secondary:
            first = self.position // self.topology.outer * self.topology.outer
            return first, first + self.topology.outer
        if self.gather_codec is None:
            return self.position, self.position
        each = max(self.layout.shard_numel, 1)
        return self.owned[0] // each, self.owned[1] // each

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cached shard."""
        first, last = self.cached
        return (last - first) * self.each

    @property
    def parameter_bytes(self) -> int:
        """Bytes on the device of resident parameters and of the cached shard, without masters."""
        compute = self.dtypes.compute.itemsize
        if self.unsharded:
            return self.layout.content * compute
        on_device = self.tiers is not None and self.tiers.parameters is Tier.DEVICE
        here = self.numel if self.resident else self.own if on_device else 0
        return self.cached_bytes + here * compute

    @property
    def master_bytes(self) -> int:
        """Bytes on the device of masters with memory of their own."""
        if self.tiers is not None or self.unsharded or self.stored or self.shares_memory:
            return 0
        return self.own * self.dtypes.master.itemsize

    @property
    def offloaded(self) -> tuple[tuple[Tier, str, int], ...]:
        """(tier, kind, bytes) of all that is stored off the device, without moments, by the table
        of offload/storage.py. Kinds are "master", "parameter" and "gradient".
        """
        if self.tiers is None:
            return ()
        d, p, o = self.dtypes, self.tiers.parameters, self.tiers.optimizer
        out = [(o, "master", self.own * d.master.itemsize)]
        if (p is Tier.HOST and (o.on_disk or d.compute != d.master)) or self.lies_apart:
            out.append((p, "parameter", self.own * d.compute.itemsize))
        if self.trainable and self.tiers.gradients.on_disk:
            out.append((self.tiers.gradients, "gradient", self.own * d.master.itemsize))
        return tuple(out)

    @property
    def lies_apart(self) -> bool:
        """Whether parameters in the compute dtype are stored in files apart from the masters."""
        return (
            self.tiers is not None
            and self.tiers.parameters.on_disk
            and self.dtypes.compute != self.dtypes.master
        )

    @property
    def gathers_from_disk(self) -> bool:
        """Whether a gather begins with a read from a disk."""
        return self.tiers is not None and self.tiers.parameters.on_disk and not self.resident

    def moment_bytes(self, slot: Slot, count: int) -> int:
        """Return the bytes of `count` element-wise states of one parameter."""
        numel = self.local(slot)
        if self.moments is None:
            return count * numel * self.dtypes.master.itemsize
        return count * FORMATS[self.moments].of(slot.numel).nbytes(numel)

    # -- gathered ----------------------------------------------------------------------------------

    @cached_property
    def each(self) -> int:
        """Bytes in which one interval is gathered."""
        numel = self.layout.shard_numel
        if self.gather_codec is None:
            return numel * self.dtypes.compute.itemsize
        return padded_bytes(self.gather_codec, numel)

    @property
    def coded_bytes(self) -> int:
        """Bytes of the buffer that receives all intervals encoded; 0 if they are not encoded."""
        return self.ranks * self.each if self.gather_codec is not None else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole while it is gathered, and of the buffer that receives it encoded."""
        return self.numel * self.dtypes.compute.itemsize + self.coded_bytes

    # -- reduced -----------------------------------------------------------------------------------

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops of a reduction of gradients, from the whole to the interval."""
        inner, outer, interval = self.topology.inner, self.topology.outer, self.layout.shard_numel
        if not self.topology.two_levels:
            return (Hop("all", self.ranks, 0, interval, self.position),)
        first = self.position // outer * outer * interval
        return (
            Hop("intra-group", inner, 0, outer * interval, self.position // outer),
            Hop("inter-group", outer, first, interval, self.position % outer),
        )

    @property
    def broadcast_back(self) -> tuple[Hop, ...]:
        """The hops that send finished sums to the other ranks that hold them: the hops of the
        reduction in reverse if every rank holds the whole, or the last hop if groups do.
        """
        if self.ranks == 1 or self.owned == self.interval:
            return ()
        return self.hops[::-1] if self.whole_master else self.hops[-1:]

    @property
    def landed(self) -> torch.dtype:
        """The dtype in which finished sums are handed over."""
        return self.dtypes.wire if self.whole_master or self.broadcast_back else self.dtypes.sums

    def encodes(self, hop: Hop) -> bool:
        """Whether gradients are sent encoded on a hop."""
        return self.reduce_codec is not None and hop.size > 1

    def added_by(self, hop: Hop) -> Adds:
        """Return who adds up the parts of a hop. Encoded parts are decoded and added one by one."""
        if hop.size == 1 or self.encodes(hop):
            return "pairwise"
        if self.recipe.reduce == NATIVE:
            return "backend"
        return "at once" if self.native else "pairwise"

    def exchange(self, at: int, dtype: torch.dtype) -> Exchange:
        """Return the buffers that hop `at` needs for gradients in `dtype`."""
        hop, wire = self.hops[at], self.dtypes.wire
        numel, own = hop.span, hop.own
        if self.reduce_codec is not None and self.encodes(hop):
            place = padded_bytes(self.reduce_codec, own)
            return Exchange(torch.uint8, hop.size * place, hop.size, place)
        adds, narrowed = self.added_by(hop), dtype != wire
        if adds == "backend":
            return Exchange(wire, numel * narrowed, 1, own)
        if adds == "at once":
            # If they are narrowed, this rank's own part stays where it is
            return Exchange(wire, (numel - own) * narrowed, hop.size - narrowed, own)
        summed = (
            at + 1 == len(self.hops)
            and not self.broadcast_back
            and hop.size > 1
            and wire == self.dtypes.sums == dtype
        )
        return Exchange(wire, numel * narrowed, hop.size - 1 - summed, own, own * summed)


def padded_bytes(codec: Encoding, numel: int) -> int:
    """Return the bytes that `numel` encoded elements take in a buffer, padding included."""
    return round_up(codec.encoded_bytes(numel), CODED_ALIGNMENT)


_laid_out = lru_cache(maxsize=4096)(FlatLayout.of)
