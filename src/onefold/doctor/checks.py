"""The checks of `onefold doctor --check`: what they are, and how ranks run them.

A check is a function of `Here`, called on every rank at once. It raises AssertionError where
something is wrong, and returns the sentence to show with "ok". If it cannot run, it raises
`LeftOut` on all ranks, before its first collective.

    this process ── rank 0      main(FOLDER, DEVICE, BACKEND, *CHECKS)
                └── rank 1      ...

Ranks run one check after another, and rank 0 writes a row for each. If a rank dies or stands still, the
row says so, and new ranks go on with the next check. Under a launcher its own ranks run them, once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from onefold.doctor import numbers, steps
from onefold.doctor.model import Here, LeftOut
from onefold.doctor.ranks import launch

OK, WRONG, LEFT_OUT = "ok", "wrong", "left out"
#: The rows that ranks have written, in their folder.
ROWS = "rows.jsonl"
#: Seconds that the other ranks get to come once one has raised, and those for the start.
GRACE, START = 5.0, 90.0
#: What to do if the ranks do not start.
STARTING = (
    "With NCCL: set NCCL_DEBUG=INFO, and see that every rank has a GPU of its own and that the machines"
    " reach each other (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)."
)


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: in the first column.
        ranks: the fewest ranks on which it makes sense.
        run: the function.
        advice: what to do if it finds an error.
        limit: seconds after which a rank is ended.
    """

    name: str
    ranks: int
    run: Callable[[Here], str]
    advice: str
    limit: float = 60.0


ATTACH = "Attach the JSON to an issue."
CHECKS: tuple[Check, ...] = (
    Check(
        "collectives", 2, numbers.collectives,
        "torch.distributed itself moves wrong bytes here; Onefold has no part in it. Try NCCL_P2P_DISABLE=1 (then look for PCIe ACS or the "
        "IOMMU in the firmware), NCCL_SHM_DISABLE=1, another NCCL or driver; run dcgmi diag.",
    ),
    Check("stages", 2, steps.stages, f"The stages, or Onefold and DDP, train differently here: an error in Onefold. {ATTACH}", 120.0),
    Check(
        "two levels", 2, steps.two_levels,
        f"Recipes over groups sum differently or send other bytes than the formula says: an error in Onefold. {ATTACH}",
    ),
    Check(
        "offload", 1, steps.offload,
        f"State that is stored on the host does not train as on the device: leave offload out. {ATTACH}",
    ),
    Check(
        "save and reload", 1, steps.save_and_reload,
        f"A checkpoint does not hold what was saved: use onefold.save instead of save_async until it does. {ATTACH}",
    ),
    Check(
        "memory at rest", 1, steps.memory_at_rest,
        f"Between steps more or less is held than the plan says, so that a plan cannot be trusted here. {ATTACH}",
    ),
    Check(
        "no synchronization", 1, steps.no_synchronization,
        f"A step makes the host wait for the device, which costs speed and no correctness. {ATTACH}",
    ),
    Check(
        "overlap", 2, steps.overlap,
        "Communication does not hide behind computing, which costs speed and no correctness. Leave CUDA_LAUNCH_BLOCKING and "
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 out. {ATTACH}",
    ),
    Check(
        "lost peer", 2, steps.lost_peer,
        f"Ranks do not notice when another has gone, so a run hangs until its launcher ends it. {ATTACH}", 90.0,
    ),
    Check(
        "compiled blocks", 1, steps.compiled_blocks,
        f"Blocks that inductor compiles train differently: leave torch.compile out. {ATTACH}", 120.0,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The result of a check on all ranks: OK, WRONG or LEFT_OUT, a sentence, and what to do."""

    name: str
    status: str
    said: str
    advice: str = ""
    seconds: float = 0.0


def run_checks(here: Here, checks: Sequence[Check], put: Callable[[Outcome], object]) -> None:
    """Run one check after another on this rank. Rank 0 calls `put` with each outcome. A rank that
    stands still, also because another has raised, writes its stacks to standard error and ends.
    Collective.
    """
    for check in checks:
        begun, first = time.monotonic(), Path(here.folder, f"{check.name} failed")
        faulthandler.dump_traceback_later(check.limit, exit=True)
        try:
            if check.ranks > here.world_size:
                raise LeftOut(f"one rank sends nothing; give it {check.ranks}")
            status, said = OK, check.run(here)
        except LeftOut as why:
            status, said = LEFT_OUT, str(why)
        except Exception as error:
            status, said = WRONG, f"rank {here.rank}: {_told(error)}"
            # Another rank was first, or this node does not share the folder
            with contextlib.suppress(OSError), first.open("x") as file:
                file.write(said)
            faulthandler.dump_traceback_later(GRACE, exit=True)
        outcomes = here.gather((status, said))
        faulthandler.cancel_dump_traceback_later()
        for kind in (WRONG, LEFT_OUT):
            status, said = next((o for o in outcomes if o[0] == kind), (status, said))
            if status == kind:
                break
        if here.rank == 0:
            said = first.read_text() if first.exists() else said
            advice = check.advice if status == WRONG else ""
            seconds = round(time.monotonic() - begun, 2)
            put(Outcome(check.name, status, said, advice, seconds))


def _told(error: BaseException) -> str:
    """Describe an exception and the innermost line of its traceback."""
    text, at = " ".join(str(error).split())[:400], traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(at.filename).name}:{at.lineno})"


def begin(folder: str, device: str, backend: str) -> Here:
    """Join the process group that a launcher's variables describe, and return where this rank is."""
    import torch.distributed as dist

    from onefold.processes.ranks import join

    ranks = join(device, START, backend)
    control = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
    return Here(**{**vars(ranks), "control": control}, folder=folder)


def check_launched(device: str, gpus: int) -> Sequence[Outcome]:
    """Run the checks as a rank that a launcher has started. Rank 0 gets the outcomes."""
    shared = device != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus
    rows = list[Outcome]()
    # In the working folder, which several nodes usually share
    with tempfile.TemporaryDirectory(prefix=".onefold-check-", dir=".") as own:
        here = begin(own, device, "gloo" if shared else "nccl")
        run_checks(replace(here, folder=here.gather(os.path.abspath(own))[0]), CHECKS, rows.append)
        here.gather(None)
    return rows


def main(folder: str, device: str, backend: str, *names: str) -> None:
    """Run checks as one rank that `check_here` has started."""
    faulthandler.dump_traceback_later(START, exit=True)
    here, rows = begin(folder, device, backend), Path(folder, ROWS)
    if here.rank == 0:
        rows.touch()

    def put(outcome: Outcome) -> None:
        with rows.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    known = {check.name: check for check in CHECKS}
    run_checks(here, [known[name] for name in names], put)
    os._exit(0)  # without waiting for the process groups


def check_here(
    device: str, gpus: int, ranks: int | None, module: str = "onefold.doctor.checks"
) -> Iterator[Outcome]:
    """Check this machine with ranks of its own, and yield a row for each check.

    With one GPU the checks between ranks run on two ranks that share it, over gloo.

    Args:
        ranks: how many; None for one a GPU, or two on a CPU.
    """
    alone = [check for check in CHECKS if check.ranks == 1]
    casts: list[tuple[int, str, Sequence[Check]]] = [
        (ranks or max(2, gpus), "gloo" if device == "cpu" else "nccl", CHECKS)
    ]
    if device != "cpu" and gpus == 1 and ranks != 1:
        casts = [(ranks or 2, "gloo", [c for c in CHECKS if c.ranks > 1]), (1, "nccl", alone)]
    for count, backend, waiting in casts:
        while waiting:
            with tempfile.TemporaryDirectory(prefix="onefold-check-") as folder:
                names = [check.name for check in waiting]
                given = (module, folder, device, backend, *names)
                failed = launch(count, Path(folder), *given)
                rows = Path(folder, ROWS)
                if failed and not rows.exists():
                    yield Outcome("start", WRONG, failed, STARTING)
                    why = f"{count} ranks on {backend}, {device} did not start"
                    yield from (Outcome(name, LEFT_OUT, why) for name in names)
                    break
                found = [Outcome(**json.loads(line)) for line in rows.read_text().splitlines()]
                yield from found
                waiting = waiting[len(found) :]
                if failed and waiting:
                    check, *waiting = waiting
                    first = Path(folder, f"{check.name} failed")
                    # Where one was killed, the others raised only because of that
                    raised = first.exists() and "SIGKILL" not in failed
                    said = first.read_text() if raised else failed
                    yield Outcome(check.name, WRONG, said, check.advice)
