"""Time calls on several ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onefold.comm import CollectiveContext, Group
from onefold.device import synchronize
from onefold.doctor.benchmark_blocks import Sizes

#: The fewest seconds of one timing, so that the cost of the clock and of waking ranks up is small.
SHORTEST = 0.004
#: The fewest timings of a point, over all rounds; their median counts.
REPEATS = 3


@dataclass
class Bench:
    """One rank of a group that measures together. It times a call on all ranks at once, from the
    first rank's begin to the last rank's end.

    [Note: the group's seconds] A step ends when its last rank does. With more ranks than cores, the
    system may run some ranks to their end before others begin. Each rank's own clock then shows the
    time of an undisturbed processor (4 ranks on 2 cores: 0.5 to 0.9 of the group's time). The ranks
    of a calibration are on one machine and read one clock, so begins and ends can be compared.
    """

    group: Group
    device: torch.device
    sizes: Sizes

    def context(self, move: str) -> CollectiveContext:
        return CollectiveContext(move, "calibration", 0, "doctor")

    def together(self) -> None:
        """Wait until this rank's device has finished and all ranks are here. Collective."""
        self.synchronize()
        self._every([0.0])

    def synchronize(self) -> None:
        synchronize(self.device)

    def span(self, call: Callable[[], object], count: int = 1) -> tuple[float, float]:
        """Time `count` calls in a row on this rank, once all ranks are here.
        Returns (begin, end) in seconds. Collective.
        """
        self.together()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return begin, time.perf_counter()

    def group_seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Return the group's seconds of each span, the same on all ranks. Collective; see [Note:
        the group's seconds].
        """
        every = self._every([time for span in spans for time in span])
        begins, ends = every[:, 0::2].min(dim=0).values, every[:, 1::2].max(dim=0).values
        return [float(seconds) for seconds in ends - begins]

    def greatest(self, value: float) -> float:
        """Return the greatest of all ranks' values. Collective."""
        return float(self._every([value]).max())

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the group's median seconds of `call`. The first call does not count; then it is
        called as often as the budget of `Sizes` allows.

        All ranks make the same number of calls, so `call` may be a collective.
        """
        call()
        spans = [self.span(call)]
        pilot = self.group_seconds(spans)[0]
        least = -(-REPEATS // self.sizes.rounds)
        count = max(1, round(SHORTEST / max(pilot, 1e-7)))
        budget = self.sizes.budget_s / self.sizes.rounds
        repeats = max(least, min(50, int(budget / (count * max(pilot, 1e-7)))))
        spans = spans if count == 1 else []
        while len(spans) < repeats:
            spans.append(self.span(call, count))
        return statistics.median(self.group_seconds(spans)) / count

    def _every(self, values: Sequence[float]) -> torch.Tensor:
        """Gather all ranks' values: [ranks, len(values)] float64 on the host. Collective."""
        mine = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.uint8)
        return torch.stack(
            [
                part.view(torch.float64)
                for part in self.group.exchange_control(mine, self.context("control"))
            ]
        )
