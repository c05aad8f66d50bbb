"""Measuring what one rank computes while the other ranks of its group do the same: matrix products, blocks, copies, optimizer steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from onefold.comm import Group, Place
from onefold.plan.measured import ADAMW_BYTES, BlockPoint, HostLink, MatrixPoint, Points
from onefold.plan.sizes import Sizes

#: Seconds that one timing lasts at least, so that the clock's own cost does not show.
SHORTEST = 0.002
#: Timings of a point, of which the median counts.
REPEATS = 3


@dataclass
class Bench:
    """One rank of a group that measures together: what it times is timed on all ranks at once, and the slowest counts."""

    group: Group
    device: torch.device
    sizes: Sizes

    def place(self, move: str) -> Place:
        return Place(move, "calibration", 0, "doctor")

    def slowest(self, seconds: float) -> float:
        """The greatest of all ranks' values. Collective, so that it also makes ranks start together."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        return float(self.group.gather_values(value, self.place("control")).max())

    def together(self) -> None:
        """Until all ranks are here and this one's device has finished."""
        self.synchronize()
        self.slowest(0.0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], object], count: int = 1) -> float:
        """Seconds of one call, as the mean of `count` in a row."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return (time.perf_counter() - begin) / count

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of `call`, the slowest rank's: the first call is not counted, then at least `REPEATS` within the sizes' budget.

        All ranks make the same number of calls, so `call` may be a collective.
        """
        call()
        self.together()
        times = [self.once(call)]
        if self.slowest(times[0]) < self.sizes.budget_s:  # one interrupted pilot must not decide how much is measured
            times += [self.once(call), self.once(call)]
        pilot = self.slowest(min(times))
        count = max(1, round(SHORTEST / max(pilot, 1e-7)))
        repeats = max(REPEATS, min(50, int(self.sizes.budget_s / (count * pilot))))
        times = times if count == 1 else []
        while len(times) < repeats:
            self.together()
            times.append(self.once(call, count))
        return self.slowest(statistics.median(times))


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


def measure_blocks(bench: Bench) -> tuple[BlockPoint, ...]:
    """A block's forward and backward pass at every width, length and dtype, weights and activations in that dtype."""
    out = []
    for dtype in bench.sizes.dtypes:
        for hidden, tokens in bench.sizes.blocks:
            block = Block(hidden).to(device=bench.device, dtype=getattr(torch, dtype))
            x = torch.randn(1, tokens, hidden, device=bench.device).to(getattr(torch, dtype)).requires_grad_()

            def step(block: Block = block, x: torch.Tensor = x) -> None:
                block.zero_grad(set_to_none=True)
                x.grad = None
                block(x).sum().backward()

            out.append(BlockPoint(dtype, hidden, tokens, block_flops(hidden, tokens) / bench.seconds(step)))
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
