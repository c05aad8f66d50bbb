"""The proof of the plan: every setting planned, then trained on real ranks, and both put side by side.

    python -m benchmarks.plan_matrix [--quick] [--steps 5] [--ranks 1 2 4] [--architectures gpt2 llama mixtral] [--name plan_matrix]

Stages 0 to 3 × fp32 and bf16 × accumulation 1 and 4 × checkpointing none and full × 1, 2, 4 ranks × three architectures. Bytes at rest must
agree within 1 MiB, bytes on the wire exactly, the peak of the engine's ledger within 5 %, and nothing may exceed the printed bound. Times
are judged where `onefold doctor --calibrate --ranks 1,2,4` has measured this machine: within 25 %, and the order of the stages right.
`--quick` is a part of it and times nothing. Writes benchmarks/results/NAME.json and NAME.md; ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.launch import run_ranks
from benchmarks.plan_matrix.planning import judge, orders, predict
from benchmarks.plan_matrix.report import markdown
from benchmarks.plan_matrix.settings import ARCHITECTURES, Cell, cells

RESULTS = Path(__file__).parents[1] / "results"


def measured(part: list[Cell], steps: int, threads: int, timeout: float) -> list[list[dict[str, Any]]]:
    """What each rank saw of each cell, [cell][rank]; all cells have the same ranks.

    Raises:
        RuntimeError: a rank failed.
    """
    setting = {"ranks": part[0].ranks, "threads": threads}
    job = {"setting": setting, "steps": steps, "cells": [c.to_json() for c in part]}
    ran = run_ranks("benchmarks.plan_matrix.worker", job, part[0].ranks, threads=threads, timeout=timeout)
    if ran["status"] != "ok":
        raise RuntimeError(f"{part[0]} and {len(part) - 1} more: {ran['error']}")
    return [[rank["cells"][i] for rank in ran["ranks"]] for i in range(len(part))]


def rows_of(part: list[Cell], steps: int, threads: int, timeout: float) -> list[dict[str, Any]]:
    """One row a cell: rank 0's figures, what is wrong on any rank, and the median step of the slowest rank."""
    rows = []
    for cell, ranks in zip(part, measured(part, steps, threads, timeout), strict=True):
        account, _ = predict(cell)
        seconds = max(statistics.median(r["seconds"]) for r in ranks) if steps else None
        judged = [judge(cell, account, seen, seconds) for seen in ranks]
        rows.append(judged[0] | {"wrong": list(dict.fromkeys(w for row in judged for w in row["wrong"]))})
        print(f"{'wrong' if rows[-1]['wrong'] else 'ok':6}{cell}{''.join(f'; {w}' for w in rows[-1]['wrong'])}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one architecture on one number of ranks")
    parser.add_argument("--name", default="plan_matrix")
    args = parser.parse_args()
    few: dict[str, Any] = {"precisions": ["bf16"], "accumulations": [4]} if args.quick else {}
    rows: list[dict[str, Any]] = []
    for architecture in args.architectures:
        for ranks in args.ranks:
            part = cells([architecture], [ranks], **few)
            rows += rows_of(part, 0 if args.quick else args.steps, args.threads, args.timeout)
    turned = orders(rows)
    found = {
        "command": "python -m benchmarks.plan_matrix " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rows": rows,
        "orders": turned,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / f"{args.name}.md").write_text(markdown(found), encoding="utf-8")
    for sentence in turned:
        print(f"order  {sentence}")
    wrong = sum(1 for row in rows if row["wrong"])
    print(f"{len(rows)} cells, {wrong} wrong, {len(turned)} orders of stages turned")
    return 1 if wrong or turned else 0


if __name__ == "__main__":
    sys.exit(main())
