"""Seconds of a published system's step in closed form. These reports say what a whole step sends and
computes, and nothing of the order in which it does: how much of the moves is hidden is a share.

    step = compute + exposed moves + optimizer + what the host link and the disk leave exposed

The plan itself schedules the operations of a step (onefold/plan/times.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onefold.plan import hardware
from onefold.plan.hardware import Machine
from onefold.plan.times import slowest_of

SECONDS = ("compute", "exposed communication", "optimizer", "io", "step")


@dataclass(frozen=True)
class Software(hardware.Software):
    """`overlap`: the share of the compute beside it behind which communication can hide."""

    overlap: float = 0.9


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step by one kind of move.

    Attributes:
        inside, between: bytes by link, the mean over the ranks of a node.
        calls: collectives in a step. hops: successive messages in one of them. ranks: of the group.
    """

    move: str
    inside: float
    between: float
    calls: int
    hops: int
    ranks: int

    @classmethod
    def ring(cls, move: str, nbytes: float, calls: int, machine: Machine) -> Traffic:
        """Return a move over all ranks in a ring that enters and leaves each node once: one rank of
        a node sends its bytes to the next node.
        """
        between = nbytes / machine.local if machine.nodes > 1 else 0.0
        return cls(move, nbytes - between, between, calls, machine.ranks - 1, machine.ranks)

    def parts(self, machine: Machine, software: Software) -> tuple[float, float, float]:
        """Return the seconds of all calls on the link inside the node, on the link between nodes,
        and for successive messages.
        """
        if self.ranks <= 1 or not (self.inside + self.between and self.calls):
            return 0.0, 0.0, 0.0
        inside, between = self.inside / (machine.gpu.link * software.link_share), 0.0
        if machine.between:
            rate = machine.between.bandwidth * software.link_share
            between = self.between * machine.local / rate
        return inside, between, self.calls * self.hops * software.hop_seconds

    def seconds(self, machine: Machine, software: Software) -> float:
        """Return the seconds of all calls, one after another."""
        inside, between, hops = self.parts(machine, software)
        return max(inside, between) + hops


@dataclass(frozen=True)
class Work:
    """What one rank does in one optimizer step.

    Attributes:
        flops: done, recompute included.
        precision: of the matrix products.
        optimizer_bytes, host_optimizer_bytes: bytes that updates on the device and on the host move.
        host_bytes, nvme_bytes: bytes over this rank's host link, and to and from NVMe, that hide
            behind any compute.
    """

    flops: float
    traffic: Sequence[Traffic] = ()
    precision: str = "bf16"
    optimizer_bytes: float = 0.0
    host_optimizer_bytes: float = 0.0
    host_bytes: float = 0.0
    nvme_bytes: float = 0.0


@dataclass(frozen=True)
class Times:
    """Seconds of a step by `SECONDS`, `communication` if nothing hides it, and MFU."""

    seconds: Mapping[str, float]
    mfu: float
    communication: float = 0.0

    @property
    def step(self) -> float:
        return self.seconds["step"]


def step_times(work: Work, machine: Machine, software: Software | None = None) -> Times:
    """Return the seconds of a step of this work on one rank of this machine.

    The first gather and the last reduction have nothing to hide behind. Of the others, one unit's
    move inside nodes runs beside another unit's move between nodes.
    """
    soft = software or Software()
    rate = machine.matrix_rate(work.precision) * soft.kernel_share
    compute = work.flops / rate * slowest_of(machine.ranks, soft.straggler)
    moving = [t for t in work.traffic if t.calls and t.inside + t.between and t.ranks > 1]
    # The levels of a move count as one call
    calls = sum(max(t.calls for t in moving if t.move == m) for m in {t.move for t in moving})
    ends = min(1.0, 2 / calls) if calls else 0.0
    inside, between, hops = (sum(t.parts(machine, soft)[i] for t in moving) for i in range(3))
    whole = sum(t.seconds(machine, soft) for t in moving)
    room = soft.overlap * compute
    hideable = (1 - ends) * (max(inside, between) + hops)
    hidden = min(hideable, room)
    link = work.host_bytes / machine.host_link()
    disk = work.nvme_bytes / (machine.host.nvme_bandwidth / machine.local)
    io = max(0.0, max(link, disk) - (room - hidden))
    optimizer = work.optimizer_bytes / machine.gpu.memory_bandwidth
    optimizer += work.host_optimizer_bytes / (machine.host.memory_bandwidth / machine.local)
    parts = compute, hideable - hidden + ends * whole, optimizer, io
    step = sum(parts)
    seconds = dict(zip(SECONDS, (*parts, step), strict=True))
    mfu = work.flops / (step * machine.peak(work.precision)) if step else 0.0
    return Times(seconds, mfu, whole)
