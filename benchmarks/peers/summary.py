"""From rounds to rows: medians, ratios to DDP, differences of losses. Also the schema of the JSON
that is written.

{
  "schema": "onefold-peers/1",
  "command": str, "date": ISO 8601 with zone, "finished": bool,
  "machine": {"cpu", "cores", "memory_gib", "system", "kernel"},
  "versions": {"python", "torch", "onefold", "deepspeed", "commit"},   # null: not installed
  "models": {name: {"parameters": int}},
  "notes": {peer: how it is set up},
  "comparisons": [{
    "setting": {...},              # settings.Setting, field by field
    "rows": [{...}],               # Row, field by field: the table
    "runs": [{                     # launch.Run: the raw measurements, one a peer and round
      "peer", "round", "status", "error", "wall_s",
      "ranks": [{"rank", "losses", "step_s", "cpu_s", "build_s", "baseline_mib", "set_up_peak_mib",
                 "peak_mib", "peak_is_of_timed_steps", "rest_mib", "sent_bytes", "ledger_bytes",
                 "loopback_bytes"}]
    }]
  }]
}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from benchmarks import harness
from benchmarks.harness import step_seconds
from benchmarks.peers.launch import Run
from benchmarks.peers.settings import REFERENCE, Setting

SCHEMA = "onefold-peers/1"
LOSSES_COMPARED = 6
"""Steps whose losses are compared: later ones differ by what rounding has grown to, in equal libraries too."""


@dataclass
class Row:
    """One peer in one setting. None: not measured, or the kernel does not say.

    `step_s` is the median over all timed steps of all rounds, a step lasting until its slowest rank
    is done. `ratio` is the median over rounds of (median step here / median step of DDP in the same
    round), `ratio_low` and `ratio_high` its extremes. Memory is MiB of resident set beyond the
    baseline, the largest rank, the median round: `peak_mib` during the timed steps,
    `set_up_peak_mib` from building the model to the end of warm-up, `rest_mib` after the last step;
    the C library gives its free heap back before the first and after the last timed step. `cpu_s`
    (processor time), `sent_bytes` and `ledger_bytes` are per rank and optimizer step.
    `loss_difference` is the largest relative difference to DDP's losses (means over ranks) in the
    first steps.
    """

    peer: str
    status: str
    rounds: int = 0
    step_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    tokens_a_second: float | None = None
    cpu_s: float | None = None
    peak_mib: float | None = None
    set_up_peak_mib: float | None = None
    rest_mib: float | None = None
    sent_bytes: float | None = None
    ledger_bytes: float | None = None
    loss_difference: float | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, null for None."""
        return asdict(self)


def _over_rounds(runs: Sequence[Run], field: str, *, largest: bool) -> float | None:
    """The median over rounds of the largest (or mean) value over ranks."""
    found = []
    for run in runs:
        values = [rank[field] for rank in run.ranks if rank[field] is not None]
        if values:
            found.append(max(values) if largest else fmean(values))
    return median(found) if found else None


def _per_step(value: float | None, setting: Setting) -> float | None:
    return None if value is None else value / setting.steps


def summarize(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting in the order in which the peers ran; `missing` peers are not
    installed.
    """
    references = harness.by_round(runs, REFERENCE, "peer")

    def row(peer: str, good: list[Run]) -> Row:
        step = median(second for run in good for second in step_seconds(run))
        ratio, low, high = harness.spread(harness.ratios(good, references))
        return Row(
            peer,
            "ok",
            rounds=len(good),
            step_s=step,
            ratio=ratio,
            ratio_low=low,
            ratio_high=high,
            tokens_a_second=setting.tokens_a_step / step,
            cpu_s=_per_step(_over_rounds(good, "cpu_s", largest=False), setting),
            peak_mib=_over_rounds(good, "peak_mib", largest=True),
            set_up_peak_mib=_over_rounds(good, "set_up_peak_mib", largest=True),
            rest_mib=_over_rounds(good, "rest_mib", largest=True),
            sent_bytes=_per_step(_over_rounds(good, "sent_bytes", largest=False), setting),
            ledger_bytes=_per_step(_over_rounds(good, "ledger_bytes", largest=False), setting),
            loss_difference=harness.loss_difference(good, references, LOSSES_COMPARED),
        )

    return harness.sides_of(runs, row, Row, missing, "peer")
