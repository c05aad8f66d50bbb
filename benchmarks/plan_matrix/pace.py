"""Whether the machine runs as fast as when it was calibrated: on shared hosts it changes by the
minute, and a plan cannot know.

A round of timings counts if what a calibration timed as well, a block's forward and backward pass
on all ranks at once, took about what it took then, before the round and after it. Rounds that do
not count are repeated while patience lasts; then they count all the same, and the row says at which
pace it was measured.

    pace      1.0     1.0     1.4     1.3     1.0     1.1          seconds of the block now ÷ at calibration
    round       ▐─ok──▌▐─again─▌▐─again─▌▐─again─▌▐─ok──▌
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from onefold.doctor.benchmark_blocks import Block, block_flops

#: Width and tokens of the block, which every calibration of a CPU measures (`Sizes.blocks`).
HIDDEN, TOKENS = 256, 256
#: Passes of one look, of which the median counts.
PASSES = 5
#: Paces that count.
SLOWEST, FASTEST = 1.15, 0.85
#: Seconds to wait where the pace is none of them.
PAUSE = 1.0


def expected(block_rate: float) -> float:
    """Seconds of the block's passes, from FLOP/s of it as they were calibrated."""
    return block_flops(HIDDEN, TOKENS) / block_rate


@dataclass
class Pace:
    """Looks at the machine's pace. Collective over all ranks, who agree on what they see.

    Attributes:
        usual: seconds at calibration, by `expected`.
        patience: seconds that may be spent on rounds that do not count and on waiting.
    """

    usual: float
    patience: float
    seen: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block, self.x = Block(HIDDEN), torch.randn(1, TOKENS, HIDDEN, requires_grad=True)

    def now(self) -> float:
        """Seconds of the block on all ranks together ÷ the usual."""
        times = []
        for _ in range(PASSES):
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            self.block.zero_grad(set_to_none=True)
            self.block(self.x).sum().backward()
            times.append(_span(begin, time.perf_counter()))
        return sorted(times)[PASSES // 2] / self.usual

    def counts(self, pace: float) -> bool:
        return FASTEST <= pace <= SLOWEST

    def wait(self) -> float:
        """The pace, once it is the usual or patience is at an end."""
        pace = self.now()
        while not self.counts(pace) and self.patience > 0:
            self.spend(PAUSE)
            time.sleep(PAUSE)
            pace = self.now()
        return pace

    def spend(self, seconds: float) -> None:
        """These seconds were in vain."""
        self.patience -= _greatest(seconds)


def _span(begin: float, end: float) -> float:
    """From the first rank's begin to the last one's end: all read one machine's clock."""
    return _greatest(end) + _greatest(-begin)


def _greatest(value: float) -> float:
    if not dist.is_initialized():
        return value
    every = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)
