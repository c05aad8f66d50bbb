"""One rank of a part of the matrix: `python -m benchmarks.plan_matrix.worker JOB.json RANK`,
started by `benchmarks.peers.launch`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.peers.worker import exit_with_the_launcher, leave, read_job
from benchmarks.plan_matrix.measuring import measure
from benchmarks.plan_matrix.settings import Cell


def main() -> None:
    """Join the others, measure one setting after another, leave."""
    exit_with_the_launcher()
    job, path, rank = read_job()
    torch.set_num_threads(job["setting"]["threads"])
    if job["setting"]["ranks"] > 1:
        store = f"file://{path.with_name('store')}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=job["setting"]["ranks"]
        )
    seen = [
        measure([Cell(**cell) for cell in part], job["rounds"], job["usual"])
        for part in job["settings"]
    ]
    leave({"rank": rank, "settings": seen}, path, rank)


if __name__ == "__main__":
    main()
