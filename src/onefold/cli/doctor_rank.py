"""One rank of a calibration, started as `python -m onefold.cli.doctor_rank FOLDER RANK` by
`onefold.cli.doctor_ranks`.

Ranks meet through a file in FOLDER. Rank 0 says on its standard output what is measured next, a
line each, and leaves the figures in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from onefold.train.quiet import quiet_third_parties
from onefold.train.stop import end_with_parent

JOB, RESULT = "job.json", "result.json"
#: Seconds that ranks wait for each other at the start, while each imports torch.
MEETING = 120.0


def main(folder: Path, rank: int) -> None:
    """Measure with the other ranks. Ends this process by itself: a process group in the middle of
    something would be waited for.
    """
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        end_with_parent(job["parent"])
        quiet_third_parties()
        _measure(folder, rank, job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _measure(folder: Path, rank: int, job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from onefold.cli.doctor_steps import take_steps
    from onefold.plan.benchmark_blocks import Sizes
    from onefold.plan.measure import measure
    from onefold.plan.measured import decode

    world = int(job["world"])
    device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        store = dist.FileStore(str(folder / "rendezvous"), world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=MEETING)
        )
    threads = {int(count): int(number) for count, number in job["threads"].items()}
    at, link = measure(
        decode(Sizes, job["sizes"]),
        threads,
        device,
        lambda text: print(text, flush=True),
        take_steps,
    )
    if rank == 0:
        result = {"at": [asdict(a) for a in at], "host_link": asdict(link) if link else None}
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
