"""Measuring what one rank computes while the other ranks of its group do the same: matrix products,
blocks, copies, optimizer steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from onefold.comm import CollectiveContext, Group
from onefold.device import has_streams, synchronize
from onefold.plan.benchmark_blocks import Block, Chain, Gated, block_flops
from onefold.plan.counting import count
from onefold.plan.measured import ADAMW_BYTES, BlockPoint, HostLink, MatrixPoint, PassPoint, Points
from onefold.plan.sizes import Sizes

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
    the system lets some run to their end
    before it lets others begin: each then sees a processor of its own on its own clock (4 ranks on
    2 cores: 0.5 to 0.9 of the time that passes for all). The ranks of a calibration are on one
    machine and read one clock, so their begins and ends can be compared.
    """

    group: Group
    device: torch.device
    sizes: Sizes

    def place(self, move: str) -> CollectiveContext:
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
                for part in self.group.exchange_control(mine, self.place("control"))
            ]
        )


def measure_matrices(bench: Bench) -> tuple[MatrixPoint, ...]:
    """`F.linear` at every size and dtype."""
    out = []
    for dtype in bench.sizes.dtypes:
        for m, n, k in bench.sizes.matrices:
            x = torch.randn(m, k, device=bench.device).to(getattr(torch, dtype))
            w = torch.randn(n, k, device=bench.device).to(getattr(torch, dtype))
            with torch.no_grad():
                seconds = bench.seconds(lambda x=x, w=w: F.linear(x, w))  # type: ignore[misc]
            out.append(MatrixPoint(dtype, m, n, k, 2 * m * n * k / seconds))
    return tuple(out)


def measure_blocks(bench: Bench) -> tuple[tuple[BlockPoint, ...], tuple[PassPoint, ...]]:
    """A block's forward and backward pass at every width, length and dtype, weights and activations
    in that dtype; the same as passes.
    """
    out, passes = [], []
    for dtype in bench.sizes.dtypes:
        for hidden, tokens in bench.sizes.blocks:
            block = Block(hidden).to(device=bench.device, dtype=getattr(torch, dtype))
            x = (
                torch.randn(1, tokens, hidden, device=bench.device)
                .to(getattr(torch, dtype))
                .requires_grad_()
            )

            def step(block: Block = block, x: torch.Tensor = x) -> None:
                block.zero_grad(set_to_none=True)
                x.grad = None
                block(x).sum().backward()

            kernels, seconds = count(step), bench.seconds(step)
            out.append(BlockPoint(dtype, hidden, tokens, block_flops(hidden, tokens) / seconds))
            passes.append(PassPoint(dtype, kernels, seconds))
    return tuple(out), tuple(passes)


def measure_others(bench: Bench) -> tuple[PassPoint, ...]:
    """Forward and backward pass of two `Gated` blocks and of a `Chain`, at every size and dtype."""
    out = []
    for dtype in (getattr(torch, name) for name in bench.sizes.dtypes):
        models: list[tuple[nn.Module, int, int]] = [
            *((nn.Sequential(Gated(h), Gated(h)), h, t) for h, t in bench.sizes.gated),
            *((Chain(h, t), h, t) for h, t in bench.sizes.chains),
        ]
        for model, hidden, tokens in models:
            model.to(device=bench.device, dtype=dtype)
            shape = (tokens, hidden) if isinstance(model, Chain) else (1, tokens, hidden)
            x = torch.randn(shape, device=bench.device).to(dtype).requires_grad_()

            def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                model.zero_grad(set_to_none=True)
                x.grad = None
                model(x).sum().backward()

            kernels = count(step)
            out.append(PassPoint(str(dtype).removeprefix("torch."), kernels, bench.seconds(step)))
    return tuple(out)


def measure_copies(bench: Bench) -> Points:
    """(bytes read and written, seconds) of copies within the device's memory."""
    out = []
    for nbytes in bench.sizes.copy_bytes:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
        target = torch.ones_like(source)
        out.append((2.0 * nbytes, bench.seconds(lambda s=source, t=target: t.copy_(s))))  # type: ignore[misc]
    return tuple(out)


def measure_optimizer(bench: Bench) -> Points:
    """(bytes moved, seconds) of `torch.optim.AdamW(fused=True)` over one flat fp32 shard."""
    out = []
    for numel in bench.sizes.optimizer_numels:
        shard = nn.Parameter(torch.zeros(numel, device=bench.device))
        shard.grad = torch.full((numel,), 1e-3, device=bench.device)
        optimizer = torch.optim.AdamW([shard], lr=1e-4, fused=True)
        out.append((float(ADAMW_BYTES * numel), bench.seconds(optimizer.step)))
    return tuple(out)


def measure_host_link(bench: Bench) -> HostLink | None:
    """Copies between pinned host memory and this rank's GPU; None without one."""
    if not has_streams(bench.device):
        return None
    nbytes = bench.sizes.copy_bytes[-1]
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    down = bench.seconds(lambda: device.copy_(host, non_blocking=True))
    up = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    return HostLink(to_device=nbytes / down, to_host=nbytes / up)
