"""What a rank's moves take on the links of a machine: rings and messages to all at once, over nodes
and inside them.

A ring over nodes carries size·(N−1)/N through each node's whole set of adapters: the node's
bandwidth divides (`Traffic.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onefold.layout import Topology
from onefold.plan.hardware import Machine
from onefold.plan.wire import Leg, Phase, elsewhere


@dataclass(frozen=True)
class Software:
    """What software makes of the hardware. The defaults are what a plan uses for a machine nobody
    has measured.

    Attributes:
        kernel_share: of the rate that large products reach, what a whole transformer reaches:
            norms, softmax and small products take the rest. Fitted to the Azure report (see
            `benchmarks.validation.systems`), as hop_seconds.
        link_share: of the nominal link, what a collective of large messages reaches. An assumption;
            published runs: 0.17 to 1.
        overlap: of the compute beside it, the share that communication can hide behind. An
            assumption for a schedule that prefetches.
        hop_seconds: of one step of a ring, from one rank to the next. A collective over N ranks
            takes N−1 of them, which is the term that grows with N.
        straggler: spread of the ranks' speeds, an assumption; the slowest of N normally distributed
            ranks is sqrt(2 ln N) deviations behind the mean.
        launch_seconds: of the host, for one kernel or collective: an assumption, in the middle of
            what eager PyTorch takes (3 to 10 µs). Only a timeline asks for it
            (`onefold.simulation.timeline`).
        step_share, move_share: on a calibrated machine, what a step of the engine reaches of the
            rates of its passes and of its moves, which were each measured alone; handed_s: seconds
            that taking over one element of a gradient takes, in each micro-batch. From reference
            steps (`onefold.plan.efficiency`); 1, 1 and 0 without them.
    """

    kernel_share: float = 0.77
    link_share: float = 0.8
    overlap: float = 0.9
    hop_seconds: float = 7e-6
    straggler: float = 0.01
    launch_seconds: float = 5e-6
    step_share: float = 1.0
    move_share: float = 1.0
    handed_s: float = 0.0

    def __post_init__(self) -> None:
        for names, possible, expected in (
            (("kernel_share", "link_share"), lambda x: 0 < x <= 1, "a share above 0 and at most 1"),
            (("step_share", "move_share"), lambda x: x > 0, "a number above 0"),
            (("overlap",), lambda x: 0 <= x <= 1, "a share from 0 to 1"),
            (
                ("hop_seconds", "straggler", "launch_seconds", "handed_s"),
                lambda x: x >= 0,
                "0 or more",
            ),
        ):
            for name in names:
                if not possible(getattr(self, name)):
                    raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}.")


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step by one kind of move.

    Attributes:
        move: "all-gather", "reduce-scatter" or "all-reduce".
        inside, between: bytes by link, the mean over the ranks of a node; their sum is what the
            ledger counts.
        calls: collectives in a step.
        hops: messages that follow one another in one collective.
        ranks: of the group.
        phase: what it can hide behind; see `Phase`.
    """

    move: str
    inside: float
    between: float
    calls: int
    hops: int
    ranks: int
    phase: Phase = "both"

    @property
    def nbytes(self) -> float:
        return self.inside + self.between

    @classmethod
    def ring(
        cls, move: str, nbytes: float, calls: int, machine: Machine, phase: Phase = "both"
    ) -> Traffic:
        """Over all ranks in a ring that enters and leaves each node once: one rank of a node sends
        its bytes to the next node.
        """
        between = nbytes / machine.local if machine.nodes > 1 else 0.0
        return cls(move, nbytes - between, between, calls, machine.ranks - 1, machine.ranks, phase)

    @classmethod
    def pairwise(
        cls, move: str, nbytes: float, calls: int, machine: Machine, phase: Phase = "both"
    ) -> Traffic:
        """Over all ranks, every rank to every other: most bytes leave the node, `per_node` times a
        ring's. One message time a call: all are sent at once (NCCL's all-to-all is one group of
        sends and receives; its documentation, Point-to-point communication).
        """
        between = nbytes * (machine.ranks - machine.local) / max(machine.ranks - 1, 1)
        return cls(move, nbytes - between, between, calls, 1, machine.ranks, phase)

    def seconds(self, machine: Machine, software: Software) -> float:
        """Of all its calls, one after another."""
        inside, between, hops = self.parts(machine, software)
        return max(inside, between) + hops

    def parts(self, machine: Machine, software: Software) -> tuple[float, float, float]:
        """Seconds that all its calls keep the link inside the node busy, that between nodes, and
        that messages follow one another.
        """
        if self.ranks <= 1 or not (self.nbytes and self.calls):
            return 0.0, 0.0, 0.0
        if machine.measured is not None:
            # All ranks of the machine move at the same time, in however many groups.
            nbytes = math.ceil(self.nbytes / self.calls)
            once = machine.measured.seconds_for(self.move, nbytes, machine.ranks)
            return self.calls * once / software.move_share, 0.0, 0.0
        inside, between = self.inside / (machine.gpu.link * software.link_share), 0.0
        if machine.between:
            rate = machine.between.bandwidth * software.link_share
            between = self.between * machine.local / rate
        return inside, between, self.calls * self.hops * software.hop_seconds


def traffic_of(
    wire: Mapping[str, float],
    calls: Mapping[str, int],
    machine: Machine,
    *,
    resident: bool = False,
    at_boundary: bool = False,
    nccl: bool = True,
) -> list[Traffic]:
    """The moves of a step over all ranks, from the bytes and calls that its ledger counts by move.

    Args:
        wire, calls: payload bytes a rank sends in a step, and collectives, by move.
        resident: whole parameters always exist (stages 0 to 2), so that gathers refresh them once, behind
            the first forward pass.
        at_boundary: gradients are reduced behind the last backward pass only.
    """
    gathers: Phase = "first forward" if resident else "both"
    sums: Phase = "last backward" if at_boundary else "backward"
    kinds: tuple[tuple[str, bool, float, Phase], ...] = (
        ("all-gather", True, 1, gathers),
        ("reduce-scatter", False, 1, sums),
        ("all-reduce", False, 0.5, sums),
        ("all-reduce", True, 0.5, sums),
    )
    legs = [
        Leg(move, gather, "all", share * wire[move], calls.get(move, 0), phase)  # type: ignore[arg-type]
        for move, gather, share, phase in kinds
        if wire.get(move)
    ]
    return traffic_over(legs, machine, nccl=nccl)


def traffic_over(
    legs: Sequence[Leg],
    machine: Machine,
    topology: Topology | None = None,
    *,
    nccl: bool = True,
    rank: int = 0,
) -> list[Traffic]:
    """Legs as moves of a rank on links. Gathers are rings on NCCL and pairwise on gloo; reductions
    are pairwise, and rings where NCCL adds (reduce="native"). Over all ranks a ring enters each
    node once; between groups, and inside one, both come to the same bytes on each link, and a ring
    takes more hops. (NCCL may also take a tree, which has fewer hops, or add inside the switch: no
    reductions of it are counted as faster than a ring.)

    Args:
        topology: the groups; None where there are none.
    """
    moves = []
    per_node = machine.local if machine.nodes > 1 else None
    for leg in legs:
        move = "all-gather" if leg.gathers else "reduce-scatter"
        ring = nccl and (leg.gathers or leg.by_backend)
        if topology is None or leg.level == "all":
            way = Traffic.ring if ring else Traffic.pairwise
            moves.append(way(move, leg.nbytes, leg.calls, machine, leg.phase))
        else:
            peers, far = elsewhere(topology, per_node, rank, leg.level)
            between, hops = leg.nbytes * far / peers, peers if ring else 1
            inside = leg.nbytes - between
            moves.append(Traffic(move, inside, between, leg.calls, hops, peers + 1, leg.phase))
    return moves


def links_of(traffic: Sequence[Traffic]) -> dict[str, int]:
    """Bytes by link as an `Account` holds them: of one rank, the mean over the ranks of a node."""
    return {
        "inside": round(sum(t.inside for t in traffic)),
        "between": round(sum(t.between for t in traffic)),
    }


def node_links(
    legs: Sequence[Leg], machine: Machine, topology: Topology, *, nccl: bool = True
) -> dict[str, int]:
    """Bytes by link that all ranks of the first node send."""
    found = [
        links_of(traffic_over(legs, machine, topology, nccl=nccl, rank=rank))
        for rank in range(machine.local)
    ]
    return {link: sum(one[link] for one in found) for link in ("inside", "between")}
