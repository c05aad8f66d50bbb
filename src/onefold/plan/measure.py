"""Measuring what one rank computes while the other ranks of its group do the same: matrix products, blocks, copies, optimizer steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onefold.comm import Group, Place
from onefold.plan.counting import count
from onefold.plan.measured import ADAMW_BYTES, BlockPoint, HostLink, MatrixPoint, PassPoint, Points
from onefold.plan.sizes import Sizes

#: Seconds that one timing lasts at least, so that neither the clock's own cost nor the ranks' waking up shows.
SHORTEST = 0.004
#: Timings of a point over all rounds, of which the median counts.
REPEATS = 3


@dataclass
class Bench:
    """One rank of a group that measures together: what it times is timed on all ranks at once, from the first's begin to the last's end.

    [Note: the group's seconds] A step ends when its last rank does. Where ranks outnumber cores, the system lets some run to their end
    before it lets others begin: each then sees a processor of its own on its own clock (4 ranks on 2 cores: 0.65 of the time that passes
    for all). The ranks of a calibration are on one machine and read one clock, so their begins and ends can be compared.
    """

    group: Group
    device: torch.device
    sizes: Sizes

    def place(self, move: str) -> Place:
        return Place(move, "calibration", 0, "doctor")

    def together(self) -> None:
        """Until all ranks are here and this one's device has finished."""
        self.synchronize()
        self._every([0.0])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def span(self, call: Callable[[], object], count: int = 1) -> tuple[float, float]:
        """(begin, end) of `count` calls in a row on this rank, which begins when all are there. Collective."""
        self.together()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return begin, time.perf_counter()

    def group_seconds(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Seconds that passed for the group in each span, the same on all ranks. Collective; see [Note: the group's seconds]."""
        every = self._every([time for span in spans for time in span])
        begins, ends = every[:, 0::2].min(dim=0).values, every[:, 1::2].max(dim=0).values
        return [float(seconds) for seconds in ends - begins]

    def greatest(self, value: float) -> float:
        """The greatest of all ranks' values. Collective."""
        return float(self._every([value]).max())

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of `call` for the group: the first call is not counted, then as many as the sizes' budget has room for.

        All ranks make the same number of calls, so `call` may be a collective.
        """
        call()
        pilot = self.group_seconds([self.span(call)])[0]
        least = -(-REPEATS // self.sizes.rounds)
        count = max(1, round(SHORTEST / max(pilot, 1e-7)))
        budget = self.sizes.budget_s / self.sizes.rounds
        repeats = max(least, min(50, int(budget / (count * max(pilot, 1e-7)))))
        spans = [self.span(call, count) for _ in range(repeats)]
        return statistics.median(self.group_seconds(spans)) / count

    def _every(self, values: Sequence[float]) -> torch.Tensor:
        """[ranks, len(values)] float64 on the host. Collective; waits for all."""
        mine = torch.tensor(values, dtype=torch.float64).view(torch.uint8)
        return torch.stack([part.view(torch.float64) for part in self.group.exchange_control(mine, self.place("control"))])


class Block(nn.Module):
    """A transformer block of the common kind: attention and a feed-forward of four times the width, each behind a layer norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norm_attention, self.norm_ffn = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        b, t, h = x_BTH.shape
        q, k, v = self.qkv(self.norm_attention(x_BTH)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTH = x_BTH + self.out(mixed.transpose(1, 2).reshape(b, t, h))
        return x_BTH + self.down(F.gelu(self.up(self.norm_ffn(x_BTH))))


def block_flops(hidden: int, tokens: int) -> int:
    """Model FLOPs of a block's forward and backward pass over one sequence: 6 a parameter and token, and 12·h·s a token for attention.

    PaLM (2022), appendix B, for one layer of 12·h² parameters; causal masking is not deducted.
    """
    return 6 * 12 * hidden * hidden * tokens + 12 * hidden * tokens * tokens


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
    """A block's forward and backward pass at every width, length and dtype, weights and activations in that dtype; the same as passes."""
    out, passes = [], []
    for dtype in bench.sizes.dtypes:
        for hidden, tokens in bench.sizes.blocks:
            block = Block(hidden).to(device=bench.device, dtype=getattr(torch, dtype))
            x = torch.randn(1, tokens, hidden, device=bench.device).to(getattr(torch, dtype)).requires_grad_()

            def step(block: Block = block, x: torch.Tensor = x) -> None:
                block.zero_grad(set_to_none=True)
                x.grad = None
                block(x).sum().backward()

            kernels, seconds = count(step), bench.seconds(step)
            out.append(BlockPoint(dtype, hidden, tokens, block_flops(hidden, tokens) / seconds))
            passes.append(PassPoint(dtype, kernels, seconds))
    return tuple(out), tuple(passes)


class Chain(nn.Module):
    """What models do between their matrix products: norms by hand, rotations, gates, activations by hand, picking rows: [T, H] → scalar."""

    def __init__(self, hidden: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.register_buffer("place", torch.arange(tokens - 1, -1, -1))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        place: Any = self.place
        for _ in range(3):
            wide = x_TH.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed = self.weight * wide.to(x_TH.dtype)
            left, right = normed.chunk(2, -1)
            x_TH = x_TH + F.silu(torch.cat((-right, left), -1)) * normed
            x_TH = x_TH + 0.5 * normed * (1.0 + torch.tanh(0.8 * (normed + 0.04 * torch.pow(normed, 3.0))))
            x_TH = torch.zeros_like(x_TH).index_add_(0, place, x_TH[place])
        return torch.log_softmax(x_TH.float(), -1).sum()


def measure_chains(bench: Bench) -> tuple[PassPoint, ...]:
    """A chain's forward and backward pass at every size and dtype."""
    out = []
    for dtype in bench.sizes.dtypes:
        for hidden, tokens in bench.sizes.chains:
            chain = Chain(hidden, tokens).to(device=bench.device, dtype=getattr(torch, dtype))
            x = torch.randn(tokens, hidden, device=bench.device).to(getattr(torch, dtype)).requires_grad_()

            def step(chain: Chain = chain, x: torch.Tensor = x) -> None:
                chain.zero_grad(set_to_none=True)
                x.grad = None
                chain(x).backward()

            kernels = count(step)
            out.append(PassPoint(dtype, kernels, bench.seconds(step)))
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
    if bench.device.type != "cuda":
        return None
    nbytes = bench.sizes.copy_bytes[-1]
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    down = bench.seconds(lambda: device.copy_(host, non_blocking=True))
    up = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    return HostLink(to_device=nbytes / down, to_host=nbytes / up)
