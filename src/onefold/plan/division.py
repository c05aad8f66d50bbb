"""Who of the ranks holds what of a flat buffer, over which levels it moves and in which form:
runtime/hops.py, gathers.py and summing.py in integers.

    gathers     interval ── across ──► shard ── inside ──► whole         (one hop over all ranks where there are no groups)
    reductions  whole ── inside ──► shard ── across ──► interval         and back across, where the shard's sums are held in each group,
                                                                         and inside, where everybody holds the whole

Six ranks in groups of three, a buffer of 6 intervals: rank 0 has interval 0, rank 3 interval 1, and
both the shard 0, 1.

Nodes are `per_node` ranks in a row, groups are neighbours too, and either may be a part of the
other: how many peers of a level are on other nodes is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from onefold.comm.topology import Topology, inner_of
from onefold.layout import round_up
from onefold.quant import codec
from onefold.recipe import Recipe

Level = Literal["all", "inside", "across"]
#: Who adds gradients up (runtime/summing.py): this rank, part by part, as gloo's pairwise messages
#: bring them ("pairwise"); this rank, all parts of one operation of NCCL's at once ("at once"); or,
#: under reduce="native", NCCL itself ("backend").
Adds = Literal["pairwise", "at once", "backend"]
#: Encoded intervals begin at multiples of this many bytes (quant/encoded_storage.py, runtime/summing.py).
ALIGNED = 16


@dataclass(frozen=True)
class Hop:
    """One step of a reduction: each of `size` ranks sums `own` elements of the `span` that its
    buffer covers.
    """

    level: Level
    size: int
    span: int
    own: int


@dataclass(frozen=True)
class Division:
    """Of one flat buffer.

    Attributes:
        topology: the ranks, in groups. position: this rank's (see [Note: positions] in
            comm/topology.py).
        over_group: the optimizer's states are those of the group's shard: each group has all of
            them.
        doubled: a shard is kept to gather from, and renewed once after a step.
        gathered: the codec in which it is gathered; None: as it is. stored: it rests so, and has no
            masters.
        reduced: the codec in which its gradients travel. feedback: what that loses is kept, in
            fp32.
        adds: who adds its gradients up.
    """

    topology: Topology
    position: int
    over_group: bool = False
    has_secondary: bool = False
    gathered: str | None = None
    stored: bool = False
    reduced: str | None = None
    feedback: bool = False
    adds: Adds = "pairwise"

    @property
    def two_levels(self) -> bool:
        return 1 not in (self.topology.inner, self.topology.outer)

    def shard(self, interval: int) -> tuple[int, int]:
        """The addresses that this rank has among those of its group, where each rank's interval has
        that many elements.
        """
        first = self.position // self.topology.outer * self.topology.outer
        return first * interval, (first + self.topology.outer) * interval

    def hops(self, interval: int, whole: bool = False) -> tuple[Hop, ...]:
        """Of a reduction of `interval` elements a rank; `whole`: the sums are everybody's, which
        NCCL does in one move of its own.
        """
        size, inner, outer = self.topology.size, self.topology.inner, self.topology.outer
        if not self.two_levels or (whole and self.adds == "backend"):
            return (Hop("all", size, size * interval, interval),)
        return Hop("inside", inner, size * interval, outer * interval), Hop(
            "across", outer, outer * interval, interval
        )

    def added_by(self, hop: Hop) -> Adds:
        """Who adds up what comes on a hop: what travels encoded is decoded part by part."""
        return "pairwise" if hop.size == 1 or self.encodes(hop) else self.adds

    def encodes(self, hop: Hop) -> bool:
        """Whether gradients travel encoded on a hop."""
        return self.reduced is not None and hop.size > 1

    def gather_hops(self, whole: bool) -> tuple[tuple[Level, int, int], ...]:
        """(level, peers, intervals sent to each of them) of a gather from the ranks whose parts
        together are the whole, each once.
        """
        size, inner, outer = self.topology.size, self.topology.inner, self.topology.outer
        if whole:
            return ()
        if outer > 1 and self.over_group:
            return (("inside", inner - 1, outer),)
        return (
            (("across", outer - 1, 1), ("inside", inner - 1, outer))
            if self.two_levels
            else (("all", size - 1, 1),)
        )

    def renewal_hops(self) -> tuple[tuple[Level, int, int], ...]:
        """The same for what brings a second copy up to date, before it is gathered from."""
        return (
            (("across" if self.two_levels else "all", self.topology.outer - 1, 1),)
            if self.has_secondary
            else ()
        )

    def copy_hops(self) -> tuple[tuple[Level, int, int], ...]:
        """The same for a gather from second copies."""
        return (("inside", self.topology.inner - 1, self.topology.outer),)


def topology_of(recipe: Recipe, ranks: int, per_node: int | None = None) -> Topology:
    """The groups of a recipe; a node is `per_node` ranks in a row, all where nobody says.

    Raises:
        ValueError: the groups do not divide the ranks.
    """
    return _topology(recipe.group, ranks, per_node)


@lru_cache(maxsize=256)
def _topology(group: int | str | None, ranks: int, per_node: int | None) -> Topology:
    return Topology(ranks, inner_of(group, range(ranks), per_node))


def adds_of(recipe: Recipe, nccl: bool) -> Adds:
    """Who adds gradients up by this recipe, on NCCL or on gloo."""
    return "backend" if recipe.reduce == "native" else "at once" if nccl else "pairwise"


def position_of(topology: Topology, rank: int) -> int:
    """The position of the rank of this number."""
    return rank % topology.inner * topology.outer + rank // topology.inner


@lru_cache(maxsize=4096)
def elsewhere(topology: Topology, per_node: int | None, rank: int, level: Level) -> tuple[int, int]:
    """(peers of this rank on a level, those of them that are on other nodes)."""
    inner = topology.inner
    numbers: Sequence[int] = range(topology.size)
    if level == "inside":
        numbers = range(rank // inner * inner, rank // inner * inner + inner)
    elif level == "across":
        numbers = range(rank % inner, topology.size, inner)
    far = sum(n // per_node != rank // per_node for n in numbers) if per_node else 0
    return len(numbers) - 1, far


@lru_cache(maxsize=4096)
def encoded_bytes(name: str, numel: int) -> int:
    """Bytes of `numel` elements in the codec of a name, scales included."""
    return codec(name).encoded_bytes(numel)


def padded(name: str, numel: int) -> int:
    """Bytes of the place that `numel` encoded elements have in a buffer."""
    return round_up(encoded_bytes(name, numel), ALIGNED)


def by_link(
    sent: Mapping[Level, int], topology: Topology, per_node: int | None, rank: int
) -> dict[str, int]:
    """What a rank sends on each level, by link: "inside" its node and "between" nodes; as
    `TrafficLedger.by_link` counts it.
    """
    between = 0
    for level, nbytes in sent.items():
        peers, far = elsewhere(topology, per_node, rank, level)
        between += nbytes * far // peers if peers else 0
    return {"inside": sum(sent.values()) - between, "between": between}
