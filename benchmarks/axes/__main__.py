"""Onefold beside FSDP2 on a mesh of two axes: the same model, cut over one axis by the same code of
torch, sharded over the other by each library.

    python -m benchmarks.axes                     # TP 2 x DP 2, EP 2 x DP 2, PP 2 x DP 2
    python -m benchmarks.axes --axes tp --sides fsdp2 onefold-3 --rounds 1

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "models": {name: {"parameters": int}}, "notes": {side: how it is set up},
    "comparisons": [{
      "setting": {...},      # settings.Setting, field by field
      "rows": [{...}],       # the table: `rows`
      "runs": [{"side", "round", "status", "error", "wall_s", "ranks": [{...}]}]      # benchmarks/worker.py, one a side and round
    }]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.axes.model import SHAPES, count_parameters
from benchmarks.axes.settings import AXES, NOTES, REFERENCE, SIDES, SIZES, Setting
from benchmarks.harness import Row, Run, over_rounds
from benchmarks.pages import Cell, range_of, shown
from benchmarks.peers.settings import LOSSES_COMPARED, PRECISIONS
from benchmarks.study import OPTIONS, Comparison, Study, timings

LEGEND = (
    "step s: median of the timed steps of all rounds, a step lasting until its slowest rank is"
    " done. × FSDP2: median of the rounds' ratios to `fsdp2`, with their range. cpu s: processor"
    " time of a rank in a step, all threads. Memory: a rank's resident set beyond what the imported"
    " libraries take (the largest rank, the median round); peak: in timed steps; rest: between"
    " steps. sent: payload that a rank gave its sockets in an optimizer step, as the kernel counts"
    " it, activations of the other axis included. ledger: what Onefold says that it sent for"
    " parameters and gradients. loss diff: largest relative difference to `fsdp2`'s losses (means"
    f" over ranks) in the first {LOSSES_COMPARED} steps."
)


def rows(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting, as `LEGEND` says. None: not measured, or the kernel does not say."""
    references = harness.by_round(runs, REFERENCE)
    theirs = over_rounds(references.values(), "peak_mib")

    def row(_: str, good: list[Run]) -> Row:
        timed = timings(good, references)
        peak = over_rounds(good, "peak_mib")
        of_a_step = {
            name: harness.scaled(over_rounds(good, name, fmean), setting.steps)
            for name in ("cpu_s", "sent_bytes", "ledger_bytes")
        }
        return {
            **timed,
            "tokens_a_second": setting.tokens_a_step / timed["step_s"],
            **{m: over_rounds(good, m) for m in ("peak_mib", "set_up_peak_mib", "rest_mib")},
            "peak_ratio": peak / theirs if peak and theirs else None,
            **of_a_step,
            "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED),
        }

    return harness.rows_of(runs, row, missing)


COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.3f}"),
    "× FSDP2": shown("ratio", "{:.2f}"),
    "range": range_of("ratio_low", "ratio_high"),
    "cpu s": shown("cpu_s", "{:.3f}"),
    "peak MiB": shown("peak_mib", "{:,.0f}"),
    "peak × FSDP2": shown("peak_ratio", "{:.2f}"),
    "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
    "rest MiB": shown("rest_mib", "{:,.0f}"),
    "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
    "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
    "loss diff": shown("loss_difference", "{:.1e}"),
}


class BesideFSDP2(Study):
    """Every side in every composition."""

    schema, whole_rounds = "onefold-axes/1", True

    def read(self, setting: dict[str, Any]) -> Setting:
        return Setting(**setting)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        return launch.run_side(side, setting, self.options)

    def found(self, comparison: Comparison) -> dict[str, Any]:
        return {"rows": rows(comparison.setting, comparison.runs, comparison.missing)}

    def document(self) -> dict[str, Any]:
        names = dict.fromkeys(c.setting.model for c in self.comparisons)
        counted = {name: {"parameters": count_parameters(name)} for name in names}
        return {"models": counted, "notes": NOTES}

    def page(self, result: dict[str, Any]) -> str:
        parts = [pages.where(result)]
        for c in result["comparisons"]:
            parts += [f"**{Setting(**c['setting']).title}**", pages.table(COLUMNS, c["rows"])]
        return pages.page(*parts, LEGEND, *pages.notes(result["notes"]))


@harness.command(
    "axes",
    __doc__,
    name="axes_beside_fsdp2",
    rounds=3,
    steps=5,
    warmup=2,
    timeout=300.0,
    axes=(list(AXES), "which compositions", AXES),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
    precision=("fp32", "what is computed in", PRECISIONS),
    tiny=(False, "models of a moment, for tests"),
    **OPTIONS,
)
def main(options: harness.Options) -> int:
    """With the defaults a round takes about three minutes on two cores."""
    harness.check_at_least(options, 1, "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
    shared = ("warmup", "steps", "threads", "precision")
    settings = []
    for axes in options.axes:
        name, tokens, micro = SIZES[axes]
        if options.tiny:
            name, tokens = f"{name.partition('-')[0]}-tiny", SHAPES["gpt-tiny"].seq
        how = {option: getattr(options, option) for option in shared}
        settings.append(
            Setting(axes=axes, model=name, tokens=tokens, accumulation=micro, size="", **how)
        )
    return BesideFSDP2(options, settings, harness.chosen(options.sides, SIDES)).run()


if __name__ == "__main__":
    sys.exit(main())
