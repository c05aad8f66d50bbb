"""The chapters in which sides take turns in one process a rank: ranks, step, host, memory, fp32."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import turns_worker
from benchmarks.on_gpu.comparison import Comparison, table
from benchmarks.on_gpu.report import Report
from benchmarks.on_gpu.run import available
from benchmarks.peers import launch


def take_turns(
    comparison: Comparison, options: argparse.Namespace, report: Report, name: str
) -> None:
    """Let the sides take turns, and report after every one. A side that ends its process or stands
    still loses its turns only.
    """
    here, absent = available(comparison.sides, options)
    turns: list[dict[str, Any]] = []
    outcomes: list[dict[str, Any]] = []

    def show() -> None:
        report.put(name, table(comparison, turns, absent), _outcomes(comparison, turns) + outcomes)

    # DeepSpeed patches what it finds of torch, and may have another interpreter: its sides have
    # processes of their own.
    for deepspeed in (False, True):
        waiting = [side for side in here if side.startswith("deepspeed") == deepspeed]
        while waiting and report.left() > 0:
            limit = min(options.timeout, report.left())
            outcome = _run(waiting, comparison, options, limit, turns, show)
            if outcome["status"] == "ok":
                break
            done = {turn["side"] for turn in turns}
            lost = next((side for side in waiting if side not in done), None)
            if lost is None:  # every side has turns of its first round
                outcomes.append(
                    {"peer": waiting[-1], "setting": comparison.setting.to_json(), **outcome}
                )
                break
            turns.append(
                {"side": lost, "round": 0, "status": "failed", "error": outcome["error"][-600:]}
            )
            waiting = waiting[waiting.index(lost) + 1 :]
            show()
    show()
    print(report.tables[name], file=sys.stderr, flush=True)


def _run(
    waiting: list[str],
    comparison: Comparison,
    options: argparse.Namespace,
    limit: float,
    turns: list[dict[str, Any]],
    show: Callable[[], None],
) -> dict[str, Any]:
    """The sides in `waiting` in one process a rank, at most `limit` seconds: appends to `turns` what
    each turn found, and calls `show` every half second. The outcome of `launch.run_ranks`.
    """
    deepspeed = waiting[0].startswith("deepspeed")
    before = list(turns)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder, ThreadPoolExecutor(1) as pool:
        lines = Path(folder, "turns.jsonl")
        job = {
            "setting": comparison.setting.to_json(),
            "sides": waiting,
            "rounds": options.rounds,
            "lines": str(lines),
            "deepspeed": deepspeed,
        }
        running = pool.submit(
            launch.run_ranks,
            "benchmarks.on_gpu.turns_worker",
            job,
            comparison.setting.ranks,
            threads=comparison.setting.threads,
            python=options.deepspeed_python if deepspeed else sys.executable,
            timeout=limit,
        )
        while True:
            # Asked before the file is read, so that the last lines are
            ended = running.done()
            turns[:] = before + turns_worker.read(lines)
            show()
            if ended:
                return running.result()
            time.sleep(0.5)


def _outcomes(comparison: Comparison, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A run for each turn, as the other chapters give them."""
    setting = comparison.setting.to_json()
    return [{"peer": turn["side"], "setting": setting, "error": "", **turn} for turn in turns]
