"""Muon on whole matrices: Onefold beside gathering everywhere and DeepSpeed's own Muon, with the share
of Newton-Schulz told apart.

    python -m benchmarks.whole --deepspeed-python PYTHON     # 2 and 4 ranks, as many rounds as 12 minutes allow
    python -m benchmarks.whole --ranks 2 --sides onefold fsdp2 --iterations 5
    python -m benchmarks.whole --page                        # measures nothing: writes the table of docs/measured.md

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "models": {name: {"parameters": int}}, "notes": {side: how it is set up},
    "load": float,           # the machine's load average at the end
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
from statistics import fmean, median
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.harness import Row, Run, over_rounds
from benchmarks.pages import DASH, Cell, range_of, shown
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import LOSSES_COMPARED
from benchmarks.study import OPTIONS, Comparison, Study
from benchmarks.whole.settings import GOAL, NOTES, REFERENCE, SIDES, Setting, base_of

RESULTS = "whole_matrices"
LEGEND = (
    "step s: median of the timed steps of all rounds, a step lasting until its slowest rank is"
    " done. NS s: seconds of Newton-Schulz in a step, the mean over ranks (DeepSpeed's with the"
    " momentum); busiest: of the rank that has most of it. calls: of all ranks together in a step."
    " rest: a step without its NS s. rest × AdamW: over the step of the same stage and library with"
    f" AdamW alone, the median of the rounds' own ratios, with their range; at most {GOAL} is the"
    " goal. cpu s: processor time of a rank in a step, all threads. Memory: a rank's resident set"
    " beyond what the imported libraries take (the largest rank, the median round); peak: in timed"
    " steps; rest: between steps. sent: payload that a rank gave its sockets in a step, as the"
    " kernel counts it; ledger: what Onefold says that it sent (both the busiest rank's). for Muon:"
    " what it sent more than with AdamW alone, the mean over ranks. loss diff: largest relative"
    f" difference to `{REFERENCE}`'s losses (means over ranks) in the first {LOSSES_COMPARED} steps."
)


def newton_schulz(run: Run, of_ranks: Any = fmean) -> float:
    """Seconds a step: the median over steps of the mean over ranks."""
    steps = zip(*(rank["newton_schulz_s"] for rank in run.ranks), strict=True)
    return median(of_ranks(step) for step in steps)


def sent(run: Run, steps: int) -> float | None:
    """Bytes that a rank has sent in a step, the mean over ranks."""
    return harness.scaled(harness.of_ranks(run.ranks, "sent_bytes", fmean), steps)


def rows(setting: Setting, runs: Sequence[Run], missing: Sequence[str] = ()) -> list[Row]:
    """The rows of one setting, as `LEGEND` says. None: not measured, or the kernel does not say."""
    references = harness.by_round(runs, REFERENCE)

    def row(side: str, good: list[Run]) -> Row:
        base = harness.by_round(runs, base_of(side) or "")
        steps = {run.round: median(harness.step_seconds(run)) for run in good}
        shares = {run.round: newton_schulz(run) for run in good}
        ratios = [
            (steps[run.round] - shares[run.round]) / median(harness.step_seconds(base[run.round]))
            for run in good
            if run.round in base
        ]
        more = [
            mine - theirs
            for run in good
            if run.round in base
            and (mine := sent(run, setting.steps)) is not None
            and (theirs := sent(base[run.round], setting.steps)) is not None
        ]
        return {
            "step_s": median(s for run in good for s in harness.step_seconds(run)),
            "newton_schulz_s": median(shares.values()),
            "busiest_s": median(newton_schulz(run, max) for run in good),
            "calls": sum(rank["newton_schulz_calls"][-1] for rank in good[0].ranks),
            "rest_s": median(steps[number] - shares[number] for number in steps),
            **dict(zip(("ratio", "ratio_low", "ratio_high"), harness.spread(ratios), strict=True)),
            **{m: over_rounds(good, m) for m in ("peak_mib", "set_up_peak_mib", "rest_mib")},
            **{
                name: harness.scaled(over_rounds(good, name), setting.steps)
                for name in ("cpu_s", "sent_bytes", "ledger_bytes")
            },
            "more_bytes": harness.middle(more),
            "loss_difference": harness.loss_difference(good, references, LOSSES_COMPARED)
            if side.endswith("muon")
            else None,
        }

    return harness.rows_of(runs, row, missing)


COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "step s": shown("step_s", "{:.3f}"),
    "NS s": shown("newton_schulz_s", "{:.3f}"),
    "busiest": shown("busiest_s", "{:.3f}"),
    "calls": shown("calls"),
    "rest s": shown("rest_s", "{:.3f}"),
    "rest × AdamW": shown("ratio", "{:.2f}"),
    "range": range_of("ratio_low", "ratio_high"),
    "cpu s": shown("cpu_s", "{:.3f}"),
    "peak MiB": shown("peak_mib", "{:,.0f}"),
    "set-up MiB": shown("set_up_peak_mib", "{:,.0f}"),
    "rest MiB": shown("rest_mib", "{:,.0f}"),
    "sent MiB": shown("sent_bytes", "{:,.1f}", 2**20),
    "for Muon": shown("more_bytes", "{:,.1f}", 2**20),
    "ledger MiB": shown("ledger_bytes", "{:,.1f}", 2**20),
    "loss diff": shown("loss_difference", "{:.1e}"),
}


# -- docs/measured.md ------------------------------------------------------------------------------

PAGE = harness.ROOT / "docs" / "measured.md"
HEADING = "## Compare Muon on whole matrices"

SECTION: dict[str, Cell] = {
    "": shown("named"),
    "step": shown("step_s", "{:.2f} s"),
    "of it Newton-Schulz": shown("newton_schulz_s", "{:.2f} s"),
    "calls, all ranks": shown("calls"),
    "the rest, × AdamW's step": shown("ratio", "{:.2f}"),
    "range": range_of("ratio_low", "ratio_high"),
    "peak memory a rank": shown("peak_mib", "{:,.0f} MiB"),
    "sent": shown("sent_bytes", "{:,.0f} MiB", 2**20),
    "more than AdamW": lambda row: (
        DASH if row["more_bytes"] is None else f"{row['more_bytes'] / 2**20:,.0f} MiB"
    ),
}
SAID = {
    **{f"onefold-{n}-adamw": f"Onefold stage {n}, AdamW" for n in (1, 2, 3)},
    **{f"onefold-{n}-muon": f"**Onefold stage {n}, Muon**" for n in (1, 2, 3)},
    "fsdp2-adamw": "FSDP2, AdamW",
    "fsdp2-muon": "FSDP2, Muon, gathering everywhere",
    **{f"deepspeed-{n}-muon": f"DeepSpeed stage {n}, Muon" for n in (1, 2, 3)},
}


def section(result: dict[str, Any]) -> str:
    """What docs/measured.md says of a result, under `HEADING`."""
    settings = [Setting(**c["setting"]) for c in result["comparisons"]]
    first, place, versions = settings[0], result["machine"], result["versions"]
    rounds = max(row["rounds"] for c in result["comparisons"] for row in c["rows"])
    deepspeed = f", DeepSpeed {versions['deepspeed']}" if versions.get("deepspeed") else ""
    intro = (
        "Muon for the matrices of the blocks of a GPT of"
        f" {result['models'][first.model]['parameters'] / 1e6:.0f}M parameters, AdamW for the rest:"
        f" {first.precision}, {first.tokens} tokens a rank, gloo ranks of one thread on a"
        f" {place['cores']}-core {place['cpu']}, {result['date'][:10]}; torch {versions['torch']}"
        f"{deepspeed}, load average {result['load']:.0f}.\nNewton-Schulz runs in fp32, and"
        f" {first.iterations} of its 5 iterations: the processor multiplies no bf16, and the"
        " rest of a step shows best beside a small share. More iterations change neither bytes nor"
        f" calls.\nRounds of {first.steps} steps, in turns: {rounds}. Newton-Schulz is the mean over"
        " ranks; the rest is the step without it."
        f" [Raw table](../benchmarks/results/{RESULTS}.md), `python -m benchmarks.whole --help`."
    )
    parts, reached = [HEADING, intro], []
    for setting, c in zip(settings, result["comparisons"], strict=True):
        named = [{**row, "named": SAID[row["side"]]} for row in c["rows"]]
        parts += [f"{setting.ranks} ranks:", pages.table(SECTION, named)]
        ratios = {row["side"]: row["ratio"] for row in c["rows"]}
        told = (ratios.get(f"onefold-{n}-muon") for n in (1, 2, 3))
        reached.append([setting.ranks, *(DASH if r is None else f"{r:.2f}" for r in told)])
    heads = [f"ranks (goal: at most {GOAL} × AdamW's step)", *(f"stage {n}" for n in (1, 2, 3))]
    parts.append(pages.markdown([heads, *reached]))
    return "\n\n".join(part.rstrip() for part in parts)


def replaced(text: str, made: str, heading: str = HEADING) -> str:
    """A page with this section in place of the one that has its heading, or at the end."""
    before, found, old = text.partition(f"{heading}\n")
    if not found:
        return f"{text.rstrip()}\n\n{made}\n"
    _, further, behind = old.partition("\n## ")
    return f"{before}{made}\n\n## {behind}" if further else f"{before}{made}\n"


class Whole(Study):
    """Every side at every number of ranks."""

    schema, whole_rounds = "onefold-whole/1", True

    def read(self, setting: dict[str, Any]) -> Setting:
        return Setting(**setting)

    def take(self, setting: Setting, side: str) -> dict[str, Any]:
        return launch.run_side(side, setting, self.options)

    def found(self, comparison: Comparison) -> dict[str, Any]:
        return {"rows": rows(comparison.setting, comparison.runs, comparison.missing)}

    def document(self) -> dict[str, Any]:
        names = dict.fromkeys(c.setting.model for c in self.comparisons)
        counted = {name: {"parameters": count_parameters(name)} for name in names}
        return {"models": counted, "notes": NOTES, "load": os.getloadavg()[0]}

    def page(self, result: dict[str, Any]) -> str:
        parts = [pages.where(result)]
        for c in result["comparisons"]:
            parts += [f"**{Setting(**c['setting']).title}**", pages.table(COLUMNS, c["rows"])]
        return pages.page(*parts, LEGEND, *pages.notes(result["notes"]))


@harness.command(
    "whole",
    __doc__,
    **{
        **OPTIONS,
        "name": RESULTS,
        "rounds": 9,
        "steps": 2,
        "warmup": 1,
        "accumulation": ([1], "micro-batches an optimizer step"),
        "budget": 12.0,
        "timeout": 300.0,
    },
    ranks=([2, 4], "how many ranks"),
    tokens=(256, "tokens a rank and micro-batch"),
    iterations=(1, "of Newton-Schulz: Muon's are 5"),
    model=("gpt-110m", "which GPT", SHAPES),
    page=(False, "write the section of docs/measured.md from the results, and measure nothing"),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}; a family's name takes all of it"),
)
def main(options: harness.Options) -> int:
    """Writes the results after each turn, and a page of them."""
    if options.page:
        result = json.loads((options.output / f"{options.name}.json").read_text())
        PAGE.write_text(replaced(PAGE.read_text(), section(result)))
        return 0
    harness.check_at_least(
        options, 1, "ranks", "accumulation", "steps", "rounds", "tokens", "iterations"
    )
    harness.check_at_least(options, 0, "warmup")
    shared = ("model", "warmup", "steps", "threads", "tokens", "iterations")
    how = {option: getattr(options, option) for option in shared}
    settings = [
        Setting(ranks=ranks, accumulation=micro, size="", **how)
        for ranks in options.ranks
        for micro in options.accumulation
    ]
    return Whole(options, settings, harness.chosen(options.sides, SIDES)).run()


if __name__ == "__main__":
    sys.exit(main())
