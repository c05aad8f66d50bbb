"""The chapters whose sides take turns in one process a rank; and what is known by now of all."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, launch, pages
from benchmarks.on_gpu import turns_worker
from benchmarks.on_gpu.comparison import Comparison, table
from benchmarks.on_gpu.run import available
from benchmarks.pages import Table

SCHEMA = "onefold-gpu/1"


class Report:
    """What is known by now: written as gpu.json and gpu.md whenever something is added."""

    def __init__(self, options: harness.Options) -> None:
        self.options = options
        self.deadline = time.monotonic() + options.seconds
        self.tables: dict[str, Table] = {}
        self.outcomes: dict[str, list[dict[str, Any]]] = {}
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        self.head = harness.about(options, SCHEMA)
        self.head["machine"] |= {"gpu": device, "gpus": torch.cuda.device_count()}

    def left(self) -> float:
        """Seconds before everything should have ended."""
        return self.deadline - time.monotonic()

    def put(self, name: str, table: Table, outcomes: list[dict[str, Any]]) -> None:
        """Another table, or the same with more rows."""
        self.tables[name], self.outcomes[name] = table, outcomes
        self.write()

    def write(self, finished: bool = False) -> None:
        """Both files, whole at any moment."""
        tables = [
            {"title": t.title, "columns": list(t.columns), "rows": t.rows}
            for t in self.tables.values()
        ]
        result = {**self.head, "finished": finished, "tables": tables, "runs": self.outcomes}
        parts = [str(table) for table in self.tables.values()]
        title = f"# Onefold on {self.head['machine']['gpu']}"
        harness.write(self.options, result, pages.page(title, pages.where(self.head), *parts))


def take_turns(comparison: Comparison, options: harness.Options, report: Report, name: str) -> None:
    """Let the sides take turns, and report after each. A side that fails loses its own only."""
    here, absent = available(comparison.sides, options)
    setting = asdict(comparison.setting)
    turns: list[dict[str, Any]] = []
    outcomes: list[dict[str, Any]] = []

    def show() -> None:
        told = [{"peer": turn["side"], "setting": setting, "error": "", **turn} for turn in turns]
        report.put(name, table(comparison, turns, absent), told + outcomes)

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
                outcomes.append({"peer": waiting[-1], "setting": setting, **outcome})
                break
            failed = {"side": lost, "round": 0, "status": "failed"}
            turns.append({**failed, "error": outcome["error"][-600:]})
            waiting = waiting[waiting.index(lost) + 1 :]
            show()
    show()
    with contextlib.redirect_stdout(sys.stderr):
        pages.show(str(report.tables[name]))


def _run(
    waiting: list[str],
    comparison: Comparison,
    options: harness.Options,
    limit: float,
    turns: list[dict[str, Any]],
    show: Callable[[], None],
) -> dict[str, Any]:
    """Run `waiting` sides for at most `limit` seconds; `turns` and `show` follow them."""
    before, setting = list(turns), comparison.setting
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder, ThreadPoolExecutor(1) as pool:
        lines = Path(folder, "turns.jsonl")
        job = {"setting": asdict(setting), "sides": waiting, "rounds": options.rounds}
        running = pool.submit(
            launch.run_ranks,
            "benchmarks.on_gpu.turns_worker",
            job | {"lines": str(lines)},
            setting.ranks,
            threads=setting.threads,
            python=launch.python_of(waiting[0], options),
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
