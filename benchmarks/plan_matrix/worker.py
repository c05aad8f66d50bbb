"""One rank of a part of the matrix: `python -m benchmarks.plan_matrix.worker JOB.json RANK`,
started by `benchmarks.peers.launch`.
"""

from __future__ import annotations

from benchmarks.peers.worker import join_over_gloo, leave, read_job
from benchmarks.plan_matrix.measuring import measure
from benchmarks.plan_matrix.settings import Cell


def main() -> None:
    """Join the others, measure one setting after another, leave."""
    job, path, rank = read_job()
    if job["setting"]["ranks"] > 1:
        join_over_gloo(path, rank)
    seen = [
        measure([Cell(**cell) for cell in part], job["rounds"], job["usual"])
        for part in job["settings"]
    ]
    leave({"rank": rank, "settings": seen}, path, rank)


if __name__ == "__main__":
    main()
