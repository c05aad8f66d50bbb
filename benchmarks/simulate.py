"""How long the plan's answers take, and how much memory:
`python -m benchmarks.simulate [--rounds 3] [--name simulate]`.

Each question is a fresh process on two cores, as a user asks it: imports, plan, answer. Time is the
wall's, memory the largest resident set of the process. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import harness, launch

SCHEMA = "onefold-simulate/1"
CORES = 2


@dataclass(frozen=True)
class Question:
    """A command line of `onefold` and its goals: seconds, bytes of memory (None: no goal)."""

    name: str
    arguments: str
    seconds: float
    nbytes: float | None = None


QUESTIONS = (
    Question(
        "plan 70B on 64 GPUs",
        "plan llama-3-70b --gpus 64 --gpu h100-80 --seq 4096 --json",
        10.0,
    ),
    Question(
        "simulate 1T at stage 3 on 1,024 GPUs",
        "plan 1t --gpus 1024 --gpu h200 --stage 3 --offload none --simulate --json",
        120.0,
        4 * 2**30,
    ),
)


def ask(question: Question) -> dict[str, Any]:
    """Wall seconds, largest resident bytes, and what came back.

    Raises:
        RuntimeError: the command did not end well.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES] if hasattr(os, "sched_getaffinity") else []
    begun = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "onefold", *question.arguments.split()],
        env=launch.environment(CORES),
        cwd=launch.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )
    assert child.stdout is not None
    told = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    # What wait4 took, Popen cannot ask for again
    child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    child.stdout.close()
    if child.returncode:
        raise RuntimeError(f"onefold {question.arguments} ended with status {child.returncode}.")
    nbytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seconds": seconds,
        "nbytes": nbytes,
        "processor_s": used.ru_utime + used.ru_stime,
        **_facts(json.loads(told)),
    }


def _facts(answer: dict[str, Any]) -> dict[str, Any]:
    """What shows that the question was answered."""
    ran = answer.get("simulation")
    facts = {
        "parameters": answer["model"]["parameters"],
        "recommended": (answer["recommended"] or {}).get("stage"),
    }
    return facts | (
        {"source": ran["source"], "events": len(ran["events"]), "exact": ran["exact"]}
        if ran
        else {}
    )


@harness.command("simulate", __doc__, rounds=3)
def main(options: harness.Options, questions: Sequence[Question] = QUESTIONS) -> int:
    """0 if every goal was met, else 1."""
    rows = []
    for question in questions:
        runs = [ask(question) for _ in range(options.rounds)]
        seconds, nbytes = median(r["seconds"] for r in runs), max(r["nbytes"] for r in runs)
        met = seconds < question.seconds and (question.nbytes is None or nbytes < question.nbytes)
        rows.append(
            {
                **asdict(question),
                "median_s": seconds,
                "largest_bytes": nbytes,
                "met": met,
                "runs": runs,
            }
        )
        print(
            f"{question.name}: {seconds:.1f} s (goal {question.seconds:.0f}),"
            f" {nbytes / 2**30:.2f} GiB"
        )
    harness.keep(options, SCHEMA, rows=rows)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
