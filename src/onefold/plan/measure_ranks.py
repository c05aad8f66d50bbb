"""The whole measurement on one rank, for one number of ranks after another; the ranks beyond it sleep meanwhile.

ranks   0 ▐matrices blocks copies optimizer▌▐matrices ... moves overlap▌
        1        (waits, no thread spins)   ▐matrices ... moves overlap▌
                    1 rank                              2 ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from onefold.comm import Group
from onefold.plan.measure import Bench, measure_blocks, measure_copies, measure_host_link, measure_matrices, measure_optimizer
from onefold.plan.measure_moves import measure_move, measure_overlap
from onefold.plan.measured import AtRanks, HostLink
from onefold.plan.schema import MOVES
from onefold.plan.sizes import Sizes

#: Seconds a rank waits for another within a measurement.
TIMEOUT = 120.0


def measure(
    sizes: Sizes, threads: Mapping[int, int], device: torch.device, say: Callable[[str], None]
) -> tuple[tuple[AtRanks, ...], HostLink | None]:
    """Measure with one number of ranks after another. Collective over all ranks; rank 0 takes part in all, and only its result is whole.

    Args:
        threads: of one rank on a CPU, by number of ranks at work; no number is greater than the world size.
        say: called on rank 0 with what is measured next.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    say = say if rank == 0 else _silent
    out: list[AtRanks] = []
    link: HostLink | None = None
    # Waits are on the host, where no thread spins beside those that are measured.
    everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None
    for count in threads:
        members = dist.new_group(list(range(count))) if dist.is_initialized() else None
        if rank < count:
            if device.type == "cpu":
                torch.set_num_threads(threads[count])
            group = Group(members, device, TIMEOUT)
            bench = Bench(group, device, sizes)
            out.append(_measure_together(bench, say))
            if count == next(iter(threads)):  # ranks must agree on whether to: some of them come later
                link = measure_host_link(bench)
            group.close()
        if everyone is not None:
            dist.barrier(group=everyone)
    return tuple(out), link


def steps(counts: Iterable[int]) -> int:
    """How many times `measure` will call `say`."""
    return sum(4 + (len(MOVES) + 1 if count > 1 else 0) for count in counts)


def _measure_together(bench: Bench, say: Callable[[str], None]) -> AtRanks:
    size = bench.group.size
    suffix = f"{size} rank{'s' if size > 1 else ''}"
    say(f"matrix products, {suffix}")
    matrices = measure_matrices(bench)
    say(f"transformer blocks, {suffix}")
    blocks = measure_blocks(bench)
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
    threads = torch.get_num_threads() if bench.device.type == "cpu" else 1
    return AtRanks(size, threads, matrices, blocks, copies, optimizer, moves, overlap)


def _silent(text: str) -> None:
    """Only rank 0 speaks."""
