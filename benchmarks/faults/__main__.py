"""The drill: a run killed at random moments, and checkpoints injured at random.

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
from benchmarks.harness import RESULTS

SCHEMA = "onefold-faults/1"


def main() -> int:
    parser = harness.parser("faults", __doc__, name="faults", output=RESULTS)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--injuries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = harness.parsed(parser, None)
    begun, fork = time.monotonic(), context()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    kills = Drill(fork, args.kills, args.seed, tell)
    kills.go()
    injuries = drill(fork, args.injuries, args.seed, tell)
    found = {
        **harness.about(args, SCHEMA),
        "seconds": time.monotonic() - begun,
        "kills": [asdict(k) for k in kills.kills],
        "runs": kills.runs,
        "injuries": [asdict(i) for i in injuries],
    }
    harness.keep(args, found, markdown(found))
    wrong = (
        sum(bool(k.wrong) for k in kills.kills),
        sum(map(bool, kills.runs)),
        sum(bool(i.wrong) for i in injuries),
    )
    counts = zip(
        (kills.kills, kills.runs, injuries),
        ("kills", "runs to the end", "injuries"),
        wrong,
        strict=True,
    )
    print("; ".join(f"{len(all_of)} {what}, {bad} wrong" for all_of, what, bad in counts))
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
