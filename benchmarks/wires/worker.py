"""One rank of one side in one turn: `torchrun ... -m benchmarks.wires.worker JOB.json`, started by
`launch.py` on each host.

The ranks stand still while the first of each host reads what its interface has counted, so that no
byte is on its way.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from benchmarks.peers.worker import leave
from benchmarks.wires import counters, sides
from benchmarks.wires.hosts import ADDRESS
from benchmarks.wires.settings import SIDES


def read_all(ledger: Callable[[], dict[str, int]], ranks_a_host: int) -> dict[str, int | None]:
    """Every counter of this rank, and on a host's first rank the host's. Collective."""
    dist.barrier()
    found: dict[str, int | None] = {**counters.socket_counters(os.environ[ADDRESS]), **ledger()}
    if dist.get_rank() % ranks_a_host == 0:
        found |= counters.host_counters()
    dist.barrier()
    return found


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Seconds as a list of steps; bytes over all timed steps, under the names
    of `counters`.

    The last step's batch is the same on all ranks, so that its loss is one number everywhere if all
    train one model.
    """
    setting, rank, ranks_a_host = Setting(**job["setting"]), dist.get_rank(), job["ranks_a_host"]

    def batches(step: int, of: int = rank) -> list[adapters.Batch]:
        return [
            model.micro_batch(setting.model, setting.tokens, step, m, of, setting.ranks)
            for m in range(setting.accumulation)
        ]

    trainer = sides.build(job["side"], setting, model.build(setting.model), ranks_a_host)
    losses = [trainer.step(batches(step)) for step in range(setting.warmup)]
    data = [batches(setting.warmup + step) for step in range(setting.steps - 1)] + [
        batches(setting.warmup + setting.steps - 1, of=0)
    ]
    ledger = counters.ledger_counter(trainer, ranks_a_host, rank)
    before, seconds = read_all(ledger, ranks_a_host), []
    for taken in data:
        begun = time.perf_counter()
        losses.append(trainer.step(taken))
        seconds.append(time.perf_counter() - begun)
    after = read_all(ledger, ranks_a_host)
    dist.barrier()  # a rank that returned would free what another may still be reading
    return {"rank": rank, "losses": losses, "step_s": seconds, **difference(after, before)}


def difference(
    after: dict[str, int | None], before: dict[str, int | None]
) -> dict[str, int | None]:
    """What was counted in between; None where it is not known."""
    out: dict[str, int | None] = {}
    for name, count in after.items():
        first = before[name]
        out[name] = None if count is None or first is None else count - first
    return out


def main() -> None:
    """Read the job, meet the others where torchrun says, measure, leave."""
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job: dict[str, Any] = json.loads(path.read_text())
    torch.set_num_threads(job["setting"]["threads"])
    try:
        adapters.prepare(SIDES[job["side"]].family)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job["timeout"]))
        result = measure(job)
    except BaseException:
        # torchrun's own log tells more of torchrun than of this
        path.with_name(f"rank{rank}.failed").write_text(traceback.format_exc())
        raise
    leave(result, path, rank)


if __name__ == "__main__":
    main()
