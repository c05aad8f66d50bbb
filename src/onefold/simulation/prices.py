"""The seconds of one operation or one collective, by the plan's own time model (plan/times.py).

operation of the model     FLOPs ÷ rate of large products, or bytes read and written ÷ memory bandwidth, whichever is longer;
                           scaled so that a step's operations add up to the plan's figure. On a calibrated machine, its measured cost
operation of the engine    bytes read and written ÷ memory bandwidth: casts, copies, sums, the optimizer's update
collective                 `Traffic` of one call: seconds of each link, and of its hops
copy to or from the host   bytes ÷ rate of the host link while all GPUs of the node move
read or write on a disk     bytes ÷ this rank's share of the node's rate; the first bytes come a latency later
work on the host           bytes read and written ÷ what an update moves there, divided by the node's ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onefold.machine.kernels import Kernels
from onefold.plan.efficiency import measured_software
from onefold.plan.hardware import Machine
from onefold.plan.times import SUMMING_ON_A_GPU, Work, compute_seconds
from onefold.plan.traffic import Traffic

Link = Literal["inside", "between"]


@dataclass(frozen=True)
class Move:
    """One collective: seconds for which each link is busy, and seconds from begin to end."""

    links: dict[Link, float]
    seconds: float


class Prices:
    """Prices operations and collectives, in seconds on one rank of a machine.

    Args:
        precision: of the matrix products.
        hidden, micro_tokens: used on a calibrated machine that was measured by blocks alone; see
            `Work`.
    """

    def __init__(
        self,
        machine: Machine,
        precision: str = "bf16",
        hidden: int = 0,
        micro_tokens: int = 0,
    ) -> None:
        self.machine = machine
        self._like = Work(
            0.0, precision=precision, hidden=hidden, micro_tokens=micro_tokens, kernels=Kernels()
        )
        self.software = measured_software(self._like, machine)
        self._scale = 1.0
        self._planned = self._alone = 0.0

    def operation(self, kernels: Kernels) -> float:
        """Return the seconds of one operation of the model's passes."""
        work = replace(self._like, flops=kernels.flops, kernels=kernels)
        planned = compute_seconds(work, self.machine, self.software)
        if self.machine.measured is not None:
            return planned
        alone = kernels.flops / self.machine.matrix_rate(work.precision)
        alone = max(alone, self.traffic(kernels.product_bytes)) + self.traffic(kernels.other_bytes)
        self._planned += planned
        self._alone += alone
        return alone * self._scale

    def learned(self) -> None:
        """Scale later prices, so that a step like the one so far takes as long as the plan says.

        The plan prices matrix products only, at `Software.kernel_share` of their rate. The share
        that is missing is the time of all other operations.
        """
        if self._alone:
            self._scale = self._planned / self._alone
        self._planned = self._alone = 0.0

    def traffic(self, nbytes: float) -> float:
        """Return the seconds of an operation that reads and writes `nbytes`."""
        return nbytes / self.machine.gpu.memory_bandwidth

    def copy(self, nbytes: float) -> float:
        """Return the seconds of a copy between the device and the host, in one direction."""
        return nbytes / self.machine.host_link()

    @property
    def latency(self) -> float:
        """Seconds from the launch of a read or write to its first bytes."""
        return self.machine.host.nvme_latency

    def disk(self, op: str, nbytes: float) -> float:
        """Return the seconds in which this rank's share of the disk reads ("read") or writes `nbytes`."""
        host = self.machine.host
        rate = host.nvme_bandwidth if op == "read" else host.nvme_writes
        return nbytes / (rate / self.machine.local)

    def on_host(self, nbytes: float) -> float:
        """Return the seconds in which this rank's share of the host reads and writes `nbytes`."""
        return nbytes / (self.machine.host.memory_bandwidth / self.machine.local)

    def adding_up(self, nbytes: float) -> float:
        """Return the seconds of the kernel that adds up the parts of a reduction. It reads and
        writes `nbytes`.
        """
        return self.traffic(nbytes) / SUMMING_ON_A_GPU

    def move(self, move: str, nbytes: int, ranks: Sequence[int], me: int, ring: bool) -> Move:
        """Price a collective in which this rank (`me`) sends `nbytes` to the others of `ranks`.
        `traffic_over` does the same for a whole step.
        """
        machine = self.machine
        if len(ranks) == machine.ranks:
            way = Traffic.ring if ring else Traffic.pairwise
            traffic = way(move, nbytes, 1, machine)
        else:
            peers = [rank for rank in ranks if rank != me]
            far = sum(rank // machine.local != me // machine.local for rank in peers)
            between = nbytes * far / max(len(peers), 1)
            traffic = Traffic(
                move, nbytes - between, between, 1, len(peers) if ring else 1, len(ranks)
            )
        inside, between, hops = traffic.parts(machine, self.software)
        return Move({"inside": inside, "between": between}, max(inside, between) + hops)
