"""Is it the same curve? SmolLM2 fine-tuned by `onefold train` at every stage on several numbers of
ranks, on the same samples.

    python -m benchmarks.curves [--stages 0 1 2 3] [--ranks 2 4] [--steps 30] [--seq 64]
    [--global-batch 4]

Prints the losses side by side and the largest differences: between stages on the same ranks
(expected: none), and between numbers of ranks (expected: fp32 rounding). Writes
benchmarks/results/curves.json. Ends with status 1 if a curve differs by more than that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import RESULTS

SCHEMA = "onefold-curves/1"
ROUNDING = 2e-3  # of the loss, after some tens of steps of Adam on sums taken in another order


def curve(stage: int, ranks: int, args: argparse.Namespace, folder: Path) -> list[float]:
    """Losses of one run, [steps]."""
    out = folder / f"stage{stage}-ranks{ranks}"
    options = {
        "--model": args.model,
        "--stage": stage,
        "--nproc": ranks,
        "--steps": args.steps,
        "--seq": args.seq,
        "--micro-batch": args.global_batch // ranks,
        "--global-batch": args.global_batch,
        "--lr": 1e-4,
        "--seed": 0,
        "--output": out,
    }
    command = [
        sys.executable,
        "-m",
        "onefold.cli",
        "train",
        "--json",
        *(str(w) for pair in options.items() for w in pair),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None and "step" in row]
    if len(losses) != args.steps:
        raise RuntimeError(
            f"stage {stage} on {ranks} ranks left {len(losses)} losses, expected {args.steps}:"
            f" {out}"
        )
    return losses


def main() -> int:
    parser = harness.parser("curves", __doc__, steps=30, name="curves", output=RESULTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=4)
    args = harness.parsed(parser, None)
    curves: dict[tuple[int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            for stage in args.stages:
                start = time.perf_counter()
                curves[stage, ranks] = losses = curve(stage, ranks, args, Path(folder))
                print(
                    f"stage {stage}, {ranks} ranks: {losses[0]:.6f} -> {losses[-1]:.6f} in"
                    f" {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    first = {ranks: curves[args.stages[0], ranks] for ranks in args.ranks}
    between_stages = max(
        abs(a - b) for (_, ranks), c in curves.items() for a, b in zip(c, first[ranks], strict=True)
    )
    reference = first[args.ranks[0]]
    between_ranks = max(
        abs(a - b) for c in curves.values() for a, b in zip(c, reference, strict=True)
    )
    print(
        f"largest difference between stages on the same ranks: {between_stages:g}; between any two:"
        f" {between_ranks:g}"
    )
    result = {
        **harness.about(args, SCHEMA),
        "between_stages": between_stages,
        "between_any": between_ranks,
        "curves": [{"stage": s, "ranks": r, "losses": c} for (s, r), c in curves.items()],
    }
    harness.keep(args, result)
    return 0 if between_stages == 0 and between_ranks < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
