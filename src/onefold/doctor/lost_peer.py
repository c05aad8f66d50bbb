"""A rank that is killed in a training: are the others told, in a StallError, and soon?

Ranks that lose one of them are of no further use, so each rank of the check starts a process for it:
`python -m onefold.doctor.lost_peer STORE RANK RANKS DEVICE BACKEND`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from onefold.doctor.checks import Here, LeftOut
from onefold.processes.signals import end_with_parent

#: The recipe's `stall_timeout`, and the step before which the last rank is killed.
PATIENCE, AT = 5.0, 3


def lost_peer(here: Here) -> str:
    """Kill the last of as many ranks, and see that every other one ends in a StallError."""
    if here.per_node < here.world:
        raise LeftOut("this needs all ranks on one node")
    store = Path(here.folder, "lost peer")
    given = [str(part) for part in (store, here.rank, here.world, here.device, here.backend)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *given],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60.0,
    )  # fmt: skip
    said = " ".join((done.stdout or done.stderr[-400:]).split())[:200]
    expected = -signal.SIGKILL if here.rank == here.world - 1 else 0
    status = done.returncode
    assert status == expected, f"it should have ended with status {expected}, not {status}: {said}"
    return f"the last rank was killed, and the others ended in a StallError: {said}"


def main(store: str, rank: int, ranks: int, device: str, backend: str) -> None:
    """Train until this rank is told, or is the one that is killed."""
    import torch
    import torch.distributed as dist

    import onefold
    from onefold.doctor.model import adamw, one_step, small

    here = Here(rank, ranks, torch.device(device), backend, ranks, "")
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
    where = dist.FileStore(store, ranks)
    dist.init_process_group(backend, store=where, rank=rank, world_size=ranks)
    model = onefold.shard(small(here), onefold.Recipe.zero(3, stall_timeout=PATIENCE))
    optimizer = adamw(model)
    try:
        for step in range(1000):
            if step == AT and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(here, model, optimizer, step)
    except onefold.StallError as error:
        print(error, flush=True)
        os._exit(0)  # without waiting for the one that is gone
    raise RuntimeError("a thousand steps went on without the rank that was killed")


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
