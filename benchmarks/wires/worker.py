"""One rank of one side in one turn: `torchrun ... -m benchmarks.wires.worker JOB.json`, started by
`launch.py` on each host. Its bytes come from four places that know nothing of each other:

| where | what it counts | headers |
|---|---|---|
| interface | what the host gave its end of the link | one a packet of up to 64 KiB, before it is cut into frames |
| queue | the same as the rate is charged for it | one a frame |
| sockets | payload of a rank's connections, by where the other end is | none |
| ledger | what Onefold says that a rank sent, by the ranks of the move's group | none, nor gloo's |

Interface and queue see acknowledgements and the launchers' few words too. All count from the
beginning: differences are taken, while the ranks stand still, so that no byte is on its way.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import launch, probes
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from benchmarks.wires import sides
from benchmarks.wires.hosts import ADDRESS, INTERFACE, tool


def host_counters() -> dict[str, int | None]:
    """Bytes of the interface, and bytes and dropped packets of the queue that shapes the link."""
    told = subprocess.run(
        [tool("tc"), "-s", "-j", "qdisc", "show", "dev", INTERFACE],
        capture_output=True,
        text=True,
        check=True,
    )
    (root,) = [found for found in json.loads(told.stdout) if found.get("root")]
    sent = probes.interface_bytes_sent(INTERFACE)
    return {"interface_bytes": sent, "queue_bytes": root["bytes"], "dropped": root["drops"]}


def socket_counters(own_address: str) -> dict[str, int | None]:
    """Payload sent to ranks of the own host and of others; None where the kernel does not say."""
    sent = probes.socket_bytes_by_peer()
    if sent is None:
        return {"inside_bytes": None, "between_bytes": None}
    own = ("127.", "::1")
    inside = sum(n for at, n in sent.items() if at == own_address or at.startswith(own))
    return {"inside_bytes": inside, "between_bytes": sum(sent.values()) - inside}


class LedgerCounter:
    """What Onefold's ledger entered since this was made, inside the host and between hosts."""

    def __init__(self, traffic: Any, ranks_a_host: int, rank: int) -> None:
        self._traffic, self._ranks_a_host, self._rank = traffic, ranks_a_host, rank
        traffic.reset()
        traffic.wanted = lambda: True

    def bytes(self) -> dict[str, int]:
        """`ledger_inside`, `ledger_between`, and `control_bytes`, which the ledger keeps apart.

        A move treats the other ranks of its group alike, so what it sent is divided by where they
        are.

        Raises:
            RuntimeError: more moves than the ledger keeps.
        """
        between, host = 0.0, self._rank // self._ranks_a_host
        for event in self._traffic.events:
            others = [rank for rank in read_ranks(event.group) if rank != self._rank]
            away = [rank for rank in others if rank // self._ranks_a_host != host]
            between += event.nbytes * len(away) / max(1, len(others))
        total = self._traffic.total()
        kept = sum(event.nbytes for event in self._traffic.events)
        if kept != total:
            raise RuntimeError(
                f"the ledger kept moves of {kept:,} bytes of {total:,}: measure fewer steps at a"
                " time."
            )
        return {
            "ledger_inside": total - round(between),
            "ledger_between": round(between),
            "control_bytes": self._traffic.control_bytes,
        }


def read_ranks(format_ranks: str) -> list[int]:
    """The ranks of "0-3", "0,2" or "0-1,4": the way groups are named in the ledger."""
    out: list[int] = []
    for part in format_ranks.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def read_all(ledger: Callable[[], dict[str, int]], ranks_a_host: int) -> dict[str, int | None]:
    """Every counter of this rank, and on a host's first rank the host's. Collective."""
    dist.barrier()
    found: dict[str, int | None] = {**socket_counters(os.environ[ADDRESS]), **ledger()}
    if dist.get_rank() % ranks_a_host == 0:
        found |= host_counters()
    dist.barrier()
    return found


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Seconds as a list of steps; bytes over all timed steps.

    The last step's batch is the same on all ranks, so that its loss is one number everywhere if all
    train one model.
    """
    setting, rank, ranks_a_host = Setting(**job["setting"]), dist.get_rank(), job["ranks_a_host"]
    trainer = sides.build(job["side"], setting, model.build(setting.model), ranks_a_host)
    losses = [trainer.step(model.batches(setting, step, rank)) for step in range(setting.warmup)]
    last = setting.warmup + setting.steps - 1
    data = [model.batches(setting, step, rank) for step in range(setting.warmup, last)]
    data.append(model.batches(setting, last, 0))
    ledger: Callable[[], dict[str, int]] = dict
    if isinstance(trainer, adapters.Onefold):
        ledger = LedgerCounter(trainer.engine.traffic, ranks_a_host, rank).bytes
    before, seconds = read_all(ledger, ranks_a_host), []
    for taken in data:
        begun = time.perf_counter()
        losses.append(trainer.step(taken))
        seconds.append(time.perf_counter() - begun)
    after = read_all(ledger, ranks_a_host)
    dist.barrier()  # a rank that returned would free what another may still be reading
    counted = {name: probes.difference(after[name], before[name]) for name in after}
    return {"rank": rank, "losses": losses, "step_s": seconds, **counted}


def main() -> None:
    """Read the job, meet the others where torchrun says, measure, leave."""
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    job: dict[str, Any] = json.loads(path.read_text())
    torch.set_num_threads(job["setting"]["threads"])
    try:
        adapters.prepare(sides.SIDES[job["side"]].family)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=job["timeout"]))
        result = measure(job)
    except BaseException:
        # torchrun's own log tells more of torchrun than of this
        path.with_name(f"rank{rank}.failed").write_text(traceback.format_exc())
        raise
    launch.leave(result, path.parent, rank)


if __name__ == "__main__":
    main()
