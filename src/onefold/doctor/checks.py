"""The checks of `onefold doctor --check`, and the code with which one rank runs them.

A check is a function of `Here` and `Findings`, called on every rank at once. It notes figures and
errors, and returns the sentence to show with "ok". If it cannot run, it raises `LeftOut` on all
ranks, before its first collective.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onefold.processes.signals import end_with_parent, quiet_third_parties

if TYPE_CHECKING:
    import torch

OK, WRONG, LEFT_OUT = "ok", "wrong", "left out"
#: The most errors of one rank that are shown. Of the others only the number is shown.
MOST = 4


class LeftOut(Exception):
    """A check cannot run here; the text says why."""


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: in the first column.
        ranks: the fewest ranks on which it makes sense.
        run: "module:function" in this room, imported by the ranks.
        advice: what to do if it finds an error.
        limit: seconds that it may take on all ranks; then the ranks are ended.
    """

    name: str
    ranks: int
    run: str
    advice: str
    limit: float = 45.0

    @property
    def function(self) -> Callable[[Here, Findings], str]:
        """The function, which is imported now."""
        module, _, name = self.run.partition(":")
        found = getattr(importlib.import_module(f"onefold.doctor.{module}"), name)
        return cast(Callable[[Here, Findings], str], found)


#: Not a check of its own: the ranks find each other and their devices.
START = Check(
    "start", 1, "", "Look at the ranks' own words above. With NCCL: set NCCL_DEBUG=INFO, and see that every rank has a GPU of its own "
    "and that the machines reach each other (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).", limit=90.0,
)  # fmt: skip

CHECKS: tuple[Check, ...] = (
    Check(
        "collectives", 2, "check_numbers:collectives",
        "torch.distributed itself moves wrong bytes here; Onefold has no part in it. Try NCCL_P2P_DISABLE=1 (then look for PCIe ACS or the "
        "IOMMU in the firmware), NCCL_SHM_DISABLE=1, another NCCL or driver; run dcgmi diag.",
    ),
    Check(
        "ordered sums", 2, "check_numbers:ordered_sums",
        "Gradients are summed wrongly while torch's own collectives are right: an error in Onefold. Attach the JSON to an issue.",
    ),
    Check(
        "native sums", 2, "check_numbers:native_sums",
        "The backend's own reduce-scatter is wrong here. Leave reduce='native' out; try another NCCL or driver.",
    ),
    Check(
        "stages", 2, "check_steps:stages",
        "The stages, or Onefold and DDP, train differently here: an error in Onefold. Attach the JSON to an issue.",
    ),
    Check(
        "two levels", 2, "check_steps:two_levels",
        "Recipes over groups sum differently or send other bytes than the formula says: an error in Onefold. Attach the JSON to an issue.",
    ),
    Check(
        "offload", 1, "check_steps:offload",
        "State that is stored on the host does not train as on the device: leave offload out, and attach the JSON to an issue.",
    ),
    Check(
        "save and reload", 1, "check_steps:save_and_reload",
        "A checkpoint does not hold what was saved: use onefold.save instead of save_async until it does, and attach the JSON to an issue.",
    ),
    Check(
        "memory at rest", 1, "check_device:memory_at_rest",
        "Between steps more or less is held than the plan says, so that a plan cannot be trusted here. Attach the JSON to an issue.",
    ),
    Check(
        "no synchronization", 1, "check_device:no_synchronization",
        "A step makes the host wait for the device, which costs speed and no correctness. Attach the JSON to an issue.",
    ),
    Check(
        "overlap", 1, "check_device:overlap",
        "Communication does not hide behind computing, which costs speed and no correctness. Leave CUDA_LAUNCH_BLOCKING and "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 out; else attach the JSON to an issue.",
    ),
    Check(
        "lost peer", 2, "lost_peer:lost_peer",
        "Ranks do not notice when another has gone, so a run hangs until its launcher ends it. Attach the JSON to an issue.", limit=75.0,
    ),
    Check(
        "compiled blocks", 1, "check_steps:compiled_blocks",
        "Blocks that inductor compiles train differently: leave torch.compile out, and attach the JSON to an issue.", limit=90.0,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Here:
    """Where a check runs.

    Attributes:
        device: of this rank, with its index. backend: moves its tensors between ranks, "gloo" or
            "nccl".
        per_node: ranks of a node, by the launcher. folder: a temporary folder that all ranks of
            this node see.
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    per_node: int
    folder: str

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective, over gloo."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def __str__(self) -> str:
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        return (
            f"{ranks} on {self.backend}, {self.device.type}"
            if self.world > 1
            else f"1 rank, {self.device.type}"
        )


@dataclass
class Findings:
    """What a check notes on one rank: figures for the JSON, and errors."""

    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def expect(self, right: bool, otherwise: str) -> bool:
        """Note `otherwise` unless `right`; returns `right`."""
        if not right:
            self.wrong.append(otherwise)
        return right


@dataclass
class Outcome:
    """The result of a check, on one rank or (after `merge`) on all.

    Attributes:
        status: OK, WRONG or LEFT_OUT. said: one or a few sentences. advice: what to do, "" for
            nothing.
        ended: a rank raised, was ended, or hung, so these ranks cannot run further checks.
        where: the line at which a rank hung.
        ranks: {rank: its status}, if the ranks differ.
    """

    name: str
    status: str
    said: str
    advice: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    where: str = ""
    ranks: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values that `Outcome(**d)` takes."""
        return asdict(self)


def answer(check: Check, here: Here) -> Outcome:
    """Run a check on this rank. An exception becomes part of the outcome."""
    findings, begun = Findings(), time.perf_counter()
    ended, said = False, ""
    try:
        said = check.function(here, findings)
        status = OK
    except LeftOut as reason:
        status, said = LEFT_OUT, str(reason)
    except Exception as error:
        ended, status = True, WRONG
        findings.wrong.append(_told(error))
    if findings.wrong:
        more = len(findings.wrong) - MOST
        status, said = WRONG, "; ".join(findings.wrong[:MOST])
        said += f"; and {more} more" if more > 0 else ""
    seconds = time.perf_counter() - begun
    advice = check.advice if status == WRONG else ""
    return Outcome(check.name, status, said, advice, seconds, findings.figures, ended)


def merge(check: Check, outcomes: dict[int, Outcome], ranks: int = 0) -> Outcome:
    """Merge the ranks' outcomes into one row: wrong if any is wrong, else left out if any is. The
    text is that of the lowest such rank.

    Args:
        ranks: how many ranks there are, if some did not answer; 0 for as many as answered.
    """
    first = next(
        (s for s in (WRONG, LEFT_OUT) if any(o.status == s for o in outcomes.values())), OK
    )
    speaks = min(rank for rank, o in outcomes.items() if o.status == first)
    # If a rank raises in the middle of a check, the others stall. Prefer the rank that raised.
    speaks = min(
        (rank for rank, o in outcomes.items() if o.ended and not o.said.startswith("StallError")),
        default=speaks,
    )
    chosen, differ = outcomes[speaks], len({o.status for o in outcomes.values()}) > 1
    several = first == WRONG and max(ranks, len(outcomes)) > 1
    said = f"rank {speaks}: {chosen.said}" if several else chosen.said
    figures = dict(outcomes[min(outcomes)].figures)
    if first == WRONG and speaks != min(outcomes):
        figures[f"rank {speaks}"] = chosen.figures
    return Outcome(
        check.name, first, said, chosen.advice, max(o.seconds for o in outcomes.values()), figures,
        any(o.ended for o in outcomes.values()), chosen.where,
        {str(rank): o.status for rank, o in sorted(outcomes.items())} if differ else {},
    )  # fmt: skip


def _told(error: BaseException, characters: int = 400) -> str:
    """Describe an exception and the innermost line of Onefold in its traceback."""
    text = " ".join(str(error).split())
    text = text if len(text) <= characters else text[: characters - 1] + "…"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(PACKAGE)] or list(frames)
    at = [f"{f.filename.removeprefix(PACKAGE)}:{f.lineno} in {f.name}" for f in own[-1:]]
    return f"{type(error).__name__}: {text} ({''.join(at) or 'no traceback'})"


#: The package's folder. Other folders on the way may have its name too, such as a checkout's.
PACKAGE = str(Path(__file__).parents[1]) + os.sep
#: Prefix of all keys, because a launcher's store also holds others' keys.
PREFIX = "onefold-check"
#: Timeout of the process group's collectives in seconds. It is longer than the limit of a check
#: between ranks.
STALL = 120.0
#: The signal at which a rank writes its stacks to standard error.
WHERE = signal.SIGUSR1


@dataclass(frozen=True)
class Plan:
    """The task of a generation of ranks.

    Attributes:
        ranks: how many there are. device: "cpu" or "cuda". backend: moves the device's tensors.
        per_node: ranks of a node. checks: names of the checks, in order. folder: for checkpoints.
    """

    ranks: int
    device: str
    backend: str
    per_node: int
    checks: tuple[str, ...]
    folder: str

    def encoded(self) -> str:
        """Return the plan as text, which `decoded` reads."""
        return json.dumps(vars(self))

    @staticmethod
    def decoded(text: str | bytes) -> Plan:
        values = json.loads(text)
        return Plan(**{**values, "checks": tuple(values["checks"])})


def key(generation: int, check: str, rank: int) -> str:
    """Return the store's key of a rank's outcome of a check."""
    return f"{generation}/{check}/{rank}"


def main(host: str, port: int, generation: int, rank: int, parent: int) -> None:
    """Run the plan, and end this process at once, without waiting for its process group."""
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
    # Wait for the end of the generation: leaving earlier would break the others' connections
    store.wait([f"{generation}/over"], timedelta(hours=1))


def begin(plan: Plan, rank: int, store: Any) -> Here:
    """Take a device, join the process group, and run one all-reduce on each backend."""
    import torch
    import torch.distributed as dist

    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = f"cpu:gloo,cuda:{plan.backend}" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=STALL)
    dist.init_process_group(backend, store=store, rank=rank, world_size=plan.ranks, timeout=timeout)
    for at in {torch.device("cpu"), device}:
        total = torch.ones(1, device=at)
        dist.all_reduce(total)
        if float(total) != plan.ranks:
            raise RuntimeError(
                f"the sum of {plan.ranks} ones, one of each rank, is {float(total)} on {at}"
            )
    return Here(rank, plan.ranks, device, plan.backend, plan.per_node, plan.folder)


if __name__ == "__main__":
    # Import this module by name, so that its `LeftOut` is the class that the checks raise
    rank = importlib.import_module("onefold.doctor.checks")
    rank.main(sys.argv[1], *(int(argument) for argument in sys.argv[2:6]))
