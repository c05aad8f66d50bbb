"""Onefold beside FSDP2 on a mesh of two axes: the same model, cut over one axis by the same code of
torch, sharded over the other by each library.

    python -m benchmarks.axes                     # TP 2 x DP 2, EP 2 x DP 2, PP 2 x DP 2
    python -m benchmarks.axes --axes tp --sides fsdp2 onefold-3 --rounds 1
    python -m benchmarks.axes --page              # measures nothing: writes the table of docs/measured.md

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "models": {name: {"parameters": int}}, "notes": {side: how it is set up},
    "load": float,           # the machine's load average at the end; four ranks make four of it
    "comparisons": [{
      "setting": {...},      # settings.Setting, field by field
      "rows": [{...}],       # the table: `rows`
      "runs": [{"side", "round", "status", "error", "wall_s", "ranks": [{...}]}]      # benchmarks/worker.py, one a side and round
    }]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.axes.model import SHAPES, count_parameters
from benchmarks.axes.settings import AXES, GOALS, NOTES, REFERENCE, SIDES, SIZES, Setting
from benchmarks.harness import Row, Run, over_rounds
from benchmarks.pages import DASH, Cell, range_of, shown
from benchmarks.peers.settings import LOSSES_COMPARED, PRECISIONS
from benchmarks.study import OPTIONS, Comparison, Study, timings

RESULTS = "axes_beside_fsdp2"
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


# -- docs/measured.md ------------------------------------------------------------------------------

PAGE = harness.ROOT / "docs" / "measured.md"
HEADING = "## Compare FSDP2 beside other axes"

SECTION: dict[str, Cell] = {
    "": shown("named"),
    "step, × FSDP2": shown("ratio", "{:.2f}"),
    "range": range_of("ratio_low", "ratio_high"),
    "processor time, × FSDP2": shown("cpu_ratio", "{:.2f}"),
    "peak memory a rank": shown("peak_mib", "{:,.0f} MiB"),
    "peak, × FSDP2": shown("peak_ratio", "{:.2f}"),
    "sent": shown("sent_bytes", "{:,.0f} MiB", 2**20),
    "losses equal FSDP2's to": lambda row: (
        DASH
        if row["side"] == REFERENCE
        else f"{row['loss_difference']:.0e}"
        if row["loss_difference"]
        else "every bit"
    ),
}
SAID_OF = {"ratio": "step, × FSDP2", "peak_ratio": "peak, × FSDP2"}
SAID = {
    "fsdp2": "FSDP2",
    "fsdp2-kept": "FSDP2, reshard_after_forward=False",
    **{f"onefold-{stage}": f"**Onefold stage {stage}**" for stage in range(4)},
}


def section(result: dict[str, Any]) -> str:
    """What docs/measured.md says of a result, under `HEADING`."""
    lines, reached = [], []
    for c in result["comparisons"]:
        named = AXES[c["setting"]["axes"]]
        by_side = {row["side"]: row for row in c["rows"]}
        for side, row in by_side.items():
            ratio = harness.scaled(row["cpu_s"], by_side[REFERENCE]["cpu_s"])
            lines.append({**row, "named": f"{named}: {SAID[side]}", "cpu_ratio": ratio})
        ours = by_side["onefold-3"]
        reached.append([named, *(f"{ours[figure]:.2f}" for figure in GOALS)])
    rounds = max(row["rounds"] for c in result["comparisons"] for row in c["rows"])
    place, when = result["machine"], result["date"][:10]
    settings = [Setting(**c["setting"]) for c in result["comparisons"]]
    sizes = "; ".join(
        f"{s.axes.upper()}: {result['models'][s.model]['parameters'] / 1e6:.0f}M parameters,"
        f" {s.accumulation} × {s.tokens} tokens a data rank"
        for s in settings
    )
    intro = (
        f"The table shows one step on {settings[0].ranks} gloo ranks of one thread on a"
        f" {place['cores']}-core {place['cpu']}, {when}; torch {result['versions']['torch']},"
        f" {settings[0].precision}, load average {result['load']:.0f}. {sizes}.\nThe same code of torch cuts the model over one axis"
        " for every side: `parallelize_module`, experts as DTensors, `Schedule1F1B`. Each library"
        " shards it over the other. FSDP2 shards each block and the root; of experts, over the"
        f" ranks that hold the same ones.\nRounds of {settings[0].steps} steps, in turns: {rounds}."
        " Values are medians, ratios of steps those of the rounds' own. Sent bytes include the other axis's activations."
        f" [Raw table](../benchmarks/results/{RESULTS}.md), `python -m benchmarks.axes --help`."
    )
    goals = [["stage 3", *(f"{SAID_OF[of]} (goal: {goal})" for of, goal in GOALS.items())]]
    return "\n\n".join(
        part.rstrip()
        for part in (
            HEADING,
            intro,
            pages.table(SECTION, lines),
            pages.markdown([*goals, *reached]),
        )
    )


def replaced(text: str, made: str) -> str:
    """A page with this section in place of the one that has its heading."""
    before, _, old = text.partition(f"{HEADING}\n")
    _, _, behind = old.partition("\n## ")
    return f"{before}{made}\n\n## {behind}"


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
        # Its ranks are four of it: the rest is other work
        return {"models": counted, "notes": NOTES, "load": os.getloadavg()[0]}

    def page(self, result: dict[str, Any]) -> str:
        parts = [pages.where(result)]
        for c in result["comparisons"]:
            parts += [f"**{Setting(**c['setting']).title}**", pages.table(COLUMNS, c["rows"])]
        return pages.page(*parts, LEGEND, *pages.notes(result["notes"]))


@harness.command(
    "axes",
    __doc__,
    name=RESULTS,
    rounds=3,
    steps=5,
    warmup=2,
    timeout=300.0,
    axes=(list(AXES), "which compositions", AXES),
    page=(False, "write the section of docs/measured.md from the results, and measure nothing"),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
    precision=("fp32", "what is computed in", PRECISIONS),
    tiny=(False, "models of a moment, for tests"),
    **OPTIONS,
)
def main(options: harness.Options) -> int:
    """With the defaults a round takes about three minutes on two cores."""
    if options.page:
        result = json.loads((options.output / f"{options.name}.json").read_text())
        PAGE.write_text(replaced(PAGE.read_text(), section(result)))
        return 0
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
