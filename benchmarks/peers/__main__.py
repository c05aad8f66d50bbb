"""Onefold and its peers, measured alternately on one model, the same data and the same ranks.

    python -m benchmarks.peers --quick            # one setting, two minutes or so
    python -m benchmarks.peers --budget 60        # each respect varied by itself, as many rounds as an hour allows
    python -m benchmarks.peers --full --resume    # every combination: hours, in as many sittings as it takes

A *setting* is what all peers share: model, tokens a rank, precision, ranks, micro-batches a step.
For each setting the peers run in turn, round after round (A B C A B C ...), every one in its own
fresh processes, so that a drift of the machine falls on all of them and no peer inherits another's
memory.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "models": {name: {"parameters": int}}, "notes": {peer: how it is set up},
    "comparisons": [{
      "setting": {...},      # settings.Setting, field by field
      "rows": [{...}],       # the table: `rows`
      "runs": [{"peer", "round", "status", "error", "wall_s", "ranks": [{...}]}]      # benchmarks/worker.py, one a peer and round
    }]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.harness import Row, Run, over_rounds
from benchmarks.pages import DASH, Cell, Panel, range_of, shown
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import (
    LOSSES_COMPARED,
    NOTES,
    PEERS,
    PRECISIONS,
    REFERENCE,
    SIZES,
    Setting,
    matrix,
)
from benchmarks.study import OPTIONS, Comparison, Study, timings

LEGEND = (
    "step s: median of the timed steps of all rounds, a step lasting until its slowest rank is"
    " done. × DDP: median of the rounds' ratios, with their range. cpu"
    " s: processor time of a rank in a step, all threads. Memory: a rank's resident set beyond what"
    " the imported libraries take (the largest rank, the median round; the C library gives its free"
    " heap back before the first and after the last timed step); peak: in timed steps; set-up:"
    " while building and warming up; rest: between steps. sent: payload a rank gave its sockets in"
    " an optimizer step, as the kernel counts it; X: 4 bytes a parameter times (N-1)/N, so an fp32"
    " all-reduce is 2. ledger: what Onefold says it sent. loss diff: largest relative difference to"
    f" DDP's losses (means over ranks) in the first {LOSSES_COMPARED} steps."
)


QUICK: dict[str, Any] = {
    "sizes": ["communication"], "precisions": ["fp32"], "ranks": [2], "accumulation": [1],
    "rounds": 1, "steps": 3, "warmup": 1,
}  # fmt: skip


def settings_of(options: harness.Options) -> list[Setting]:
    """The settings that the command line asks for."""
    if options.quick:
        vars(options).update(QUICK)
    harness.check_at_least(options, 1, "ranks", "accumulation", "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
    shared = ("model", "warmup", "steps", "clip", "threads", "tokens", "full")
    return matrix(
        options.sizes,
        options.precisions,
        options.ranks,
        options.accumulation,
        **{name: getattr(options, name) for name in shared},
    )


def rows(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting, as `LEGEND` says. None: not measured, or the kernel does not say."""
    references = harness.by_round(runs, REFERENCE)

    def row(_: str, good: list[Run]) -> Row:
        timed = timings(good, references)
        of_a_step = {
            name: harness.scaled(over_rounds(good, name, fmean), setting.steps)
            for name in ("cpu_s", "sent_bytes", "ledger_bytes")
        }
        return {
            **timed,
            "tokens_a_second": setting.tokens_a_step / timed["step_s"],
            **{m: over_rounds(good, m) for m in ("peak_mib", "set_up_peak_mib", "rest_mib")},
            **of_a_step,
            "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED),
        }

    return harness.rows_of(runs, row, missing, "peer")


def columns(setting: Setting) -> dict[str, Cell]:
    """What the table shows of a row of this setting."""
    unit = 4 * count_parameters(setting.model) * (setting.ranks - 1) / setting.ranks
    return {
        "peer": shown("peer"),
        "step s": shown("step_s", "{:.3f}"),
        "× DDP": shown("ratio", "{:.2f}"),
        "range": range_of("ratio_low", "ratio_high"),
        "tokens/s": shown("tokens_a_second", "{:,.0f}"),
        "cpu s": shown("cpu_s", "{:.3f}"),
        "peak MiB": shown("peak_mib", "{:,.0f}"),
        "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
        "rest MiB": shown("rest_mib", "{:,.0f}"),
        "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
        "sent / X": shown("sent_bytes", "{:.3f}", unit) if unit else lambda row: DASH,
        "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
        "loss diff": shown("loss_difference", "{:.1e}"),
    }


class Peers(Study):
    """Every peer in every setting."""

    schema, key, whole_rounds = "onefold-peers/1", "peer", True

    def read(self, setting: dict[str, Any]) -> Setting:
        return Setting(**setting)

    def those(self, setting: Setting) -> list[str]:
        return setting.those(self.sides)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        return launch.run_side(side, setting, self.options)

    def found(self, comparison: Comparison) -> dict[str, Any]:
        return {"rows": rows(comparison.setting, comparison.runs, comparison.missing)}

    def document(self) -> dict[str, Any]:
        name = self.options.model
        return {"models": {name: {"parameters": count_parameters(name)}}, "notes": NOTES}

    def page(self, result: dict[str, Any]) -> str:
        parts = [pages.where(result)]
        for c in result["comparisons"]:
            setting = Setting(**c["setting"])
            parts += [f"**{setting.title}**", pages.table(columns(setting), c["rows"])]
        return pages.page(*parts, LEGEND, *pages.notes(NOTES))

    def charts(self, result: dict[str, Any]) -> list[list[Panel]]:
        """Step time and peak memory."""
        found = []
        for c in result["comparisons"]:
            good = [row for row in c["rows"] if row["status"] == "ok"]
            ratio = {row["peer"]: row["ratio"] or 0.0 for row in good}
            peak = {row["peer"]: row["peak_mib"] or 0.0 for row in good}
            title = Setting(**c["setting"]).title
            memory = Panel("peak memory of a rank, MiB", bars=peak, form="%.0f")
            found.append([Panel("step time, × DDP", title, ratio, levels=[1.0]), memory])
        return found


@harness.command(
    "peers",
    __doc__,
    rounds=3,
    steps=4,
    warmup=2,
    clip=0.0,
    timeout=900.0,
    peers=(list(PEERS), f"which of {', '.join(PEERS)}; a family's name takes all of it"),
    full=(
        False,
        "every combination, hours; else those that differ from the first of each option in one"
        " respect",
    ),
    sizes=(list(SIZES), "what bounds a step", SIZES),
    precisions=(list(PRECISIONS), "what is computed in", PRECISIONS),
    ranks=([2, 4], "how many ranks"),
    accumulation=([1, 4], "micro-batches an optimizer step"),
    tokens=(None, "tokens a rank and micro-batch in place of the size's own", int),
    quick=(False, "communication-bound, fp32, 2 ranks, no accumulation, one round of 3 steps"),
    model=("gpt-110m", "which GPT", SHAPES),
    **OPTIONS,
)
def main(options: harness.Options) -> int:
    """With the defaults a round takes about 45 minutes on two cores."""
    settings = settings_of(options)
    return Peers(options, settings, harness.chosen(options.peers, PEERS, "peers")).run()


if __name__ == "__main__":
    sys.exit(main())
