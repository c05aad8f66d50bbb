"""From rounds to rows, pairs and goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row, Run, over_rounds, scaled
from benchmarks.offload.sides import PAIRS, REFERENCE, SIDES
from benchmarks.peers.settings import LOSSES_COMPARED, Setting
from benchmarks.study import timings

MIB = 1 << 20
DISK_GOAL, HOST_GOAL, CACHE_GOAL, LARGE_GOAL, SMOLLM2_GOAL = 0.85, 0.05, 0.01, 8 << 30, 400 << 20


def rows(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting, as `report.LEGEND` says; MiB are those of the largest rank, in the
    median round. None: not measured.
    """
    references = harness.by_round(runs, REFERENCE)

    def row(side: str, good: list[Run]) -> Row:
        timed = timings(good, harness.by_round(runs, f"onefold-{SIDES[side].stage}"))
        return {
            **timed,
            "optimizer_s": median(s for r in good for s in harness.slowest(r.ranks, "optimizer_s")),
            "tokens_a_second": setting.tokens_a_step / timed["step_s"],
            "cpu_s": scaled(over_rounds(good, "cpu_s", fmean), setting.steps),
            "peak_mib": over_rounds(good, "peak_mib"),
            "rest_mib": over_rounds(good, "rest_mib"),
            **_of_ledgers(good),
            **(_of_disk(setting, good) if SIDES[side].on_disk else {}),
            "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED),
        }

    return harness.rows_of(runs, row, missing)


def _peak(tier: str) -> Callable[[dict[str, Any]], float | None]:
    """Bytes that a rank's ledger had there at most; None without ledgers."""
    return lambda rank: sum(rank["held"][tier]["peak"].values()) if rank["held"] else None


def _of_ledgers(good: Sequence[Run]) -> Row:
    tiers = ("device", "host", "disk")
    held = {f"{tier}_mib": scaled(over_rounds(good, _peak(tier)), MIB) for tier in tiers}
    planned = good[0].ranks[0]["planned"]
    share = None
    if planned and planned["host_peak"]:
        share = over_rounds(good, lambda r: _peak("host")(r) / r["planned"]["host_peak"])  # type: ignore[operator]
    return {**held, "host_planned": share}


def _of_disk(setting: Setting, good: Sequence[Run]) -> Row:
    """Figures of all ranks in a step, as `report.DISK_LEGEND` says."""

    def moved(key: str) -> float:
        steps = [
            step for run in good for step in zip(*(r["step_disk"] for r in run.ranks), strict=True)
        ]
        return median(sum(rank[key] for rank in step) / MIB for step in steps)

    row: Row = {
        "read_mib": moved("read"),
        "written_mib": moved("written"),
        "waited_s": scaled(over_rounds(good, lambda r: r["moved"]["waited_s"]), setting.steps),
        "cache_mib": scaled(over_rounds(good, "page_cache_growth"), MIB),
        "file_cache_mib": scaled(over_rounds(good, "file_cache_bytes", sum) or 0, MIB),
    }
    rates = [
        (rate, run.ranks[0]["copies"][i : i + 2])
        for run in good
        for i, rate in enumerate(optimizer_rates(run))
        if rate
    ]
    if rates:
        row["optimizer_gb_s"] = median(rate for rate, _ in rates) / 1e9
    around = [
        (rate, *(fmean(c[n] for c in copies) for n in ("copy", "two")))
        for rate, copies in rates
        if copies
    ]
    if around:
        row["copy_gb_s"] = median(copy for _, copy, _ in around) / 1e9
        row["disk_share"] = median(rate / copy for rate, copy, _ in around)
        row["disk_share_two"] = median(rate / two for rate, _, two in around)
    return row


def optimizer_rates(run: Run) -> list[float]:
    """Bytes a second of all ranks in the optimizer's part of each step; 0 where nothing moved."""
    seconds = harness.slowest(run.ranks, "optimizer_s")
    steps = zip(*(rank["optimizer_disk"] for rank in run.ranks), strict=True)
    moved = [sum(m.get("read", 0) + m.get("written", 0) for m in step) for step in steps]
    return [nbytes / second for nbytes, second in zip(moved, seconds, strict=True)]


def pairs(runs: Sequence[Run]) -> list[Row]:
    """Ours beside theirs. `faster`: the median over rounds of their step / ours."""
    found = []
    for ours, theirs in PAIRS:
        mine = harness.by_round(runs, ours)
        ratios = harness.ratios(harness.by_round(runs, theirs).values(), mine)
        if ratios:
            faster = dict(zip(("faster", "low", "high"), harness.spread(ratios), strict=True))
            found.append({"ours": ours, "theirs": theirs, "rounds": len(ratios), **faster})
    return found


def goals(
    comparisons: Sequence[tuple[Setting, Sequence[Row]]],
    large: dict[str, Any] | None,
    smollm2: dict[str, Any] | None = None,
) -> list[Row]:
    """What was to be reached, what was, and whether that is it; None where it was not measured."""
    ours = [
        (f"{row['side']}, {setting.tokens:,} tokens, {setting.precision}", row)
        for setting, found in comparisons
        for row in found
        if row["status"] == "ok" and row["side"].startswith("onefold")
        if SIDES[row["side"]].optimizer != "device"
    ]

    def seen(name: str) -> list[tuple[float, str]]:
        return [(row[name], where) for where, row in ours if row.get(name) is not None]

    moved = {
        where: row["read_mib"] + row["written_mib"] for where, row in ours if row.get("read_mib")
    }
    grown = [(mib / max(1.0, moved.get(where, 0.0)), where) for mib, where in seen("cache_mib")]
    fp32 = [v for v in seen("loss_difference") if v[1].endswith("fp32")]
    # Behind the backward pass next to nothing is left for the optimizer's step
    shares = [v for v in seen("disk_share") if "-behind" not in v[1]]
    above = [(share - 1, where) for share, where in seen("host_planned")]
    kept, small = [], []
    if large is not None and large["status"] == "ok":
        kept = [(large["resident_bytes"] / 2**30, f"{large['parameters'] / 1e9:.2f}B parameters")]
    if smollm2 is not None and smollm2["status"] == "ok":
        small = [(smollm2["above_bytes"] / MIB, f"{smollm2['tokens']} tokens")]
    disk = f"disk in the optimizer's step: {DISK_GOAL:.0%} of a plain direct copy"
    two = "a model of 1.3B parameters on two ranks: under 8 GiB in memory together"
    asked: tuple[tuple[str, list[tuple[float, str]], Callable[[float], bool], str], ...] = (
        ("losses in fp32 as on the device, bit for bit", fp32, lambda v: v == 0, "largest difference {:.1e}"),
        (disk, shares, lambda v: v >= DISK_GOAL, "lowest {:.0%}"),
        ("page cache: grows by under 1 % of what a step moves", grown, lambda v: v < CACHE_GOAL, "largest {:.2%}"),
        ("host memory: at most 5 % above what the recipe should take", above, lambda v: v <= HOST_GOAL, "largest {:+.1%}"),
        (two, kept, lambda v: v * 2**30 < LARGE_GOAL, "{:.2f} GiB"),
        ("SmolLM2 on one process: at most 400 MiB above the interpreter", small, lambda v: v * MIB <= SMOLLM2_GOAL, "{:.0f} MiB"),
    )  # fmt: skip
    rows = []
    for text, values, met, form in asked:
        row: Row = {"goal": text, "figure": "not measured", "met": None}
        if values:
            value, where = min(values) if form.startswith("lowest") else max(values)
            row |= {"figure": f"{form.format(value)} ({where})", "met": met(value)}
        rows.append(row)
    return rows
