"""The proof of the plan: every setting planned, then trained on real ranks, and both put side by
side, line by line.

    python -m benchmarks.plan_matrix [--quick] [--rounds 7] [--ranks 1 2 4] [--architectures gpt2
    llama mixtral] [--name plan_matrix]

Stages 0 to 3 × fp32 and bf16 × accumulation 1 and 4 × checkpointing none and full × 1, 2, 4 ranks ×
three architectures. Bytes at rest must agree within 1 MiB, bytes on the wire exactly, the peak of
the engine's ledger within 5 %, and nothing may exceed the printed bound. Times are judged where
`onefold doctor --calibrate --ranks 1,2,4` has measured this machine: within 25 %, and the order of
the stages right (`planning.orders` says when two stages are a tie). Rounds count while the machine
runs at the pace that it was calibrated at (`pace.py`). `--quick` is a part of it and times nothing.
Writes benchmarks/results/NAME.json and NAME.md; ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import harness
from benchmarks.launch import join as meet
from benchmarks.launch import run_ranks
from benchmarks.plan_matrix import measuring
from benchmarks.plan_matrix.pace import HIDDEN, TOKENS, expected
from benchmarks.plan_matrix.planning import judge, orders, predict
from benchmarks.plan_matrix.report import markdown
from benchmarks.plan_matrix.settings import ARCHITECTURES, Cell, by_setting, cells
from onefold.machine.calibration import Calibration, CalibrationError

SCHEMA = "onefold-plan-matrix/1"


def measured(
    settings: list[list[Cell]], rounds: int, threads: int, timeout: float
) -> list[list[list[dict[str, Any]]]]:
    """What each rank saw of each cell, [setting][stage][rank]; all settings have the same ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    first = settings[0][0]
    job = {"rounds": rounds, "usual": usual(first.ranks)}
    job["settings"] = [[c.to_json() for c in part] for part in settings]
    how: Any = {"threads": threads, "timeout": timeout}
    ran = run_ranks("benchmarks.plan_matrix.__main__", job, first.ranks, **how)
    if ran["status"] != "ok":
        raise RuntimeError(f"{first} and {sum(map(len, settings)) - 1} more: {ran['error']}")
    return [
        [[rank["settings"][i][j] for rank in ran["ranks"]] for j in range(len(part))]
        for i, part in enumerate(settings)
    ]


def join(job: dict[str, Any]) -> None:
    """One rank alone meets nobody."""
    if job["ranks"] > 1:
        meet(job)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """What one rank sees, one setting after another."""
    parts = [[Cell(**cell) for cell in part] for part in job["settings"]]
    seen = [measuring.measure(part, job["rounds"], job["usual"]) for part in parts]
    return {"rank": job["rank"], "settings": seen}


def usual(ranks: int) -> float:
    """Seconds of the pace's block at the machine's calibration; 0 without one."""
    try:
        return expected(Calibration.load().block_rate(HIDDEN, TOKENS, "float32", ranks))
    except CalibrationError:
        return 0.0


def group_seconds(ranks: list[dict[str, Any]]) -> list[float]:
    """Seconds of each round's step, from the first rank's begin to the last one's end."""
    return [
        max(end for _, end in spans) - min(begin for begin, _ in spans)
        for spans in zip(*(r["spans"] for r in ranks), strict=True)
    ]


def rows_of(part: list[Cell], rounds: int, threads: int, timeout: float) -> list[dict[str, Any]]:
    """One row a cell: rank 0's figures, what is wrong on any rank, and the median step."""
    settings, rows = by_setting(part), []
    for cells_, seen in zip(settings, measured(settings, rounds, threads, timeout), strict=True):
        for cell, ranks in zip(cells_, seen, strict=True):
            account, _ = predict(cell)
            seconds = group_seconds(ranks)
            judged = [judge(cell, account, one, seconds) for one in ranks]
            judged[0]["paces"] = ranks[0]["paces"]
            wrong = list(dict.fromkeys(w for row in judged for w in row["wrong"]))
            rows.append(judged[0] | {"wrong": wrong})
            said = "; ".join([str(cell), *wrong])
            print(f"{'wrong' if wrong else 'ok':6}{said}", flush=True)
    return rows


@harness.command(
    "plan_matrix",
    __doc__,
    rounds=7,
    threads=1,
    timeout=1800.0,
    quick=(False, "a part of it, and nothing is timed"),
    ranks=([1, 2, 4], "how many ranks"),
    architectures=(list(ARCHITECTURES), "which models", ARCHITECTURES),
)
def main(args: harness.Options) -> int:
    few: dict[str, Any] = {"precisions": ["bf16"], "accumulations": [4]} if args.quick else {}
    rows: list[dict[str, Any]] = []
    for architecture in args.architectures:
        for ranks in args.ranks:
            part = cells([architecture], [ranks], **few)
            rows += rows_of(part, 0 if args.quick else args.rounds, args.threads, args.timeout)
    judged = orders(rows)
    harness.keep(args, SCHEMA, markdown, rows=rows, orders=judged)
    for sentence in judged["turned"]:
        print(f"order  {sentence}")
    wrong = sum(1 for row in rows if row["wrong"])
    print(
        f"{len(rows)} cells, {wrong} wrong; pairs of stages: {judged['right']} right,"
        f" {judged['ties']} ties, {len(judged['turned'])} turned"
    )
    return 1 if wrong or judged["turned"] else 0


if __name__ == "__main__":
    sys.exit(main())
