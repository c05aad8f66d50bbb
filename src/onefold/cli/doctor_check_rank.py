"""One rank of a check: `python -m onefold.cli.doctor_check_rank HOST PORT GENERATION RANK PARENT`,
started by `onefold.cli.doctor_check`.

Ranks get the plan from the store at HOST:PORT, meet through it, run the plan's checks one after
another and leave each outcome there. A
rank whose check raised ends: what its process group would do next is unknown.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from onefold.cli.doctor_checks import CHECKS, OK, START, WRONG, Check, Here, Outcome, answer
from onefold.train.process import end_with_parent, quiet_third_parties

#: In front of all keys: a launcher's store holds others.
PREFIX = "onefold-check"
#: The signal by which a rank is asked where it stands: it writes its stacks to standard error.
WHERE = signal.SIGUSR1


@dataclass(frozen=True)
class Plan:
    """What a generation of ranks does.

    Attributes:
        ranks: how many there are. device: "cpu" or "cuda". backend: what moves tensors of the
            device.
        per_node: ranks of a node. checks: their names, in order. folder: for checkpoints.
            stall_timeout: seconds of a collective.
    """

    ranks: int
    device: str
    backend: str
    per_node: int
    checks: tuple[str, ...]
    folder: str
    stall_timeout: float

    def encoded(self) -> str:
        """As text, which `decoded` reads."""
        return json.dumps(vars(self))

    @staticmethod
    def decoded(text: str | bytes) -> Plan:
        values = json.loads(text)
        return Plan(**{**values, "checks": tuple(values["checks"])})


def key(generation: int, check: str, rank: int) -> str:
    """Where a rank's outcome of a check is left."""
    return f"{generation}/{check}/{rank}"


def main(host: str, port: int, generation: int, rank: int, parent: int) -> None:
    """Run the plan, and end this process at once: nobody waits for its process group."""
    end_with_parent(parent)
    faulthandler.register(WHERE, all_threads=True)
    try:
        quiet_third_parties()
        _run(host, port, generation, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _run(host: str, port: int, generation: int, rank: int) -> None:
    import torch.distributed as dist

    store = dist.PrefixStore(
        PREFIX, dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=START.limit))
    )
    plan = Plan.decoded(store.get(f"{generation}/plan"))
    known = {check.name: check for check in CHECKS}

    def leave(outcome: Outcome) -> None:
        store.set(key(generation, outcome.name, rank), json.dumps(outcome.to_json()))

    here = begin(plan, rank, dist.PrefixStore(f"ranks-{generation}", store))
    leave(Outcome(START.name, OK, str(here)))
    for name in plan.checks:
        outcome = answer(known[name], here)
        leave(outcome)
        if outcome.ended:
            break
    # Whoever leaves first would break the others' connections
    store.wait([f"{generation}/over"], timedelta(hours=1))


def begin(plan: Plan, rank: int, store: Any) -> Here:
    """Take a device, meet the others, and hear of each of them once by both backends."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = f"cpu:gloo,cuda:{plan.backend}" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=plan.stall_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.ranks, timeout=timeout)
    for at in {torch.device("cpu"), device}:
        total = torch.ones(1, device=at)
        dist.all_reduce(total)
        if float(total) != plan.ranks:
            raise RuntimeError(
                f"the sum of {plan.ranks} ones, one of each rank, is {float(total)} on {at}"
            )
    return Here(rank, plan.ranks, device, plan.backend, plan.per_node, plan.folder)


__all__ = ["CHECKS", "WRONG", "Check", "Plan", "begin", "key", "main"]

if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))
