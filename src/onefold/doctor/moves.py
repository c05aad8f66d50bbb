"""Measure the engine's moves between placements, alone and beside matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from onefold.comm import MOVES
from onefold.device import current_stream, has_streams, new_event
from onefold.doctor.bench import Bench
from onefold.machine.measured import Overlap, Points
from onefold.memory import empty

#: Side of the matrix products that run beside a gather.
SIDE = 512
#: Timings of the overlap over all rounds; their medians count.
ROUNDS = 7


class FlatMoves:
    """The three moves of a flat fp32 buffer of `nbytes` bytes, cut evenly among the ranks."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.bench, self.group = bench, bench.group
        self.shard = max(1, nbytes // 4 // self.group.size)
        self.full = torch.zeros(self.shard * self.group.size, device=bench.device)

    def payload(self, move: str) -> int:
        """Return the bytes that this rank sends, as the traffic ledger counts them."""
        return 4 * self.shard * (self.group.size - 1) * (2 if move == "all-reduce" else 1)

    def call(self, move: str) -> Callable[[], object]:
        moves = (self.all_gather, self.reduce_scatter, self.all_reduce)
        return dict(zip(MOVES, moves, strict=True))[move]

    def all_gather(self) -> None:
        self.group.all_gather(self.full, self.bench.context("all-gather"), 0).wait()

    def reduce_scatter(self) -> torch.Tensor:
        """Exchange intervals and add them up into a received part, in new memory each time, as for
        a gradient.
        """
        own, parts = self._exchange("reduce-scatter")
        total, *others = parts
        for part in (own, *others):
            total.add_(part)
        return total

    def all_reduce(self) -> torch.Tensor:
        """Reduce-scatter into a whole buffer, then send the sums to all ranks."""
        own, parts = self._exchange("all-reduce")
        total = empty(self.full.numel(), torch.float32, self.bench.device)
        mine = self._interval(total, self.group.rank)
        torch.add(own, parts[0], out=mine)
        for part in parts[1:]:
            mine.add_(part)
        sends = [(p, mine) for p in self._peers()]
        recvs = [(p, self._interval(total, p)) for p in self._peers()]
        self.group.exchange(
            sends, recvs, self.bench.context("all-reduce"), 0, move="all-reduce"
        ).wait()
        return total

    def _exchange(self, move: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        recvs = [(p, empty(self.shard, torch.float32, self.bench.device)) for p in self._peers()]
        sends = [(p, self._interval(self.full, p)) for p in self._peers()]
        self.group.exchange(sends, recvs, self.bench.context(move), 0, move=move).wait()
        return self._interval(self.full, self.group.rank), [part for _, part in recvs]

    def _interval(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        return buffer[rank * self.shard : (rank + 1) * self.shard]

    def _peers(self) -> list[int]:
        return [p for p in range(self.group.size) if p != self.group.rank]


def measure_move(bench: Bench, move: str) -> Points:
    """Measure `move` at every size: (payload bytes that one rank sends, seconds)."""
    out = []
    for nbytes in bench.sizes.move_bytes:
        moves = FlatMoves(bench, nbytes)
        out.append((float(moves.payload(move)), bench.seconds(moves.call(move))))
    return tuple(out)


def measure_overlap(bench: Bench) -> Overlap:
    """Measure a gather, matrix products that take about as long, and both at once."""
    gather = FlatMoves(bench, bench.sizes.overlap_bytes)
    a, b = torch.randn(2, SIDE, SIDE, device=bench.device)
    out = torch.empty_like(a)
    alone = bench.seconds(gather.all_gather)
    one = bench.seconds(lambda: torch.mm(a, b, out=out))
    count = max(1, round(alone / one))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    spans: list[tuple[float, float]] = []
    beside = []
    for _ in range(-(-ROUNDS // bench.sizes.rounds)):
        spans += [bench.span(compute), bench.span(gather.all_gather)]
        whole, computed = _both(bench, gather, compute)
        spans.append(whole)
        beside.append(computed)
    seconds = bench.group_seconds(spans)
    medians = [statistics.median(seconds[i::3]) for i in range(3)]
    return Overlap(
        compute=medians[0],
        gather=medians[1],
        together=medians[2],
        compute_beside=bench.greatest(statistics.median(beside)),
    )


def _both(
    bench: Bench, gather: FlatMoves, compute: Callable[[], None]
) -> tuple[tuple[float, float], float]:
    """Run both at once. Returns ((begin, end) of both, seconds of the computation)."""
    streams = has_streams(bench.device)
    marks = [new_event(bench.device, timing=True) for _ in range(2)] if streams else []
    bench.together()
    begin = time.perf_counter()
    pending = gather.group.all_gather(gather.full, bench.context("all-gather"), 0)
    for mark in marks[:1]:
        mark.record(current_stream(bench.device))
    compute()
    for mark in marks[1:]:
        mark.record(current_stream(bench.device))
    computed = time.perf_counter() - begin
    pending.wait()
    bench.synchronize()
    end = time.perf_counter()
    return (begin, end), marks[0].elapsed_time(marks[1]) / 1000 if marks else computed
