"""From runs to rows: how far each side ends from the reference, and whether that is near enough.
Also the schema of the JSON.

{
  "schema": "onefold-convergence/1",
  "command": str, "date": ISO 8601 with zone, "finished": bool,
  "machine": {"cpu", "cores", "memory_gib", "system", "kernel"},
  "versions": {"python", "torch", "onefold", "commit"},
  "notes": {side: what it is},
  "cases": {name: {
    "case": {...},                       # settings.Case, field by field
    "rows": [{...}],                     # Row, field by field: the table
    "runs": [{                           # Run: one a side
      "side", "status", "error", "wall_s", "threads",
      "curve": {"losses": [step], "held_out": [[step, loss]], "masters": loss | null, "step_s":
                [step], "parameters", "trained", "between_bytes", "held_out_samples"}
    }]
  }}
}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.convergence.settings import LEARNS, REFERENCE, SIDES, YARDSTICKS, Case

SCHEMA = "onefold-convergence/1"
LAST = 20
"""Steps at the end whose training losses are averaged."""


@dataclass
class Run:
    """One side of one case. `status` is "ok", "failed" or "timeout"; `curve` is what rank 0
    wrote.
    """

    side: str
    status: str
    curve: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    wall_s: float = 0.0
    threads: int = 1

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `Run(**d)` reads back."""
        return dict(self.__dict__)

    @property
    def final(self) -> float:
        """The held-out loss after the last step."""
        return float(self.curve["held_out"][-1][1])


@dataclass
class Row:
    """One side of one case.

    `first` and `final` are held-out losses before and after training; `difference` is the final
    one's to the reference's, relative, and so is `masters_difference` for what a checkpoint of this
    side holds, computed with nothing encoded. `largest` is the largest difference of a held-out
    loss on the way, the one before the first step left out. `trained` is the mean training loss of
    the last
    steps. `bytes_ratio`: bytes that a rank sends to the other node in a step, over the reference's.
    `verdict` is a sentence.
    """

    side: str
    status: str
    first: float | None = None
    final: float | None = None
    difference: float | None = None
    masters_difference: float | None = None
    largest: float | None = None
    trained: float | None = None
    bytes_ratio: float | None = None
    step_s: float | None = None
    verdict: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, null for None."""
        return asdict(self)


def fell(run: Run) -> float:
    """By what share of itself the held-out loss fell."""
    return 1 - run.final / float(run.curve["held_out"][0][1])


def summarize(case: Case, runs: Sequence[Run]) -> list[Row]:
    """The rows of one case in the order of `settings.SIDES`."""
    by_side = {run.side: run for run in runs}
    reference = by_side.get(REFERENCE)
    if reference is not None and reference.status != "ok":
        reference = None
    return [_row(case, by_side[side], reference) for side in SIDES if side in by_side]


def _row(case: Case, run: Run, reference: Run | None) -> Row:
    if run.status != "ok":
        return Row(run.side, run.status, verdict=run.status, error=run.error)
    curve = run.curve
    row = Row(
        run.side,
        "ok",
        first=float(curve["held_out"][0][1]),
        final=run.final,
        trained=fmean(curve["losses"][-LAST:]),
        step_s=median(curve["step_s"]),
    )
    if reference is None:
        row.verdict = "no reference to compare with"
        return row
    theirs, base = reference.curve, reference.final
    row.difference = run.final / base - 1
    row.largest = max(
        (
            abs(a / b - 1)
            for (_, a), (_, b) in zip(curve["held_out"][1:], theirs["held_out"][1:], strict=True)
        ),
        default=None,
    )
    if curve["masters"] is not None:
        row.masters_difference = float(curve["masters"]) / base - 1
    if theirs["between_bytes"]:
        row.bytes_ratio = curve["between_bytes"] / theirs["between_bytes"]
    row.verdict = verdict(case, run.side, row.difference, fell(reference))
    return row


def verdict(case: Case, side: str, difference: float, fallen: float) -> str:
    """Within the limit or not, unless there is nothing to judge: an untrained reference, the
    reference itself, a yardstick.
    """
    if not fallen >= LEARNS:
        return f"shows nothing: the reference's held-out loss fell by {fallen:.1%} only"
    if side == REFERENCE:
        return f"the reference; its held-out loss fell by {fallen:.1%}"
    if side in YARDSTICKS:
        return "a yardstick"
    return f"{'within' if abs(difference) <= case.limit else 'NOT within'} {case.limit:.0%}"


def missed(rows: Sequence[Row]) -> list[str]:
    """Sides that have failed, or ended too far from the reference, or have shown nothing."""
    return [
        row.side
        for row in rows
        if row.status != "ok"
        or not row.verdict.startswith(("within", "the reference", "a yardstick"))
    ]
