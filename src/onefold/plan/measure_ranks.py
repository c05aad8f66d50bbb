"""The whole measurement on one rank: rounds of one number of ranks after another; the ranks beyond
it sleep meanwhile.

ranks   0 ▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌▐matrices blocks ... steps▌▐matrices ... moves overlap steps▌
        1 (waits, no thread spins)   ▐matrices ... moves overlap steps▌ (waits)                   ▐matrices ... moves overlap steps▌
                 1 rank                           2 ranks                      1 rank                          2 ranks
                                round 1                                                         round 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from onefold.comm import Group
from onefold.plan.measure import (
    Bench,
    measure_blocks,
    measure_copies,
    measure_host_link,
    measure_matrices,
    measure_optimizer,
    measure_others,
)
from onefold.plan.measure_moves import measure_move, measure_overlap
from onefold.plan.measured import AtRanks, HostLink, StepPoint, middle
from onefold.plan.schema import MOVES
from onefold.plan.sizes import Sizes
from onefold.recipe.rows import FLAT

#: Seconds a rank waits for another within a measurement.
TIMEOUT = 120.0

#: Takes the reference steps on a bench whose ranks are those of the process group given (None: a
#: lone process).
Steps = Callable[[Bench, "dist.ProcessGroup | None"], tuple[StepPoint, ...]]


def measure(
    sizes: Sizes,
    threads: Mapping[int, int],
    device: torch.device,
    say: Callable[[str], None],
    steps: Steps | None = None,
) -> tuple[tuple[AtRanks, ...], HostLink | None]:
    """Measure with one number of ranks after another, in rounds. Collective over all ranks; rank 0
    takes part in all, and only its result is whole.

    Args:
        threads: of one rank on a CPU, by number of ranks at work; no number is greater than the
            world size.
        say: called on rank 0 with what is measured next.
        steps: takes the reference steps; None leaves them out.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    say = say if rank == 0 else _silent
    found: dict[int, list[AtRanks]] = {}
    link: HostLink | None = None
    # Waits are on the host, where no thread spins beside those that are measured.
    everyone = dist.new_group(backend="gloo") if dist.is_initialized() else None
    members = {
        count: dist.new_group(list(range(count))) if dist.is_initialized() else None
        for count in threads
    }
    groups = {
        count: Group(members[count], device, TIMEOUT, FLAT) for count in threads if rank < count
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
                # Ranks must agree on whether to: some of them come later
                if (number, count) == (0, next(iter(threads))):
                    link = measure_host_link(bench)
            if everyone is not None:
                dist.barrier(group=everyone)
    for group in groups.values():
        group.close()
    return tuple(middle(rounds) for rounds in found.values()), link


def says(counts: Iterable[int], sizes: Sizes, steps: bool) -> int:
    """How many times `measure` will call `say`."""
    return sizes.rounds * sum(5 + steps + (len(MOVES) + 1 if count > 1 else 0) for count in counts)


def _measure_together(
    bench: Bench, members: dist.ProcessGroup | None, say: Callable[[str], None], steps: Steps | None
) -> AtRanks:
    size = bench.group.size
    suffix = f"{size} rank{'s' if size > 1 else ''}"
    say(f"matrix products, {suffix}")
    matrices = measure_matrices(bench)
    say(f"transformer blocks, {suffix}")
    blocks, passes = measure_blocks(bench)
    say(f"small operations, {suffix}")
    passes += measure_others(bench)
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
    threads = torch.get_num_threads() if bench.device.type == "cpu" else 1
    return AtRanks(
        size, threads, matrices, blocks, copies, optimizer, moves, overlap, passes, taken
    )


def _silent(text: str) -> None:
    """Only rank 0 speaks."""
