"""Which sides each chapter compares on this machine, and the table of what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Options, Row, Run
from benchmarks.on_gpu import turns_worker
from benchmarks.on_gpu.run import STAGES
from benchmarks.pages import Cell, Columns, Table, cells, shown
from benchmarks.peers.settings import Setting
from benchmarks.study import timings

GOAL = 1.02  # of plain PyTorch's step time and memory at world size 1


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns; `to` is their measure, `goal` the most that a stage may be of it."""

    title: str
    setting: Setting
    sides: tuple[str, ...]
    to: str
    goal: float = 0.0


def compared(options: Options) -> dict[str, list[Comparison]]:
    """What each chapter compares on this machine, what tells most first."""

    def setting(
        ranks: int = 1, model: str = options.model, precision: str = "bf16", **more: Any
    ) -> Setting:
        shared: dict[str, Any] = {"warmup": 1 if options.tiny else 3, "steps": options.steps}
        shared |= {"threads": options.threads, "device": options.device, "tokens": options.tokens}
        return Setting(model=model, precision=precision, ranks=ranks, **{**shared, **more})

    gpus = 2 if options.tiny else torch.cuda.device_count() if options.device == "cuda" else 0
    # gloo, which ranks on CPUs speak, has no sums of its own
    natives = tuple(
        side
        for side in ("onefold-2-native", turns_worker.NATIVE)
        if turns_worker.known(side) and options.device != "cpu"
    )
    deepspeed = ("deepspeed-1", "deepspeed-2", "deepspeed-3")
    alone = ("plain", "fsdp2", *STAGES, *deepspeed)
    together = ("ddp", "fsdp2", *STAGES, *natives, "onefold-3-codecs", *deepspeed)
    found: dict[str, list[Comparison]] = {"ranks": [], "step": [], "fp32": []}
    cases = dict.fromkeys(
        (precision, name)
        for precision in ("bf16", "fp32")
        for name in (options.model, options.smaller)
    )
    for precision, name in (case for case in cases if case[0] in options.precisions):
        title = f"{name}, {precision}, {options.tokens:,} tokens a rank"
        last = precision == "fp32" and name == options.model
        one, many = setting(1, name, precision), setting(gpus, name, precision)
        if gpus > 1:
            case = Comparison(f"{gpus} ranks: {title}", many, together, "ddp")
            found["fp32" if last else "ranks"].append(case)
        case = Comparison(f"World size 1: {title}", one, alone, "plain", GOAL)
        found["fp32" if last else "step"].append(case)
    about = f"{options.model}, bf16, {options.tokens:,} tokens"
    several = setting(accumulation=2 if options.tiny else 4, steps=max(2, options.steps // 2))
    host = ("plain", "onefold-2-cpu", "onefold-2-cpu-behind", "onefold-3-cpu-param", "fsdp2-cpu")
    host += ("deepspeed-2-cpu", "deepspeed-3-cpu-param")
    title = f"State on the host: {about}, {several.accumulation} micro-batches"
    found["host"] = [Comparison(title, several, host, "plain")]
    tight = ("plain", "onefold-3", "onefold-3-activations", "onefold-3-tiles")
    found["memory"] = [
        Comparison(f"Activations on the host, weights in tiles: {about}", setting(), tight, "plain")
    ]
    return found


def rows(
    comparison: Comparison, turns: Sequence[dict[str, Any]], absent: Sequence[str]
) -> list[Row]:
    """A row of each side, as far as its turns have come."""
    runs = [Run(turn["side"], turn["round"], turn["status"], [turn]) for turn in turns]
    base = harness.by_round(runs, comparison.to)
    their_peak = harness.over_rounds(base.values(), "peak_mib")

    def row(_: str, good: list[Run]) -> Row:
        timed = timings(good, base)
        peak = harness.over_rounds(good, "peak_mib")
        if timed["ratio"] is None and base:  # no round in common
            timed["ratio"] = timed["step_s"] / timings(list(base.values()), base)["step_s"]
        return {
            **timed,
            "tokens_a_second": comparison.setting.tokens_a_step / timed["step_s"],
            "peak_mib": peak,
            "larger": peak / their_peak if peak and their_peak else None,
            "rest_mib": harness.over_rounds(good, "rest_mib"),
            "loss_difference": harness.loss_difference(good, base),
        }

    found = {row["side"]: row for row in harness.rows_of(runs, row)}
    missing = {
        side: "not installed" if side in absent else "not reached" for side in comparison.sides
    }
    return [found.get(side) or {"side": side, "status": missing[side]} for side in comparison.sides]


def table(comparison: Comparison, turns: Sequence[dict[str, Any]], absent: Sequence[str]) -> Table:
    """The rows as text; "!" behind a multiple of a stage that is over the goal."""

    def marked(name: str) -> Cell:
        def cell(row: Row) -> str:
            over = comparison.goal and row["side"] in STAGES and (row[name] or 0) > comparison.goal
            return shown(name, "{:.3f}")(row) + ("!" if over else "")

        return cell

    columns: Columns = {
        "side": shown("side"),
        "step ms": shown("step_s", "{:.1f}", 1e-3),
        f"time × {comparison.to}": marked("ratio"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "peak MiB": shown("peak_mib", "{:,.0f}"),
        f"peak × {comparison.to}": marked("larger"),
        "rest MiB": shown("rest_mib", "{:,.0f}"),
        "loss difference": shown("loss_difference", "{:.1e}"),
        "rounds": shown("rounds"),
    }
    found = [cells(columns, row) for row in rows(comparison, turns, absent)]
    return Table(comparison.title, list(columns), found)
