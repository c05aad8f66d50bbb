"""Which sides each chapter compares on this machine, and the table of what they found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Options, relative
from benchmarks.on_gpu import turns_worker
from benchmarks.on_gpu.run import STAGES
from benchmarks.pages import DASH, Table
from benchmarks.peers.settings import Setting

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


def table(comparison: Comparison, turns: list[dict[str, Any]], absent: Sequence[str]) -> Table:
    """A row of each side; DASH for what is not there yet."""
    by = comparison.to
    memory = ("peak MiB", f"peak × {by}", "rest MiB", "loss difference", "rounds")
    columns = ("side", "step ms", f"time × {by}", "tokens/s", *memory)
    table = Table(comparison.title, columns)
    found = turns_worker.by_side(turns)
    base = found.get(by, {})
    for side in comparison.sides:
        mine = found.get(side)
        if mine is None or "error" in mine:
            said = "not reached" if mine is None else "failed"
            table.add(side, "not installed" if side in absent else said)
            continue
        slower = turns_worker.ratio(turns, side, by)
        if slower is None and "step_s" in base:
            slower = mine["step_s"] / base["step_s"]
        peaks = mine["peak_mib"], base.get("peak_mib")
        larger = peaks[0] / peaks[1] if all(peaks) else None
        goal = comparison.goal if side in STAGES else 0.0
        table.add(
            side,
            f"{1000 * mine['step_s']:.1f}",
            _marked(slower, goal),
            f"{comparison.setting.tokens_a_step / mine['step_s']:,.0f}",
            f"{mine['peak_mib']:,.0f}" if mine["peak_mib"] is not None else DASH,
            _marked(larger, goal),
            f"{mine['rest_mib']:,.0f}" if mine["rest_mib"] is not None else DASH,
            f"{relative(mine['losses'], base['losses']):.1e}" if "losses" in base else DASH,
            str(mine["rounds"]),
        )
    return table


def _marked(multiple: float | None, goal: float) -> str:
    """A multiple; with "!" where it is over the goal."""
    if multiple is None:
        return DASH
    return f"{multiple:.3f}" + ("!" if goal and multiple > goal else "")
