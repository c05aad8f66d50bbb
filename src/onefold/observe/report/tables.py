"""The words and tables of the page: the figures at its top, predicted against measured, traffic
between nodes, differences between ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from onefold.comm import Sent
from onefold.observe.report.figures import in_bytes, in_seconds, in_unit
from onefold.observe.runfile import Observed, RankObserved, RunFileError
from onefold.observe.trace import Recording
from onefold.plan.schema import Account, compare
from onefold.reading import parse_json

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Metrics:
    """The rows of the steps in order, and the closing row ({} if the run goes on or failed)."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of the rows that have a finite number under `key`."""
        found = [
            (int(row["step"]), float(row[key])) for row in self.rows if _is_number(row.get(key))
        ]
        return [step for step, _ in found], [value for _, value in found]

    def typical(self, key: str) -> float | None:
        """Return the median over the run without its first tenth (warm-up); None without values."""
        _, values = self.series(key)
        return median(values[len(values) // 10 if len(values) > 1 else 0 :]) if values else None


def read_metrics(folder: Path) -> Metrics | None:
    """Read the metrics in a run's folder; None if it has none. Skips an incomplete last line.

    Raises:
        RunFileError: a line that is not the last cannot be read.
    """
    path = folder / METRICS
    if not path.exists():
        return None
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RunFileError(f"{path} cannot be read ({error}).") from None
    rows: list[Mapping[str, Any]] = []
    summary: Mapping[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError:
            if number == len(lines):  # an incomplete line: the run was killed while it wrote
                break
            raise RunFileError(
                f"{path}, line {number}, is not JSON: the file was changed, or written by another"
                " program."
            ) from None
        if not isinstance(row, dict):
            raise RunFileError(
                f"{path}, line {number}: expected an object with the figures of a step, found"
                f" {type(row).__name__}."
            )
        if row.get("done"):
            summary = row
        elif isinstance(row.get("step"), int):
            rows.append(row)
    return Metrics(rows, summary)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


@dataclass(frozen=True)
class WireLine:
    """One line of the traffic table, as text. `plain` and `ratio` are "" if no move was encoded."""

    name: str
    sent: str
    plain: str
    ratio: str
    is_sum: bool


def borders_of(ranks: Sequence[RankObserved]) -> str:
    """Return the word for what bytes went between: "nodes", or "groups" of the recipe."""
    return next((_word(r) for r in ranks if r.step is not None and r.step.borders), "nodes")


def wire_table(rank: RankObserved) -> list[WireLine]:
    """Return a line per move, one for its bytes between nodes, and the sums.
    [] for one node without codecs.
    """
    total = sum(rank.wire.values(), Sent())
    across, coded = _several(rank), any(sent.encoded for sent in rank.wire.values())
    if not across and not coded:
        return []
    lines = []
    for name, sent in [*rank.wire.items(), ("all", total)]:
        lines.append(_line(name, sent.nbytes, sent.plain if coded else None, name == "all"))
        if across:
            lines.append(
                _line(
                    f"{name}, between {_word(rank)}",
                    sent.between,
                    sent.plain_between if coded else None,
                    name == "all",
                )
            )
    return lines


def wire_sentence(rank: RankObserved) -> str:
    """Return the totals of `wire_table` in words."""
    total, said = sum(rank.wire.values(), Sent()), []
    if _several(rank) and rank.step is not None:
        said.append(
            f"Of {in_bytes(total.nbytes)}, {in_bytes(total.between)} go to another of the"
            f" {rank.step.borders}."
        )
    if total.encoded:
        said.append(
            f"Without codecs the same moves would be {in_bytes(total.plain)},"
            f" {_times(total.plain, total.nbytes)} times as much."
        )
    return " ".join(said)


def in_brief(rank: RankObserved) -> str:
    """Return the totals of `wire_table` as an addition to a figure; "" if the table is empty."""
    total = sum(rank.wire.values(), Sent())
    said = f"; {in_bytes(total.between)} between {_word(rank)}" if _several(rank) else ""
    return said + (f"; {in_bytes(total.plain)} without codecs" if total.encoded else "")


def _several(rank: RankObserved) -> bool:
    return rank.step is not None and bool(rank.step.borders) and bool(rank.wire)


def _word(rank: RankObserved) -> str:
    return (
        rank.step.borders.partition(" ")[2]
        if rank.step is not None and rank.step.borders
        else "nodes"
    )


def _line(name: str, sent: int, plain: int | None, is_sum: bool) -> WireLine:
    if plain is None:
        return WireLine(name, in_bytes(sent), "", "", is_sum)
    return WireLine(name, in_bytes(sent), in_bytes(plain), _times(plain, sent), is_sum)


def _times(plain: int, sent: int) -> str:
    return f"{plain / sent:.2f}" if sent else "–"


#: Ratios at most this far from 1 are called close.
CLOSE = 0.05
#: Ratios at most this far from 1 are called near.
NEAR = 0.25


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page: its label, its value, and a note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ComparedLine:
    """A line of the comparison, as text. `verdict`: "close", "near", "far"; "" without a ratio."""

    name: str
    predicted: str
    measured: str
    ratio: str
    verdict: str
    is_sum: bool


def fullest(ranks: Sequence[RankObserved]) -> RankObserved:
    """Return the rank with the highest peak memory."""
    return max(ranks, key=lambda r: r.measured.peak_bytes)


def headline(observed: Observed | None) -> str:
    """Describe the run in a line."""
    if observed is None:
        return ""
    stage = f"ZeRO stage {observed.stage}" if observed.stage is not None else "a recipe of its own"
    ranks = "1 rank" if observed.world_size == 1 else f"{observed.world_size} ranks"
    return f"{stage} on {ranks}" if observed.recipe else ranks


def tiles(metrics: Metrics | None, observed: Observed | None) -> list[Tile]:
    """Return the figures for the top of the page, without unknown ones."""
    out: list[Tile] = []
    if metrics is not None:
        _, losses = metrics.series("loss")
        if losses:
            steps = len(losses)
            out.append(
                Tile(
                    "Loss",
                    f"{losses[-1]:.3f}",
                    f"from {losses[0]:.3f} in {steps:,} step{'s' if steps > 1 else ''}",
                )
            )
        rate, step_ms = metrics.typical("tokens_per_s"), metrics.typical("step_ms")
        if rate is not None:
            note = f"median; a step takes {in_seconds(step_ms / 1000)}" if step_ms else "median"
            out.append(Tile("Tokens a second", f"{rate:,.0f}", note))
    ranks = observed.ranks if observed is not None else ()
    if ranks:
        out += _of_ranks(ranks, observed.plan if observed is not None else None)
    elif metrics is not None:
        _, peaks = metrics.series("memory_peak")
        if peaks:
            out.append(Tile("Peak memory", in_bytes(peaks[-1]), "of the process on rank 0"))
    return out


def _of_ranks(ranks: Sequence[RankObserved], plan: Account | None) -> list[Tile]:
    out: list[Tile] = []
    mfu = next((r.measured.mfu for r in ranks if r.measured.mfu is not None), None)
    if mfu is not None:
        out.append(Tile("MFU", f"{mfu:.1%}", "model FLOPs ÷ peak of the hardware"))
    most = fullest(ranks).measured
    if most.peak_bytes:
        note = f"{in_bytes(most.rest_bytes)} between steps"
        if plan is not None and plan.peak_bytes:
            note = f"planned {in_bytes(plan.peak_bytes)}; {note}"
        out.append(Tile("Peak memory a rank", in_bytes(most.peak_bytes), note))
    if wire := max(r.measured.wire_bytes for r in ranks):
        note = (
            f"planned {in_bytes(plan.wire_bytes)}"
            if plan is not None and plan.wire_bytes
            else "payload of one rank"
        )
        note += in_brief(max(ranks, key=lambda r: r.measured.wire_bytes))
        out.append(Tile("Sent in a step", in_bytes(wire), note))
    seconds = [r.measured.seconds for r in ranks]
    timed = [
        (s["exposed communication"], s["step"])
        for s in seconds
        if s.get("step") and "exposed communication" in s
    ]
    if timed and wire:
        waited, whole = sum(w for w, _ in timed), sum(s for _, s in timed)
        out.append(
            Tile(
                "Waiting for the wire",
                f"{waited / whole:.1%}",
                f"of a step: {in_seconds(waited / len(timed))} exposed",
            )
        )
    return out


def outside_view(rank: RankObserved) -> str:
    """Compare the ledgers with the machine's counters in a sentence; "" if the run has none."""
    m = rank.machine
    if not m:
        return ""
    ledger = (
        f"of rank {rank.rank}'s memory the ledgers account for {in_bytes(m['ledger_peak'])} at peak"
    )
    if m["device"] == "cuda":
        kept = (
            f"{in_bytes(m['allocated_peak'])} allocated and {in_bytes(m['reserved_peak'])} reserved"
        )
        return (
            f"Seen from outside: {ledger}; the allocator had {kept}, a fragmentation of"
            f" {in_bytes(m['fragmentation'])}."
        )
    return (
        f"Seen from outside: {ledger}; the process had {in_bytes(m['resident_peak'])} resident, its"
        " libraries included."
    )


#: The words for moves between tiers.
_MOVED = {
    "up": "to the device",
    "down": "to the host",
    "read": "read from NVMe",
    "written": "written to NVMe",
}


def between_tiers(rank: RankObserved, step: Recording) -> str:
    """Say in a sentence what a rank moved between tiers in a step, and how long it waited for that;
    "" if it moved nothing.
    """
    moved = {move: nbytes / max(1, step.steps) for move, nbytes in step.moved().items()}
    if not moved:
        return ""
    told = ", ".join(f"{in_bytes(nbytes)} {_MOVED[move]}" for move, nbytes in moved.items())
    waited = f", for which it waited {in_seconds(step.io / max(1, step.steps))}" if step.io else ""
    return f"In a step rank {rank.rank} moved {told}{waited}."


#: Facts of a run that are bytes.
_BYTES = ("available",)


def readable_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Format the facts of a run for people: keys as words, bytes with units, fractions with three
    digits.
    """
    out = {}
    for key, value in facts.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            text = (
                in_bytes(value)
                if key in _BYTES
                else f"{value:,}"
                if isinstance(value, int)
                else f"{value:,.3g}"
            )
        else:
            text = str(value)
        out[key.replace("_", " ")] = text
    return out


def comparison(plan: Account, measured: Account) -> list[ComparedLine]:
    """Return the lines of `compare` as text."""
    out = []
    for line in compare(plan, measured):
        if not line.predicted and not line.measured:
            continue  # nothing was predicted, and nothing measured
        ratio = line.ratio
        verdict = ""
        if ratio is not None and line.name != "bound of the peak":
            away = abs(ratio - 1)
            verdict = "close" if away <= CLOSE else "near" if away <= NEAR else "far"
        shown = "–" if ratio is None else f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"
        predicted, found = in_unit(line.predicted, line.unit), in_unit(line.measured, line.unit)
        out.append(
            ComparedLine(line.name, predicted, found, shown, verdict, line.name.endswith(": all"))
        )
    return out


@dataclass(frozen=True)
class Spread:
    """One figure over the ranks, as text. `imbalance` is the largest ÷ the mean."""

    name: str
    least: str
    mean: str
    most: str
    least_rank: int
    most_rank: int
    imbalance: float

    @property
    def differs(self) -> bool:
        """Whether the ranks differ visibly, so that naming a rank makes sense."""
        return self.least != self.most


def spreads(ranks: Sequence[RankObserved]) -> list[Spread]:
    """Return how the ranks differ, one line per figure. Leaves out figures that no rank has."""

    def seconds(key: str) -> Callable[[RankObserved], float]:
        return lambda r: r.measured.seconds.get(key, 0.0)

    wanted: list[tuple[str, str, Callable[[RankObserved], float]]] = [
        ("peak memory", "bytes", lambda r: r.measured.peak_bytes),
        ("memory between steps", "bytes", lambda r: r.measured.rest_bytes),
        ("sent in a step", "bytes", lambda r: r.measured.wire_bytes),
        (
            f"sent between {borders_of(ranks)}",
            "bytes",
            lambda r: sum(sent.between for sent in r.wire.values()),
        ),
        ("step", "s", seconds("step")),
        ("compute", "s", seconds("compute")),
        ("waiting (exposed)", "s", seconds("exposed communication")),
        ("optimizer", "s", seconds("optimizer")),
    ]
    out = []
    for name, unit, value in wanted:
        found = [(value(r), r.rank) for r in ranks]
        if not found or not any(v for v, _ in found):
            continue
        mean = sum(v for v, _ in found) / len(found)
        (least, least_rank), (most, most_rank) = min(found), max(found)
        out.append(
            Spread(
                name,
                in_unit(least, unit),
                in_unit(mean, unit),
                in_unit(most, unit),
                least_rank,
                most_rank,
                most / mean,
            )
        )
    return out
