"""What stands at the top of the page, and predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.observe.report.metrics import Metrics
from onefold.observe.report.wires import in_brief
from onefold.observe.report.words import in_bytes, in_seconds, in_unit
from onefold.observe.runfile import Observed, RankObserved
from onefold.observe.trace import Recording
from onefold.plan.schema import Account, compare

#: Ratios up to here from 1 are called close.
CLOSE = 0.05
#: And up to here near.
NEAR = 0.25


@dataclass(frozen=True)
class Tile:
    """One figure at the top: what it is, its value, and what goes with it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ComparedLine:
    """One line of the table, ready to be read. `verdict`: "close", "near", "far", or "" where there
    is no ratio.
    """

    name: str
    predicted: str
    measured: str
    ratio: str
    verdict: str
    is_sum: bool


def fullest(ranks: Sequence[RankObserved]) -> RankObserved:
    """The rank that held most."""
    return max(ranks, key=lambda r: r.measured.peak_bytes)


def headline(observed: Observed | None) -> str:
    """The run in a line."""
    if observed is None:
        return ""
    stage = f"ZeRO stage {observed.stage}" if observed.stage is not None else "a recipe of its own"
    ranks = "1 rank" if observed.world_size == 1 else f"{observed.world_size} ranks"
    return f"{stage} on {ranks}" if observed.recipe else ranks


def tiles(metrics: Metrics | None, observed: Observed | None) -> list[Tile]:
    """The figures that one looks for first; those that are not known are left out."""
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
    """What the machine says beside the ledgers, in a sentence; "" where the run did not ask it."""
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


#: What a move between tiers is called.
_MOVED = {
    "up": "to the device",
    "down": "to the host",
    "read": "read from NVMe",
    "written": "written to NVMe",
}


def between_tiers(rank: RankObserved, step: Recording) -> str:
    """What a rank moved between tiers in a step, and how long it waited for it, in a sentence; ""
    where nothing moved.
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
    """What a run says of itself, as people read it: words for keys, units, three digits of
    fractions.
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
    """`compare` as text."""
    out = []
    for line in compare(plan, measured):
        if not line.predicted and not line.measured:
            continue  # neither was there anything, nor was there to be
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
