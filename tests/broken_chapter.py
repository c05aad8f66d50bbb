"""A rank of a chapter that ends as `job["how"]` says: `python -m broken_chapter FOLDER RANK`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from onefold.doctor.chapter_runs import as_a_rank


def work(job: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1 ends as asked; rank 0 waits for it, unless all is well."""
    how = job["how"]
    if how == "well":
        return {"rank": rank, "world": os.environ["WORLD_SIZE"], "device": job["device"]}
    if rank == 0 or how == "stands still":
        print("waiting for the other rank", file=sys.stderr, flush=True)
        time.sleep(1000)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(
        "a wheel came off" if how == "raises" else "CUDA out of memory. Tried 20 GiB"
    )


if __name__ == "__main__":
    as_a_rank(work)
