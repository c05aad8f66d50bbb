"""From rounds to rows, pairs and goals. Also the schema of the JSON that is written.

{
  "schema": "onefold-offload/1",
  "command": str, "date": ISO 8601 with zone, "finished": bool,
  "machine": {...}, "versions": {...},                # as in benchmarks/peers/summary.py
  "disk": {"file_system": str, "copy_mib": int, "chunk_mib": int},
  "models": {name: {"parameters": int}}, "notes": {side: how it is set up},
  "comparisons": [{
    "setting": {...},                                 # benchmarks.peers.settings.Setting, field by field
    "rows": [{...}], "pairs": [{...}],                # Row and Pair, field by field
    "runs": [{"side", "round", "status", "error", "wall_s", "ranks": [{       # the raw measurements, one a side and round
      "rank", "losses", "step_s": [s], "optimizer_s": [s], "cpu_s", "build_s",
      "baseline_mib", "set_up_peak_mib", "peak_mib", "peak_is_of_timed_steps", "rest_mib",
      "held": {tier: {"rest"|"peak": {category: bytes}}}, "moved": {move: bytes, "waited_s"}, "planned": {...},   # null: no ledgers
      "step_disk", "optimizer_disk": [{"read", "written": bytes, "busy_s"}],      # of a timed step, and of the optimizer's part of it
      "copies": [{"copy", "two": bytes/s}],           # rank 0's, around the timed steps
      "file_cache_bytes", "page_cache_growth"}]}]
  }],
  "large": {...} | null,                              # large.measure
  "smollm2": {...} | null,                            # alone.measure
  "goals": [{"goal", "figure", "met": bool | null}]
}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks import harness
from benchmarks.harness import step_seconds
from benchmarks.offload.settings import PAIRS, REFERENCE, SIDES
from benchmarks.peers.settings import Setting
from benchmarks.peers.summary import LOSSES_COMPARED

SCHEMA = "onefold-offload/1"
MIB = 1 << 20
DISK_GOAL, HOST_GOAL, CACHE_GOAL, LARGE_GOAL, SMOLLM2_GOAL = 0.85, 0.05, 0.01, 8 << 30, 400 << 20


@dataclass
class Run:
    """One side in one round. `status` is "ok", "failed" or "timeout"; `ranks` holds what each
    worker wrote.
    """

    side: str
    round: int
    status: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    wall_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `Run(**d)` reads back."""
        return asdict(self)


@dataclass
class Row:
    """One side in one setting. None: not measured.

    `step_s` is the median over all timed steps of all rounds, a step lasting until its slowest rank
    is done; `optimizer_s` the same of what `optimizer.step()` takes of it. `ratio`: the median over
    rounds of (median step here / that of the same stage of Onefold on the device in the same
    round), with its extremes. MiB are a rank's, the largest rank and the median round: `peak_mib`
    and `rest_mib` of resident memory beyond the baseline; `device_mib`, `host_mib`, `disk_mib` of
    the engine's ledgers with the optimizer's states, at their peak;
    `host_planned`: `host_mib` over what the recipe should take. Disk figures are of all ranks in a
    step: `read_mib`, `written_mib`; `disk_share` is the rate of the optimizer's step over that of
        plain copies just before and behind it, `disk_share_two` over copies by
    two threads. `waited_s`: seconds a step for which a rank waited for the disk. `cache_mib`:
        growth of the page cache in the timed steps;
    `file_cache_mib`: what of the run's own files lay in it. `loss_difference`: the largest relative
    difference to the reference's.
    """

    side: str
    status: str
    rounds: int = 0
    step_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    optimizer_s: float | None = None
    tokens_a_second: float | None = None
    cpu_s: float | None = None
    peak_mib: float | None = None
    rest_mib: float | None = None
    device_mib: float | None = None
    host_mib: float | None = None
    disk_mib: float | None = None
    host_planned: float | None = None
    read_mib: float | None = None
    written_mib: float | None = None
    waited_s: float | None = None
    optimizer_gb_s: float | None = None
    copy_gb_s: float | None = None
    disk_share: float | None = None
    disk_share_two: float | None = None
    cache_mib: float | None = None
    file_cache_mib: float | None = None
    loss_difference: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, null for None."""
        return asdict(self)


@dataclass
class Pair:
    """`faster`: the median over rounds of (their median step / ours), with its extremes."""

    ours: str
    theirs: str
    rounds: int
    faster: float
    low: float
    high: float


def summarize(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting in the order in which the sides ran; `missing` sides are not
    installed.
    """
    return harness.sides_of(runs, lambda side, good: _row(side, setting, good, runs), Row, missing)


def pairs(runs: Sequence[Run]) -> list[Pair]:
    """Ours beside theirs, where both were measured."""
    found = []
    for ours, theirs in PAIRS:
        ratios = harness.ratios(
            harness.by_round(runs, theirs).values(), harness.by_round(runs, ours)
        )
        if ratios:
            found.append(Pair(ours, theirs, len(ratios), median(ratios), min(ratios), max(ratios)))
    return found


def _row(side: str, setting: Setting, good: Sequence[Run], runs: Sequence[Run]) -> Row:
    step = median(second for run in good for second in step_seconds(run))
    ratio, low, high = harness.spread(
        harness.ratios(good, harness.by_round(runs, f"onefold-{SIDES[side].stage}"))
    )
    references = harness.by_round(runs, REFERENCE)
    row = Row(
        side, "ok", rounds=len(good), step_s=step, ratio=ratio, ratio_low=low, ratio_high=high,
        optimizer_s=median(max(s) for run in good for s in zip(*(rank["optimizer_s"] for rank in run.ranks), strict=True)),
        tokens_a_second=setting.tokens_a_step / step,
        cpu_s=median(fmean(rank["cpu_s"] for rank in run.ranks) for run in good) / setting.steps,
        peak_mib=_largest(good, lambda rank: rank["peak_mib"]), rest_mib=_largest(good, lambda rank: rank["rest_mib"]),
        loss_difference=harness.loss_difference(good, references, LOSSES_COMPARED),
    )  # fmt: skip
    if good[0].ranks[0]["held"] is not None:
        _add_ledgers(row, good)
    if SIDES[side].on_disk:
        _add_disk(row, setting, good)
    return row


def _largest(good: Sequence[Run], value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """The median over rounds of the largest rank's."""
    found = [[v for rank in run.ranks if (v := value(rank)) is not None] for run in good]
    return median(max(values) for values in found if values) if any(found) else None


def _peak(rank: dict[str, Any], tier: str) -> int:
    return sum(rank["held"][tier]["peak"].values())


def _add_ledgers(row: Row, good: Sequence[Run]) -> None:
    row.device_mib, row.host_mib, row.disk_mib = (
        _largest(good, lambda rank, tier=tier: _peak(rank, tier) / MIB)
        for tier in ("device", "host", "disk")  # type: ignore[misc]
    )
    if good[0].ranks[0]["planned"]["host_peak"]:
        row.host_planned = _largest(
            good, lambda rank: _peak(rank, "host") / rank["planned"]["host_peak"]
        )


def _add_disk(row: Row, setting: Setting, good: Sequence[Run]) -> None:
    for name, key in (("read_mib", "read"), ("written_mib", "written")):
        setattr(
            row,
            name,
            median(
                sum(rank["step_disk"][i][key] for rank in run.ranks) / MIB
                for run in good
                for i in range(setting.steps)
            ),
        )
    row.waited_s = (
        median(max(rank["moved"]["waited_s"] for rank in run.ranks) for run in good) / setting.steps
    )
    rates = [
        (rate, run.ranks[0]["copies"], i)
        for run in good
        for i, rate in enumerate(optimizer_rates(run))
        if rate
    ]
    if rates:
        row.optimizer_gb_s = median(rate for rate, _, _ in rates) / 1e9
    around = [(rate, copies[i : i + 2]) for rate, copies, i in rates if copies]
    if around:
        row.copy_gb_s = median(fmean(c["copy"] for c in copies) for _, copies in around) / 1e9
        row.disk_share = median(rate / fmean(c["copy"] for c in copies) for rate, copies in around)
        row.disk_share_two = median(
            rate / fmean(c["two"] for c in copies) for rate, copies in around
        )
    row.cache_mib = (
        median(max(rank["page_cache_growth"] for rank in run.ranks) for run in good) / MIB
    )
    row.file_cache_mib = (
        median(sum(rank["file_cache_bytes"] or 0 for rank in run.ranks) for run in good) / MIB
    )


def optimizer_rates(run: Run) -> list[float]:
    """Bytes a second read and written by all ranks in the optimizer's part of each timed step; 0
    where it moved nothing.
    """
    seconds = [max(step) for step in zip(*(rank["optimizer_s"] for rank in run.ranks), strict=True)]
    steps = zip(*(rank["optimizer_disk"] for rank in run.ranks), strict=True)
    moved = [sum(m.get("read", 0) + m.get("written", 0) for m in step) for step in steps]
    return [nbytes / second for nbytes, second in zip(moved, seconds, strict=True)]


def goals(
    comparisons: Sequence[tuple[Setting, Sequence[Row]]],
    large: dict[str, Any] | None,
    smollm2: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether that is it; None where it was not measured."""
    rows = [
        (setting, row)
        for setting, some in comparisons
        for row in some
        if row.status == "ok" and row.side.startswith("onefold")
    ]

    def goal(
        text: str,
        values: list[tuple[float, str]],
        met: Callable[[float], bool],
        form: str,
        worst: Callable[..., Any] = max,
    ) -> None:
        if not values:
            out.append({"goal": text, "figure": "not measured", "met": None})
            return
        value, where = worst(values)
        out.append({"goal": text, "figure": f"{form.format(value)} ({where})", "met": met(value)})

    def seen(
        name: str, scale: Callable[[float, Row], float] = lambda value, _: value
    ) -> list[tuple[float, str]]:
        values = [
            (getattr(row, name), setting, row)
            for setting, row in rows
            if SIDES[row.side].optimizer != "device"
        ]
        return [
            (scale(v, row), f"{row.side}, {s.tokens:,} tokens, {s.precision}")
            for v, s, row in values
            if v is not None
        ]

    out: list[dict[str, Any]] = []
    fp32 = [v for v in seen("loss_difference") if v[1].endswith("fp32")]
    goal(
        "losses in fp32 as on the device, bit for bit",
        fp32,
        lambda v: v == 0,
        "largest difference {:.1e}",
    )
    # Else next to nothing is left for the optimizer's step
    whole = [v for v in seen("disk_share") if "-behind" not in v[1]]
    goal(
        f"disk in the optimizer's step: {DISK_GOAL:.0%} of a plain direct copy",
        whole,
        lambda v: v >= DISK_GOAL,
        "lowest {:.0%}",
        min,
    )
    grown = seen(
        "cache_mib",
        lambda mib, row: mib / max(1.0, (row.read_mib or 0.0) + (row.written_mib or 0.0)),
    )
    goal(
        "page cache: grows by under 1 % of what a step moves",
        grown,
        lambda v: v < CACHE_GOAL,
        "largest {:.2%}",
    )
    above = seen("host_planned", lambda share, _: share - 1)
    goal(
        "host memory: at most 5 % above what the recipe should take",
        above,
        lambda v: v <= HOST_GOAL,
        "largest {:+.1%}",
    )
    there = large is not None and large["status"] == "ok"
    kept = (
        [(large["resident_bytes"] / 2**30, f"{large['parameters'] / 1e9:.2f}B parameters")]
        if large is not None and there
        else []
    )
    goal(
        "a model of 1.3B parameters on two ranks: under 8 GiB in memory together",
        kept,
        lambda v: v * 2**30 < LARGE_GOAL,
        "{:.2f} GiB",
    )
    small = (
        [(smollm2["above_bytes"] / MIB, f"{smollm2['tokens']} tokens")]
        if smollm2 is not None and smollm2["status"] == "ok"
        else []
    )
    text = "SmolLM2 on one process: at most 400 MiB above the interpreter"
    goal(text, small, lambda v: v * MIB <= SMOLLM2_GOAL, "{:.0f} MiB")
    return out
