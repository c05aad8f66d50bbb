"""Which algorithm moves a flat buffer fastest on gloo:
`python -m benchmarks.moves [--ranks 2 4] [--mib 1 8 28 110]`.

Alternates all candidates in one run on the same ranks and prints medians in milliseconds; writes
benchmarks/results/moves.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness, launch, pages

SCHEMA = "onefold-moves/1"
ROUNDS, WARM = 12, 2


def candidates(rank: int, size: int, mib: float) -> dict[str, Callable[[], None]]:
    """Moves of an fp32 buffer of `mib` MiB: name -> function. Sums include the local addition."""
    shard = int(mib * 2**20 / 4) // size
    flat, out = torch.randn(shard * size), torch.empty(shard)
    parts = [torch.empty(shard) for _ in range(size)]
    big = torch.empty(shard * size)
    peers = [p for p in range(size) if p != rank]
    cut = [flat[r * shard : (r + 1) * shard] for r in range(size)]

    def finish(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def add(pieces: list[torch.Tensor]) -> None:
        torch.add(pieces[0], pieces[1], out=out)
        for piece in pieces[2:]:
            out.add_(piece)

    def gather_pairwise() -> None:
        finish([dist.irecv(cut[p], p) for p in peers] + [dist.isend(cut[rank], p) for p in peers])

    def gather_broadcasts() -> None:
        finish([dist.broadcast(cut[r], r, async_op=True) for r in range(size)])

    def gather_native() -> None:
        dist.all_gather_single(flat, cut[rank].clone())

    def reduce_pairwise() -> None:
        finish([dist.irecv(parts[p], p) for p in peers] + [dist.isend(cut[p], p) for p in peers])
        add([cut[r] if r == rank else parts[r] for r in range(size)])

    def reduce_all_to_all() -> None:
        dist.all_to_all_single(big, flat)
        add(list(big.view(size, shard)))

    def reduce_native() -> None:
        dist.all_reduce(flat)

    moves = (
        gather_pairwise,
        gather_broadcasts,
        gather_native,
        reduce_pairwise,
        reduce_all_to_all,
        reduce_native,
    )

    def fresh(move: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            flat.fill_(0.1)
            dist.barrier()
            move()

        return run

    return {move.__name__: fresh(move) for move in moves}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Medians of every candidate for every size, in milliseconds."""
    rows = []
    for mib in job["mib"]:
        moves = candidates(job["rank"], job["ranks"], mib)
        seconds: dict[str, list[float]] = {name: [] for name in moves}
        for _, name in harness.in_turns(moves, ROUNDS):
            start = time.perf_counter()
            moves[name]()
            seconds[name].append(time.perf_counter() - start)
        ms = {n: round(1e3 * statistics.median(s[WARM:]), 2) for n, s in seconds.items()}
        rows.append({"ranks": job["ranks"], "mib": mib, "ms": ms})
    return {"rows": rows}


@harness.command(
    "moves",
    __doc__,
    ranks=([2, 4], "how many ranks"),
    mib=([1.0, 8.0, 28.0, 110.0], "sizes of the buffer"),
)
def main(options: harness.Options) -> int:
    found: list[dict[str, Any]] = []
    for size in options.ranks:
        found += launch.all_ranks("benchmarks.moves", {"mib": options.mib}, size)[0]["rows"]
    columns: dict[str, pages.Cell] = {"ranks": pages.shown("ranks")}
    columns["MiB"] = pages.shown("mib", "{:g}")
    for name in found[0]["ms"]:
        columns[name.replace("_", " ")] = lambda row, name=name: f"{row['ms'][name]:.1f}"  # type: ignore[misc]
    pages.show(pages.table(columns, found))
    harness.keep(options, SCHEMA, rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
