"""Is it the same curve? SmolLM2 fine-tuned by `onefold train` at every stage on several numbers of
ranks, on the same samples.

    python -m benchmarks.curves [--stages 0 1 2 3] [--ranks 2 4] [--steps 30] [--seq 64]
    [--global-batch 4]

Prints the losses side by side and the largest differences: between stages on the same ranks
(expected: none), and between numbers of ranks (expected: fp32 rounding). Writes
benchmarks/results/curves.json. Ends with status 1 if a curve differs by more than that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness

SCHEMA = "onefold-curves/1"
ROUNDING = 2e-3  # of the loss, after some tens of steps of Adam on sums taken in another order


def curve(stage: int, ranks: int, args: harness.Options, folder: Path) -> list[float]:
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
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "onefold.cli", "train", "--json", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None and "step" in row]
    if len(losses) != args.steps:
        raise RuntimeError(
            f"stage {stage} on {ranks} ranks left {len(losses)} losses, expected {args.steps}:"
            f" {out}"
        )
    return losses


@harness.command(
    "curves",
    __doc__,
    steps=30,
    model=("smollm2", "as in `onefold train --model`"),
    stages=([0, 1, 2, 3], "which stages"),
    ranks=([2, 4], "how many ranks"),
    seq=(64, "tokens a sample"),
    global_batch=(4, "samples a step"),
)
def main(args: harness.Options) -> int:
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

    def apart(ranks: int, mine: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(mine, first[ranks], strict=True))

    between_stages = max(apart(ranks, c) for (_, ranks), c in curves.items())
    between_ranks = max(apart(args.ranks[0], c) for c in curves.values())
    print(
        f"largest difference between stages on the same ranks: {between_stages:g}; between any two:"
        f" {between_ranks:g}"
    )
    rows = [{"stage": s, "ranks": r, "losses": c} for (s, r), c in curves.items()]
    apart_by = {"between_stages": between_stages, "between_any": between_ranks}
    harness.keep(args, SCHEMA, **apart_by, curves=rows)
    return 0 if between_stages == 0 and between_ranks < ROUNDING else 1


if __name__ == "__main__":
    sys.exit(main())
