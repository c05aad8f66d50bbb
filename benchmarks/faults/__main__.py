"""The drill of checkpoints: a run killed at random moments, and checkpoints injured at random.

    python -m benchmarks.faults [--kills 200] [--injuries 200] [--seed 0] [--name faults]

Half of the kills come while a checkpoint is being written. After each, the resumed run must be
bit-equal to one that nobody disturbed, and every checkpoint that is left must be whole. Each injury
must be found and named by `verify`, and refused by a load, or loaded as what was saved. Writes
benchmarks/results/NAME.json and NAME.md; ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

from benchmarks import harness
from benchmarks.faults.injuries import drill
from benchmarks.faults.kills import Drill
from benchmarks.faults.ranks import context
from benchmarks.faults.report import markdown

SCHEMA = "onefold-faults/1"


@harness.command(
    "faults",
    __doc__,
    kills=(200, "kills of a run"),
    injuries=(200, "injuries of checkpoints"),
    seed=(0, "of the moments and of the injuries"),
)
def main(options: harness.Options) -> int:
    begun, fork = time.monotonic(), context()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    kills = Drill(fork, options.kills, options.seed, tell)
    kills.go()
    injuries = drill(fork, options.injuries, options.seed, tell)
    found = {
        "seconds": time.monotonic() - begun,
        "kills": [asdict(k) for k in kills.kills],
        "runs": kills.runs,
        "injuries": [asdict(i) for i in injuries],
    }
    harness.keep(options, SCHEMA, markdown, **found)
    wrong = {
        f"{len(kills.kills)} kills": sum(bool(k.wrong) for k in kills.kills),
        f"{len(kills.runs)} runs to the end": sum(map(bool, kills.runs)),
        f"{len(injuries)} injuries": sum(bool(i.wrong) for i in injuries),
    }
    print("; ".join(f"{what}, {bad} wrong" for what, bad in wrong.items()))
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
