"""From runs to rows: how far each side ends from the reference, and whether that is near enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.convergence.settings import LEARNS, REFERENCE, SIDES, YARDSTICKS, Case
from benchmarks.harness import Row, relative

LAST = 20
"""Steps at the end whose training losses are averaged."""


@dataclass
class Run:
    """One side of one case. `curve` is what rank 0 wrote; `status` as in `harness.Run`."""

    side: str
    status: str
    curve: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    wall_s: float = 0.0
    threads: int = 1
    round = 1

    def to_json(self, key: str = "side") -> dict[str, Any]:
        """A plain dictionary that `Run(**d)` reads back."""
        return asdict(self)

    @property
    def final(self) -> float:
        """The held-out loss after the last step."""
        return float(self.curve["held_out"][-1][1])

    @property
    def fell(self) -> float:
        """By what share of itself the held-out loss fell."""
        return 1 - self.final / float(self.curve["held_out"][0][1])


def rows(case: Case, runs: Sequence[Run]) -> list[Row]:
    """The rows of one case in the order of `settings.SIDES`; `LEGEND` says what they hold."""
    by_side = {run.side: run for run in runs}
    reference = by_side.get(REFERENCE)
    if reference is not None and reference.status != "ok":
        reference = None
    return [_row(case, by_side[side], reference) for side in SIDES if side in by_side]


def _row(case: Case, run: Run, reference: Run | None) -> Row:
    names = ("first", "final", "difference", "masters_difference", "largest", "trained")
    row: Row = {"side": run.side, "status": run.status}
    row |= dict.fromkeys((*names, "bytes_ratio", "step_s"))
    if run.status != "ok":
        return {**row, "verdict": run.status, "error": run.error}
    curve, held_out = run.curve, [loss for _, loss in run.curve["held_out"]]
    row |= {"first": float(held_out[0]), "final": run.final, "error": ""}
    row |= {"trained": fmean(curve["losses"][-LAST:]), "step_s": median(curve["step_s"])}
    if reference is None:
        return {**row, "verdict": "no reference to compare with"}
    theirs, base = reference.curve, reference.final
    row["difference"] = run.final / base - 1
    row["largest"] = relative(held_out[1:], [loss for _, loss in theirs["held_out"][1:]])
    if curve["masters"] is not None:
        row["masters_difference"] = float(curve["masters"]) / base - 1
    if theirs["between_bytes"]:
        row["bytes_ratio"] = curve["between_bytes"] / theirs["between_bytes"]
    return {**row, "verdict": verdict(case, run.side, row["difference"], reference.fell)}


def verdict(case: Case, side: str, difference: float, fallen: float) -> str:
    """Whether a side is within the limit, or why there is nothing to judge."""
    if not fallen >= LEARNS:
        return f"shows nothing: the reference's held-out loss fell by {fallen:.1%} only"
    if side == REFERENCE:
        return f"the reference; its held-out loss fell by {fallen:.1%}"
    if side in YARDSTICKS:
        return "a yardstick"
    return f"{'within' if abs(difference) <= case.limit else 'NOT within'} {case.limit:.0%}"


def missed(found: Sequence[Row]) -> list[str]:
    """Sides that have failed, or ended too far from the reference, or have shown nothing."""
    good = ("within", "the reference", "a yardstick")
    return [
        row["side"] for row in found if row["status"] != "ok" or not row["verdict"].startswith(good)
    ]
