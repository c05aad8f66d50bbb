"""`ShardSpec`: every size of one flat buffer on one rank, in integers. The runtime allocates and
sends what it says, the plan adds up what it says.

Six ranks in groups of three, the buffer of one unit, seen by the rank at position 2:

    position   |    0    |    1    |    2    |    3    |    4    |    5    |
    whole      [===========================================================)   what the unit computes with
    shard                          [===================)                       this rank's part in its group
    interval                       [=========)                                 this rank's part among all

    gathers      interval ── inter-group ──► shard ── intra-group ──► whole    without groups: one hop over all ranks
    reductions   whole ── intra-group ──► shard ── inter-group ──► interval    and back, where others hold the sums too

| what                           | elements or bytes                                  | where it is said          |
|--------------------------------|----------------------------------------------------|---------------------------|
| masters of this rank           | whole, shard or interval, by the optimizer's row   | `owned`, `own`            |
| cached shard, gathered from    | e·interval, or the shard with a second copy        | `cached_bytes`            |
| resident parameters            | whole                                              | `resident`                |
| offloaded                      | what the tiers say, of `own`                       | `offloaded`               |
| moments                        | by the format, of each slot's part                 | `moment_bytes`            |
| error feedback                 | the span of each encoded hop, fp32                 | `residual_bytes`          |
| gathered                       | whole, and N·e·interval while it arrives encoded   | `gathered_bytes`          |
| buffers of a reduction         | what travels, what is received, the sum apart      | `exchange`                |

e is what a codec leaves of an element, N the number of ranks. What the checker in `__post_init__`
verifies:

1. the layout is cut for these ranks, and the position is one of them;
2. interval, shard and whole lie in one another, and this rank owns one of the three;
3. each hop divides what the hop before has left, its ranges tile it, and the last leaves the
   interval;
4. encoded parts begin at multiples of `CODED_ALIGNMENT` bytes and do not overlap, and blocks that
   rest encoded lie on one rank each;
5. what needs several ranks or groups has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, Protocol

import torch

from onefold.layout.flat import FlatLayout, Slot, overlap, round_up
from onefold.layout.topology import Topology
from onefold.recipe import Placement, Recipe, Tier
from onefold.recipe.moments import bytes_of_moments
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import GROUP, NATIVE

#: Encoded parts begin at multiples of this many bytes: scales are read as numbers of four.
CODED_ALIGNMENT = 16
LOW = (torch.float32, torch.bfloat16, torch.float16)
#: Whom a hop moves between: all ranks at once, those of a group, or one of each group.
Level = Literal["all", "intra-group", "inter-group"]
#: Who adds gradients up (runtime/reductions.py): this rank, part by part, as gloo's pairwise messages
#: bring them ("pairwise"); this rank, all parts of one operation of NCCL's at once ("at once"); or,
#: under reduce="native", NCCL itself ("backend").
Adds = Literal["pairwise", "at once", "backend"]


class Encoding(Protocol):
    """What a spec asks of a codec."""

    @property
    def shared(self) -> int:
        """Elements that share a scale."""

    def encoded_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements, scales included."""


@dataclass(frozen=True)
class Dtypes:
    """The four dtypes of a flat buffer: computed in, held by the optimizer, summed in, sent in."""

    compute: torch.dtype
    master: torch.dtype
    sums: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, trainable: bool, recipe: Recipe) -> Dtypes:
        """For a parameter of `dtype`: the recipe's, but never less than a float64 or integer
        parameter came with.

        A recipe that names no compute dtype takes the parameter's own, and sends its gradient so
        unless it names a wire. Frozen parameters have no optimizer, hence no master copy: they rest
        in the compute dtype.
        """
        if dtype not in LOW:
            return cls(dtype, dtype, dtype, dtype)
        compute = recipe.parameters.dtype or dtype
        return cls(
            compute,
            recipe.master_dtype if trainable else compute,
            recipe.sums_dtype,
            recipe.gradients.wire or compute,
        )


def grouped_as(dtype: torch.dtype, recipe: Recipe) -> torch.dtype:
    """What parameters of `dtype` share a flat buffer with: their like, or, where the recipe
    converts them, all that it converts.
    """
    return torch.float32 if recipe.compute_dtype is not None and dtype in LOW else dtype


@dataclass(frozen=True)
class Tiers:
    """The tiers of one flat buffer's parameters (this rank's part of what is computed with),
    gradients, masters and states.
    """

    parameters: Tier
    gradients: Tier
    optimizer: Tier

    @classmethod
    def of(cls, trainable: bool, recipe: Recipe) -> Tiers | None:
        """For a flat buffer of an offloaded unit; None where nothing of it leaves the device.

        What is frozen has no optimizer: it rests where parameters do.
        """
        p, o = recipe.parameters.tier, recipe.optimizer.tier
        if not trainable:
            return None if p is Tier.DEVICE else cls(p, p, p)
        return None if o is Tier.DEVICE else cls(p, recipe.gradients.tier, o)

    @property
    def on_disk(self) -> bool:
        return Tier.NVME in (self.parameters, self.gradients, self.optimizer)


@dataclass(frozen=True)
class Hop:
    """One step of a reduction: `size` ranks divide the addresses from `start` on, `own` each, this
    rank is at `index` among them.
    """

    level: Level
    size: int
    start: int
    own: int
    index: int

    @property
    def span(self) -> int:
        """Elements of the buffer that is divided."""
        return self.size * self.own

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The addresses that each rank sums, by its place in the hop."""
        edges = [self.start + i * self.own for i in range(self.size + 1)]
        return tuple(itertools.pairwise(edges))


@dataclass(frozen=True)
class Exchange:
    """The buffers of one hop of a reduction, beside the one that holds what is sent.

    Attributes:
        dtype: of what travels: that of the wire, or bytes.
        sent: elements of the buffer that travels instead; 0: the gradient's own does.
        rows: parts in the receive buffer. part: elements of each.
        apart: elements of a peer's part that becomes the sum, in memory of its own; 0: none does.
        whole: the backend sums the whole for every rank, and nothing is received in parts.
    """

    dtype: torch.dtype
    sent: int
    rows: int
    part: int
    apart: int = 0
    whole: bool = False

    @property
    def received(self) -> int:
        """Elements of the receive buffer."""
        return self.rows * self.part


@dataclass(frozen=True)
class ShardSpec:
    """See this module.

    Attributes:
        position: this rank's, see [Note: positions] in layout/topology.py.
        trainable: an optimizer steps it, or did when the model was sharded.
        resident: the whole always exists, and nothing is gathered but what has become stale.
        unsharded: one rank and one dtype: parameters stay where they are, without a flat buffer.
        whole_master: every rank steps the whole. group_master: every group does.
        has_secondary: the cached shard is the group's, and renewed once after a step.
        gather_codec: how it is gathered; None: as it is. stored: it rests so, and has no masters.
        reduce_codec: how its gradients travel. error_feedback: what that loses is kept, in fp32.
        adds: who adds its gradients up.
        tiers: of a buffer whose state rests off the device; None for any other.
        moments: the format of Adam's moments; None for the masters' dtype.
    """

    layout: FlatLayout
    dtypes: Dtypes
    topology: Topology
    position: int
    trainable: bool
    resident: bool = False
    unsharded: bool = False
    whole_master: bool = False
    group_master: bool = False
    has_secondary: bool = False
    gather_codec: Encoding | None = None
    stored: bool = False
    reduce_codec: Encoding | None = None
    error_feedback: bool = False
    adds: Adds = "pairwise"
    tiers: Tiers | None = None
    moments: str | None = None

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Sequence[int]]],
        dtypes: Dtypes,
        recipe: Recipe,
        topology: Topology,
        position: int,
        codec: Callable[[str], Encoding],
        *,
        trainable: bool = True,
        stored: bool = False,
        tiers: Tiers | None = None,
        in_place: bool = False,
        native: bool = False,
    ) -> ShardSpec:
        """What a recipe makes of the parameters of a unit that share a dtype.

        Args:
            parameters: (name, shape) in order.
            codec: the codec of a name.
            stored: they are frozen weights that rest encoded.
            in_place: all of them have memory and `dtypes` throughout, so that one rank can leave
                them where they are.
            native: reductions are operations of the backend's own (NCCL), not pairwise messages.
        """
        ranks, low = topology.size, dtypes.compute in LOW
        same = dtypes.compute == dtypes.master
        unsharded = ranks == 1 and in_place and same and tiers is None and not stored
        rests_whole = same if tiers is None else tiers.parameters is Tier.DEVICE
        resident = (
            recipe.parameters.placement is Placement.REPLICATED
            or unsharded
            or (ranks == 1 and not stored and rests_whole)
        )
        over_group = recipe.parameters.over == GROUP and recipe.optimizer.over != GROUP
        travels = (ranks > 1 or stored) and low and not resident
        gathered = (recipe.frozen if stored else recipe.parameters.codec) if travels else None
        reduced = recipe.gradients.codec if dtypes.sums == torch.float32 else None
        at_rest = codec(recipe.frozen).shared if stored and recipe.frozen is not None else 0
        return cls(
            layout=_laid_out(
                tuple((name, tuple(shape)) for name, shape in parameters),
                ranks,
                SECTOR if tiers is not None and tiers.on_disk else 0,
                max(recipe.block, at_rest),
            ),
            dtypes=dtypes,
            topology=topology,
            position=position,
            trainable=trainable,
            resident=resident,
            unsharded=unsharded,
            whole_master=recipe.optimizer.placement is Placement.REPLICATED or ranks == 1,
            group_master=recipe.optimizer.over == GROUP,
            has_secondary=over_group and not stored and not resident and topology.outer > 1,
            gather_codec=codec(gathered) if gathered is not None else None,
            stored=stored,
            reduce_codec=codec(reduced) if reduced is not None else None,
            error_feedback=recipe.error_feedback,
            adds=adds_of(recipe, native) if ranks > 1 else "pairwise",
            tiers=tiers,
            moments=recipe.moments,
        )

    def __post_init__(self) -> None:
        numel, (a, b) = self.layout.numel, self.interval
        if self.layout.ranks != self.topology.size or not 0 <= self.position < self.ranks:
            raise ValueError(
                f"a layout for {self.layout.ranks} ranks was given with position {self.position} of"
                f" {self.topology.size}"
            )
        (c, d), (first, last) = self.shard, self.owned
        if not (0 <= c <= a <= b <= d <= numel and first <= a and b <= last):
            raise ValueError(
                f"interval {self.interval}, shard {self.shard} and owned {self.owned} do not lie in"
                f" one another in {numel} elements"
            )
        left = (0, numel)
        for hop in self.hops:
            if hop.start != left[0] or hop.span != left[1] - left[0]:
                raise ValueError(f"{hop} does not divide what is left, {left}")
            left = (hop.start + hop.index * hop.own, hop.start + (hop.index + 1) * hop.own)
        if left != self.interval:
            raise ValueError(f"the last hop leaves {left}, expected {self.interval}")
        if self.gather_codec is not None:
            needed = self.gather_codec.encoded_bytes(self.layout.shard_numel)
            if self.each < needed or self.each % CODED_ALIGNMENT:
                raise ValueError(f"{self.each} bytes a part, expected {needed} and an alignment")
            shared = self.gather_codec.shared if self.stored else 0
            if shared and self.layout.quantum % shared:
                raise ValueError(
                    f"ranks cut at multiples of {self.layout.quantum} elements would divide blocks"
                    f" of {shared} that are stored encoded"
                )
        if (
            (self.stored and (self.trainable or self.gather_codec is None))
            or (self.has_secondary and (self.resident or self.topology.outer == 1))
            or (self.unsharded and (self.ranks > 1 or not self.resident or self.tiers is not None))
        ):
            raise ValueError(f"a flat buffer cannot be all of this: {self}")

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
        """The addresses of this rank among all ranks."""
        return self.layout.interval(self.position)

    @property
    def shard(self) -> tuple[int, int]:
        """The addresses of this rank among those of its group."""
        return self.shard_of(self.position)

    def shard_of(self, position: int) -> tuple[int, int]:
        """The addresses of the rank at `position` among those of its group."""
        outer, each = self.topology.outer, self.layout.shard_numel
        first = position // outer * outer
        return first * each, (first + outer) * each

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The addresses whose masters this rank has."""
        return self.owned_by(self.position)

    def owned_by(self, position: int) -> tuple[int, int]:
        """The addresses whose masters the rank at `position` has."""
        if self.whole_master:
            return 0, self.numel
        return self.shard_of(position) if self.group_master else self.layout.interval(position)

    @property
    def own(self) -> int:
        """Elements that this rank owns, padding included."""
        return self.owned[1] - self.owned[0]

    def local(self, slot: Slot) -> int:
        """Elements of `slot` that this rank's optimizer steps."""
        a, b = overlap((slot.start, slot.end), self.owned)
        return b - a

    # -- at rest -----------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """The masters lie in the resident whole: they are no bytes of their own."""
        return self.resident and self.dtypes.compute == self.dtypes.master and self.tiers is None

    @property
    def cached(self) -> tuple[int, int]:
        """The intervals, by position, of the cached shard, gathered from instead of masters: a second
        copy, the own part encoded, or frozen weights at rest. An empty range where nothing is.
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
        """Bytes on the device of what is computed with, or gathered from; masters aside."""
        compute = self.dtypes.compute.itemsize
        if self.tiers is not None:
            on_device = self.tiers.parameters is Tier.DEVICE
            here = self.numel if self.resident else self.own if on_device else 0
            return self.cached_bytes + here * compute
        if self.unsharded:
            return self.layout.content * compute
        return self.cached_bytes + (self.numel * compute if self.resident else 0)

    @property
    def master_bytes(self) -> int:
        """Bytes on the device of masters that have memory of their own there."""
        if self.tiers is not None or self.unsharded or self.stored or self.shares_memory:
            return 0
        return self.own * self.dtypes.master.itemsize

    @property
    def residual_bytes(self) -> int:
        """Bytes of what encoding its gradients lost, for each hop."""
        if not (self.trainable and self.error_feedback):
            return 0
        return sum(hop.span * torch.float32.itemsize for hop in self.hops if self.encodes(hop))

    @property
    def offloaded(self) -> tuple[tuple[Tier, str, int], ...]:
        """(tier, kind, bytes) of what rests off the device, moments aside: the table of
        offload/storage.py. Kinds are "master", "parameter" and "gradient".
        """
        if self.tiers is None:
            return ()
        d, p, disk = self.dtypes, self.tiers.parameters, self.tiers.optimizer is Tier.NVME
        out = [(Tier.NVME if disk else Tier.HOST, "master", self.own * d.master.itemsize)]
        if (p is Tier.HOST and (disk or d.compute != d.master)) or self.lies_apart:
            out.append((p, "parameter", self.own * d.compute.itemsize))
        if self.trainable and self.tiers.gradients is Tier.NVME:
            out.append((Tier.NVME, "gradient", self.own * d.master.itemsize))
        return tuple(out)

    @property
    def lies_apart(self) -> bool:
        """What is computed with has a place of its own on NVMe."""
        return (
            self.tiers is not None
            and self.tiers.parameters is Tier.NVME
            and self.dtypes.compute != self.dtypes.master
        )

    @property
    def gathers_from_disk(self) -> bool:
        """What is gathered begins with a read from NVMe."""
        return self.tiers is not None and self.tiers.parameters is Tier.NVME and not self.resident

    def moment_bytes(self, slot: Slot, count: int) -> int:
        """Bytes of `count` optimizer states with an element for each that this rank steps of one
        parameter.
        """
        numel = self.local(slot)
        if self.moments is None:
            return count * numel * self.dtypes.master.itemsize
        return bytes_of_moments(numel, self.moments, whole=slot.numel, moments=count)

    # -- gathered ----------------------------------------------------------------------------------

    @cached_property
    def each(self) -> int:
        """Bytes of one interval in a gather."""
        numel = self.layout.shard_numel
        if self.gather_codec is None:
            return numel * self.dtypes.compute.itemsize
        return padded_bytes(self.gather_codec, numel)

    @property
    def coded_bytes(self) -> int:
        """Bytes of the buffer in which all intervals arrive encoded; 0: they are not."""
        return self.ranks * self.each if self.gather_codec is not None else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole while it is gathered, and of what arrives encoded."""
        return self.numel * self.dtypes.compute.itemsize + self.coded_bytes

    # -- reduced -----------------------------------------------------------------------------------

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Of a reduction of its gradients, from the whole to the interval. Sums that a backend
        makes for everybody are one move of its own.
        """
        interval, whole = self.layout.shard_numel, self.whole_master
        if whole and self.adds == "backend":
            return hops_of(Topology(self.ranks, self.ranks), self.position, interval)
        return hops_of(self.topology, self.position, interval)

    @property
    def broadcast_back(self) -> tuple[Hop, ...]:
        """The hops by which sums go on to who holds them too: back over those of the reduction, all
        where everybody holds them, else the last.
        """
        if self.ranks == 1 or self.owned == self.interval:
            return ()
        return self.hops[::-1] if self.whole_master else self.hops[-1:]

    @property
    def landed(self) -> torch.dtype:
        """What sums are in when they are handed over."""
        return self.dtypes.wire if self.whole_master or self.broadcast_back else self.dtypes.sums

    def encodes(self, hop: Hop) -> bool:
        """Whether gradients travel encoded on a hop."""
        return self.reduce_codec is not None and hop.size > 1

    def added_by(self, hop: Hop) -> Adds:
        """Who adds up what comes on a hop: what travels encoded is decoded part by part."""
        return "pairwise" if hop.size == 1 or self.encodes(hop) else self.adds

    def exchange(
        self,
        at: int,
        dtype: torch.dtype,
        span: tuple[int, int] | None = None,
        adds: Adds | None = None,
    ) -> Exchange:
        """The buffers that hop `at` needs for gradients in `dtype`.

        Args:
            span: the addresses that are reduced, where not all parameters take part.
            adds: who adds this time, where parts are uneven or travel otherwise than the recipe
                says.
        """
        hop, wire = self.hops[at], self.dtypes.wire
        numel, own, largest = hop.span, hop.own, hop.own
        if span is not None:
            sizes = [b - a for a, b in (overlap(span, there) for there in hop.ranges)]
            numel, own, largest = sum(sizes), sizes[hop.index], max(sizes)
        if self.reduce_codec is not None and self.encodes(hop) and adds is None:
            place = padded_bytes(self.reduce_codec, largest)
            return Exchange(torch.uint8, hop.size * place, hop.size, place)
        adds, narrowed = adds or self.added_by(hop), dtype != wire
        if adds == "backend":
            whole = self.whole_master
            return Exchange(wire, numel * narrowed, 0 if whole else 1, own, whole=whole)
        if adds == "at once":
            if narrowed:  # this rank's own part stays where it is
                return Exchange(wire, numel - own, hop.size - 1, own)
            return Exchange(wire, 0, hop.size, own)
        summed = (
            at + 1 == len(self.hops)
            and not self.broadcast_back
            and hop.size > 1
            and wire == self.dtypes.sums == dtype
        )
        return Exchange(wire, numel * narrowed, hop.size - 1 - summed, own, own * summed)


def hops_of(topology: Topology, position: int, interval: int) -> tuple[Hop, ...]:
    """The hops of a reduction of `interval` elements a rank."""
    size, inner, outer = topology.size, topology.inner, topology.outer
    if not topology.two_levels:
        return (Hop("all", size, 0, interval, position),)
    first = position // outer * outer * interval
    return (
        Hop("intra-group", inner, 0, outer * interval, position // outer),
        Hop("inter-group", outer, first, interval, position % outer),
    )


def adds_of(recipe: Recipe, native: bool) -> Adds:
    """Who adds gradients up by this recipe, on NCCL (`native`) or on gloo."""
    return "backend" if recipe.reduce == NATIVE else "at once" if native else "pairwise"


def padded_bytes(codec: Encoding, numel: int) -> int:
    """Bytes that `numel` encoded elements take in a buffer, padding included."""
    return round_up(codec.encoded_bytes(numel), CODED_ALIGNMENT)


@lru_cache(maxsize=4096)
def _laid_out(
    parameters: tuple[tuple[str, tuple[int, ...]], ...], ranks: int, sector: int, block: int
) -> FlatLayout:
    return FlatLayout.of(parameters, ranks, sector, block)
