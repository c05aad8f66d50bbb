"""How long a rank's moves take on the links of a machine, inside nodes and between them, as rings
or as messages to all peers at once.
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
    """What software reaches of the hardware's rates. A plan uses the defaults for a machine that
    was not measured.

    Attributes:
        kernel_share: what a whole transformer reaches of the rate of large products; norms, softmax
            and small products take the rest. Fitted, like hop_seconds, to the Azure report (see
            `benchmarks.validation.systems`).
        link_share: what a collective of large messages reaches of the nominal link. An assumption;
            published runs reach 0.17 to 1.
        overlap: the share of the compute beside it behind which communication can hide. An
            assumption for a schedule that prefetches.
        hop_seconds: one step of a ring, from one rank to the next. A collective over N ranks takes
            N−1 of them: this term grows with N.
        straggler: the spread of the ranks' speeds, an assumption. The slowest of N normally
            distributed ranks is sqrt(2 ln N) deviations behind the mean.
        launch_seconds: what the host takes to launch a kernel or collective: an assumption, in the
            middle of what eager PyTorch takes (3 to 10 µs). Only timelines use it
            (`onefold.simulation.timeline`).
        step_share, move_share: on a calibrated machine, what a step of the engine reaches of the
            rates of its passes and moves, which were measured alone. A share above 1 says that
            parts overlap, or that alone they were slower.
        handed_s: seconds to take over one element of a gradient, in each micro-batch. Like the two
            shares it comes from reference steps (`onefold.plan.efficiency`); without them they are
            1, 1 and 0.
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
        share, positive = "a share above 0 and at most 1", "a number above 0"
        for expected, names, possible in (
            (share, ("kernel_share", "link_share"), lambda x: 0 < x <= 1),
            (positive, ("step_share", "move_share"), lambda x: x > 0),
            ("a share from 0 to 1", ("overlap",), lambda x: 0 <= x <= 1),
            ("0 or more", ("hop_seconds", "straggler", "launch_seconds", "handed_s"), lambda x: x >= 0),
        ):  # fmt: skip
            for name in names:
                if not possible(getattr(self, name)):
                    raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}.")


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step by one kind of move.

    Attributes:
        move: "all-gather", "reduce-scatter" or "all-reduce".
        inside, between: bytes by link, the mean over the ranks of a node. The ledger counts their
            sum.
        calls: collectives in a step.
        hops: successive messages in one collective.
        ranks: of the group.
        phase: the compute behind which it can hide; see `Phase`.
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
        """Return a move over all ranks in a ring that enters and leaves each node once: one rank of
        a node sends its bytes to the next node.

        The ring carries size·(N−1)/N through all adapters of a node together, so the node's
        bandwidth is the divisor.
        """
        between = nbytes / machine.local if machine.nodes > 1 else 0.0
        return cls(move, nbytes - between, between, calls, machine.ranks - 1, machine.ranks, phase)

    @classmethod
    def pairwise(
        cls, move: str, nbytes: float, calls: int, machine: Machine, phase: Phase = "both"
    ) -> Traffic:
        """Return a move from every rank to every other: `per_node` times as many bytes leave the
        node as in a ring. A call takes the time of one message, since all are sent at once (NCCL's
        all-to-all is one group of sends and receives; its documentation, Point-to-point
        communication).
        """
        between = nbytes * (machine.ranks - machine.local) / max(machine.ranks - 1, 1)
        return cls(move, nbytes - between, between, calls, 1, machine.ranks, phase)

    def seconds(self, machine: Machine, software: Software) -> float:
        """Return the seconds of all calls, one after another."""
        inside, between, hops = self.parts(machine, software)
        return max(inside, between) + hops

    def parts(self, machine: Machine, software: Software) -> tuple[float, float, float]:
        """Return the seconds of all calls on the link inside the node, on the link between nodes,
        and for successive messages.
        """
        if self.ranks <= 1 or not (self.nbytes and self.calls):
            return 0.0, 0.0, 0.0
        if machine.measured is not None:
            # All ranks of the machine move at the same time, in any number of groups
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
    """Return the moves of a step over all ranks, from the bytes and calls that a ledger counts.

    Args:
        wire, calls: payload bytes that a rank sends in a step, and collectives, by move.
        resident: whole parameters always exist (stages 0 to 2): gathers refresh them once, behind
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
    """Return legs as a rank's moves on links.

    Gathers are rings on NCCL and pairwise on gloo. Reductions are pairwise, and rings if NCCL adds
    (reduce="native"). Over all ranks a ring enters each node once. Inside a group and between
    groups both send the same bytes over each link, and a ring takes more hops. NCCL may also use a
    tree, which has fewer hops, or add inside the switch: the plan never counts a reduction as
    faster than a ring.

    Args:
        topology: the groups; None: there are none.
    """
    moves = []
    for leg in legs:
        move = "all-gather" if leg.gathers else "reduce-scatter"
        ring = nccl and (leg.gathers or leg.by_backend)
        if topology is None or leg.level == "all":
            way = Traffic.ring if ring else Traffic.pairwise
            moves.append(way(move, leg.nbytes, leg.calls, machine, leg.phase))
        else:
            peers, far = elsewhere(topology, machine.node_ranks, rank, leg.level)
            between, hops = leg.nbytes * far / peers, peers if ring else 1
            inside = leg.nbytes - between
            moves.append(Traffic(move, inside, between, leg.calls, hops, peers + 1, leg.phase))
    return moves


def links_of(traffic: Sequence[Traffic]) -> dict[str, int]:
    """Return one rank's bytes by link, as in an `Account`: the mean over the ranks of a node."""
    return {
        "inside": round(sum(t.inside for t in traffic)),
        "between": round(sum(t.between for t in traffic)),
    }


def node_links(
    legs: Sequence[Leg], machine: Machine, topology: Topology, *, nccl: bool = True
) -> dict[str, int]:
    """Return the bytes by link that all ranks of the first node send."""
    found = [
        links_of(traffic_over(legs, machine, topology, nccl=nccl, rank=rank))
        for rank in range(machine.local)
    ]
    return {link: sum(one[link] for one in found) for link in ("inside", "between")}
