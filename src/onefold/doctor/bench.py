"""Ranks that time things together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onefold.comm import CollectiveContext, Group
from onefold.device import synchronize
from onefold.doctor.benchmark_blocks import Sizes

#: Seconds that one timing lasts at least, so that neither the clock's own cost nor the ranks'
#: waking up shows.
SHORTEST = 0.004
#: Timings of a point over all rounds, of which the median counts.
REPEATS = 3


@dataclass
class Bench:
    """One rank of a group that measures together: what it times is timed on all ranks at once, from
    the first's begin to the last's end.

    [Note: the group's seconds] A step ends when its last rank does. Where ranks outnumber cores,
    the system lets some run to their end before it lets others begin: each then sees a processor of its own on its own clock (4 ranks on
    2 cores: 0.5 to 0.9 of the time that passes for all). The ranks of a calibration are on one
    machine and read one clock, so their begins and ends can be compared.
    """

    group: Group
    device: torch.device
    sizes: Sizes

    def context(self, move: str) -> CollectiveContext:
        return CollectiveContext(move, "calibration", 0, "doctor")

    def together(self) -> None:
        """Until all ranks are here and this one's device has finished."""
        self.synchronize()
        self._every([0.0])

    def synchronize(self) -> None:
        synchronize(self.device)

    def span(self, call: Callable[[], object], count: int = 1) -> tuple[float, float]:
        """(begin, end) of `count` calls in a row on this rank, which begins when all are there.
        Collective.
        """
        self.together()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return begin, time.perf_counter()

    def group_seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds that passed for the group in each span, the same on all ranks. Collective; see
        [Note: the group's seconds].
        """
        every = self._every([time for span in spans for time in span])
        begins, ends = every[:, 0::2].min(dim=0).values, every[:, 1::2].max(dim=0).values
        return [float(seconds) for seconds in ends - begins]

    def greatest(self, value: float) -> float:
        """The greatest of all ranks' values. Collective."""
        return float(self._every([value]).max())

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of `call` for the group: the first call is not counted, then as many as
        the sizes' budget has room for.

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
        """[ranks, len(values)] float64 on the host. Collective; waits for all."""
        mine = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
        return torch.stack(
            [
                part.view(torch.float64)
                for part in self.group.exchange_control(mine, self.context("control"))
            ]
        )
