"""Measure matrix products, blocks, copies, optimizer steps and moves between placements, while all
ranks of a group on this machine do the same.

`measure` goes through the numbers of ranks, in several rounds. Ranks that do not take part sleep
meanwhile.

ranks   0 ▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌
        1 (waits, no thread spins)   ▐matrices ... moves overlap steps▌ (waits)                   ▐matrices ... moves overlap steps▌
                 1 rank                           2 ranks                      1 rank                          2 ranks
                                round 1                                                         round 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from onefold.comm import MOVES, Group
from onefold.device import has_streams
from onefold.doctor.bench import Bench
from onefold.doctor.benchmark_blocks import Block, Chain, Gated, Sizes, block_flops
from onefold.doctor.moves import measure_move, measure_overlap
from onefold.machine.kernels import count as kernels_of
from onefold.machine.measured import (
    ADAMW_BYTES,
    AtRanks,
    BlockPoint,
    HostLink,
    MatrixPoint,
    PassPoint,
    Points,
    StepPoint,
    middle,
)
from onefold.recipe.rows import FLAT

#: Seconds a rank waits for another within a measurement.
TIMEOUT = 120.0
#: Runs the reference steps on a bench. The process group holds the bench's ranks; None for a single
#: process.
Steps = Callable[[Bench, "dist.ProcessGroup | None"], tuple[StepPoint, ...]]


def measure(
    sizes: Sizes,
    threads: Mapping[int, int],
    device: torch.device,
    say: Callable[[str], None],
    steps: Steps | None = None,
) -> tuple[tuple[AtRanks, ...], HostLink | None]:
    """Measure with one number of ranks after another, in rounds.
    Collective over all ranks. Rank 0 takes part in every measurement, and only its result is
    complete.

    Args:
        threads: {number of ranks at work: threads of one rank on a CPU}; no number exceeds the
            world size.
        say: called on rank 0 with what is measured next.
        steps: runs the reference steps; None leaves them out.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:  # only rank 0 speaks
        say = lambda text: None  # noqa: E731
    found: dict[int, list[AtRanks]] = {}
    link: HostLink | None = None
    # Idle ranks wait in gloo on the host, where no spinning thread disturbs the measurement
    everyone: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
    members: dict[int, Any] = {
        count: dist.new_group(list(range(count))) if dist.is_initialized() else None
        for count in threads
    }
    groups = {
        count: Group.over(members[count], device, TIMEOUT, FLAT)
        for count in threads
        if rank < count
    }
    for number in range(sizes.rounds):
        for count in threads:
            if rank < count:
                if device.type == "cpu":
                    torch.set_num_threads(threads[count])
                bench = Bench(groups[count], device, sizes)
                found.setdefault(count, []).append(
                    _measure_together(bench, members[count], say, steps)
                )
                # Once, in the very first measurement: it is collective over the ranks there
                if (number, count) == (0, next(iter(threads))):
                    link = measure_host_link(bench)
            if everyone is not None:
                dist.barrier(group=everyone)
    for group in groups.values():
        group.close()
    return tuple(middle(rounds) for rounds in found.values()), link


def _measure_together(
    bench: Bench, members: dist.ProcessGroup | None, say: Callable[[str], None], steps: Steps | None
) -> AtRanks:
    size = bench.group.size
    suffix = f"{size} rank{'s' if size > 1 else ''}"
    say(f"matrix products, {suffix}")
    matrices = measure_matrices(bench)
    say(f"transformer blocks, {suffix}")
    blocks = measure_passes(bench, Block)
    say(f"small operations, {suffix}")
    others = measure_passes(bench, Gated) + measure_passes(bench, Chain)
    say(f"memory, {suffix}")
    copies = measure_copies(bench)
    say(f"optimizer step, {suffix}")
    optimizer = measure_optimizer(bench)
    moves, overlap = {}, None
    if size > 1:
        for move in MOVES:
            say(f"{move}, {suffix}")
            moves[move] = measure_move(bench, move)
        say(f"gather beside compute, {suffix}")
        overlap = measure_overlap(bench)
    taken: tuple[StepPoint, ...] = ()
    if steps is not None:
        say(f"training steps, {suffix}")
        taken = steps(bench, members)
    return AtRanks(
        ranks=size,
        threads=torch.get_num_threads() if bench.device.type == "cpu" else 1,
        matrices=matrices,
        blocks=tuple(
            BlockPoint(p.dtype, hidden, tokens, block_flops(hidden, tokens) / p.seconds)
            for p, hidden, tokens in blocks
        ),
        copies=copies,
        optimizer=optimizer,
        moves=moves,
        overlap=overlap,
        passes=tuple(p for p, _, _ in blocks + others),
        steps=taken,
    )


# -- what a rank computes -------------------------------------------------------------------------


def measure_matrices(bench: Bench) -> tuple[MatrixPoint, ...]:
    """Measure `F.linear` at every size and dtype."""
    out = []
    for dtype in bench.sizes.dtypes:
        for m, n, k in bench.sizes.matrices:
            x = torch.randn(m, k, device=bench.device).to(getattr(torch, dtype))
            w = torch.randn(n, k, device=bench.device).to(getattr(torch, dtype))
            with torch.no_grad():
                seconds = bench.seconds(lambda x=x, w=w: F.linear(x, w))  # type: ignore[misc]
            out.append(MatrixPoint(dtype, m, n, k, 2 * m * n * k / seconds))
    return tuple(out)


def measure_passes(
    bench: Bench, kind: type[Block | Gated | Chain]
) -> list[tuple[PassPoint, int, int]]:
    """Measure forward and backward of one kind of module at every size and dtype. Returns (pass,
    width, tokens) for each. Weights and activations are in the dtype. Gated blocks are measured two
    in a row.
    """
    sizes = {Block: bench.sizes.blocks, Gated: bench.sizes.gated, Chain: bench.sizes.chains}[kind]
    out = []
    for name in bench.sizes.dtypes:
        for hidden, tokens in sizes:
            shape = (tokens, hidden) if kind is Chain else (1, tokens, hidden)
            model = {
                Block: lambda h, t: Block(h),
                Gated: lambda h, t: nn.Sequential(Gated(h), Gated(h)),
                Chain: Chain,
            }[kind](hidden, tokens)
            dtype = getattr(torch, name)
            model.to(device=bench.device, dtype=dtype)
            x = torch.randn(shape, device=bench.device).to(dtype).requires_grad_()

            def step(model: nn.Module = model, x: torch.Tensor = x) -> None:
                model.zero_grad(set_to_none=True)
                x.grad = None
                model(x).sum().backward()

            kernels = kernels_of(step)
            out.append((PassPoint(name, kernels, bench.seconds(step)), hidden, tokens))
    return out


def measure_copies(bench: Bench) -> Points:
    """Measure copies within the device's memory: (bytes read and written, seconds)."""
    out = []
    for nbytes in bench.sizes.copy_bytes:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
        target = torch.ones_like(source)
        out.append((2.0 * nbytes, bench.seconds(lambda s=source, t=target: t.copy_(s))))  # type: ignore[misc]
    return tuple(out)


def measure_optimizer(bench: Bench) -> Points:
    """Measure `torch.optim.AdamW(fused=True)` over one flat fp32 shard: (bytes moved, seconds)."""
    out = []
    for numel in bench.sizes.optimizer_numels:
        shard = nn.Parameter(torch.zeros(numel, device=bench.device))
        shard.grad = torch.full((numel,), 1e-3, device=bench.device)
        optimizer = torch.optim.AdamW([shard], lr=1e-4, fused=True)
        out.append((float(ADAMW_BYTES * numel), bench.seconds(optimizer.step)))
    return tuple(out)


def measure_host_link(bench: Bench) -> HostLink | None:
    """Measure copies between pinned host memory and this rank's GPU; None without a GPU."""
    if not has_streams(bench.device):
        return None
    nbytes = bench.sizes.copy_bytes[-1]
    host = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    down = bench.seconds(lambda: device.copy_(host, non_blocking=True))
    up = bench.seconds(lambda: host.copy_(device, non_blocking=True))
    return HostLink(to_device=nbytes / down, to_host=nbytes / up)
