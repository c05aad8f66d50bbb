"""Does Muon learn alike when it is sharded? One process and two ranks on the same samples, one curve;
and AdamW's beside it.

    python -m benchmarks.whole.learning --cases scratch     # a Llama of 20M parameters from scratch
    python -m benchmarks.whole.learning --cases smollm2 --resume
    python -m benchmarks.whole.learning --page              # measures nothing: writes a section of docs/whole-matrices.md

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "notes": {side: what it is},
    "cases": {name: {
      "case": {...},             # learner.Case, field by field
      "rows": [{...}],           # the table: `rows`
      "runs": [{"side", "round", "status", "error", "wall_s", "ranks": [{...}]}]      # learner.train, one a side
    }}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.harness import Refused, Row, Run
from benchmarks.pages import Cell, Panel, shown
from benchmarks.study import Comparison, Study
from benchmarks.whole.learner import STAGE, Case

SIDES = ("alone", "sharded", "adamw")
REFERENCE = "alone"
NOTES: dict[str, str] = {
    "alone": "Muon in one process of plain PyTorch, which adds up the gradients of both ranks' samples",
    "sharded": f"Muon at stage {STAGE} on two ranks",
    "adamw": f"AdamW at stage {STAGE} on two ranks, at the rate that it has beside Muon",
}

_SAME: dict[str, Any] = {
    "steps": 200, "ranks": 2, "ranks_a_node": 2, "sides": SIDES, "limit": 0.001,
}  # fmt: skip
CASES: dict[str, Case] = {
    "scratch": Case(
        "a Llama of 20M parameters, from scratch", "llama:20m", "bytes", seq=64, micro_batch=2, lr=3e-4,
        held_out=32, eval_batch=16, every=40, **_SAME,
    ),
    # Newton-Schulz of all 210 matrices is 1.5 TFLOP a step: 18 s on one core. Of these 60 it is 0.03
    "smollm2": Case(
        "SmolLM2-135M, fine-tuned, Muon for keys and values", "smollm2", "auto", seq=32, micro_batch=1, lr=5e-5, muon_lr=1e-3,
        held_out=16, eval_batch=8, every=40, by_muon=("*.k_proj.weight", "*.v_proj.weight"), **_SAME,
    ),
}  # fmt: skip
CHANGED = (
    "model", "tokenizer", "steps", "seq", "micro_batch", "lr", "muon_lr", "held_out", "every",
)  # fmt: skip
"""Fields of a case that have an option of their name."""

LEGEND = (
    "first, final: mean loss a token of the held-out text before and after training. from alone:"
    " the largest relative difference of a step's loss to `alone`'s. calls: of Newton-Schulz, of all"
    " ranks together in a step. NS s: its seconds a step, the mean over ranks. step s: median of the"
    " steps."
)
COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "first": shown("first", "{:.4f}"),
    "final": shown("final", "{:.4f}"),
    "from alone": shown("difference", "{:.1e}"),
    "calls": shown("calls"),
    "NS s": shown("newton_schulz_s", "{:.2f}"),
    "step s": shown("step_s", "{:.2f}"),
}


def rows(runs: Sequence[Run]) -> list[Row]:
    """The rows of one case, as `LEGEND` says."""
    references = harness.by_round(runs, REFERENCE)

    def row(side: str, good: list[Run]) -> Row:
        (run,) = good
        told = run.ranks[0]
        return {
            "first": told["held_out"][0][1],
            "final": told["held_out"][-1][1],
            "difference": harness.loss_difference(good, references),
            "calls": sum(rank["newton_schulz_calls"][-1] for rank in run.ranks),
            "newton_schulz_s": fmean(median(rank["newton_schulz_s"]) for rank in run.ranks),
            "step_s": median(harness.step_seconds(run)),
        }

    return harness.rows_of(runs, row)


def smoothed(losses: Sequence[float], width: int) -> Iterator[tuple[int, float]]:
    """(step, loss): means of so many steps each."""
    for first in range(0, len(losses) - width + 1, width):
        yield first + width, fmean(losses[first : first + width])


def setting(case: Case) -> str:
    """What all sides of a case share, in words."""
    return (
        f"{case.steps} steps of {case.ranks} × {case.micro_batch} × {case.seq} tokens, AdamW to"
        f" {case.lr:g} and Muon to {case.muon_lr:g} and down by a cosine, {case.precision}, seed"
        f" {case.seed}"
    )


# -- docs/whole-matrices.md ------------------------------------------------------------------------

RESULTS = "whole_learning"
PAGE = harness.ROOT / "docs" / "whole-matrices.md"
HEADING = "## See how it learns"
SAID = {
    "alone": "Muon, one process",
    "sharded": f"Muon, stage {STAGE}, two ranks",
    "adamw": f"AdamW, stage {STAGE}, two ranks",
}
SECTION: dict[str, Cell] = {
    "": shown("named"),
    "held-out loss before": shown("first", "{:.3f}"),
    "after": shown("final", "{:.4f}"),
    "losses of all steps equal one process's to": lambda row: (
        pages.DASH
        if row["side"] == REFERENCE
        else f"{row['difference']:.0e}"
        if row["difference"]
        else "every bit"
    ),
}


def section(result: dict[str, Any]) -> str:
    """What docs/whole-matrices.md says of a result, under `HEADING`."""
    parts = [
        HEADING,
        "One process of plain PyTorch and two ranks read the same samples in the same order, and AdamW"
        " on two ranks too. Newton-Schulz runs in fp32, as the processor multiplies no bf16.",
    ]
    for found in result["cases"].values():
        case = Case.of(found["case"])
        named = [{**row, "named": SAID[row["side"]]} for row in found["rows"]]
        parts += [f"{case.title}: {setting(case)}.", pages.table(SECTION, named)]
    parts += [
        f"![losses of Muon in one process, sharded, and of AdamW](../benchmarks/results/{RESULTS}.png)",
        f"`python -m benchmarks.whole.learning` repeats it. Every loss is in `benchmarks/results/{RESULTS}.json`.",
    ]
    return "\n\n".join(part.rstrip() for part in parts)


class Learning(Study):
    """The sides of every case, one round."""

    schema, parts, part = "onefold-learning/1", "cases", "case"

    def read(self, setting: dict[str, Any]) -> Case:
        return Case.of(setting)

    def known(self) -> list[tuple[Case, list[dict[str, Any]]]]:
        """Refuses a case that was another."""
        found = []
        mine = {c.setting.title: c.setting for c in self.asked}
        for part in self.old.get("cases", {}).values():
            case = Case.of(part["case"])
            if mine.get(case.title, case) != case:
                raise Refused(
                    f"{self.options.name}.json has other options for {case.title!r}: choose another"
                    " --name, or leave --resume out, and it is written anew."
                )
            found.append((case, part["runs"]))
        return found

    def take(self, setting: Case, side: str) -> dict[str, Any]:
        job = {"side": side, "case": setting.to_json(), "timeout": self.options.timeout}
        ranks = 1 if side == "alone" else setting.ranks
        # One process gets the cores of both ranks
        threads = self.options.threads * (setting.ranks if side == "alone" else 1)
        how: dict[str, Any] = {"threads": threads, "timeout": self.options.timeout}
        return launch.run_ranks("benchmarks.whole.learner", job, ranks, **how)

    def turn(self, setting: Case, side: str, number: int) -> Run:
        run = Run(side, number, **self.take(setting, side))
        text = pages.essence(run.error)
        if run.status == "ok":
            text = f"held out {run.ranks[0]['held_out'][-1][1]:.4f} in {run.wall_s:.0f} s"
        harness.say(f"{setting.title}  {side}: {run.status}  {text}")
        return run

    def found(self, comparison: Comparison) -> dict[str, Any]:
        return {"rows": rows(comparison.runs)}

    def named(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        names = {case.title: name for name, case in CASES.items()}
        return {names[part["case"]["title"]]: part for part in parts}

    def document(self) -> dict[str, Any]:
        return {"notes": NOTES}

    def page(self, result: dict[str, Any]) -> str:
        text = [pages.where(result)]
        for found in result["cases"].values():
            case = Case.of(found["case"])
            text += [f"**{case.title}**: {setting(case)}", pages.table(COLUMNS, found["rows"])]
        return pages.page(*text, LEGEND, *pages.notes(result["notes"]))

    def charts(self, result: dict[str, Any]) -> list[list[Panel]]:
        """Two panels a case: the losses of training, means of ten steps, and the held-out ones."""
        found = []
        for part in result["cases"].values():
            case = Case.of(part["case"])
            told = {r["side"]: r["ranks"][0] for r in part["runs"] if r["status"] == "ok"}
            order = [side for side in ("sharded", "alone", "adamw") if side in told]
            width = max(1, case.steps // 20)
            training = {SAID[s]: list(smoothed(told[s]["losses"], width)) for s in order}
            held_out: Mapping[str, Any] = {SAID[s]: told[s]["held_out"] for s in order}
            how: dict[str, Any] = {"dotted": [SAID["alone"]], "across": "step"}
            found.append(
                [
                    Panel("loss of a step", case.title, curves=training, **how),
                    Panel("held-out loss", "", curves=held_out, **how),
                ]
            )
        return found

    @property
    def failed(self) -> bool:
        """Whether a side has failed, or the sharded curve is another one."""
        far = [
            (c.setting, row["side"])
            for c in self.asked
            for row in rows(c.runs)
            if row["status"] != "ok"
            or (row["side"] == "sharded" and (row["difference"] or 0.0) > c.setting.limit)
        ]
        for case, side in far:
            harness.say(f"{case.title}  {side}: failed, or not the curve of one process")
        return bool(far)


CHANGES = {
    name: (None, f"{name} of every case chosen", type(getattr(CASES["smollm2"], name)))
    for name in CHANGED
}


@harness.command(
    "whole.learning",
    __doc__,
    name=RESULTS,
    threads=1,
    timeout=1800.0,
    resume=False,
    json=False,
    cases=(list(CASES), f"which of {', '.join(CASES)}"),
    sides=(list(SIDES), f"which of {', '.join(SIDES)}"),
    page=(
        False,
        "write the section of docs/whole-matrices.md from the results, and measure nothing",
    ),
    **CHANGES,
)
def main(options: harness.Options) -> int:
    """0 when every side ended and the sharded curve is that of one process."""
    if options.page:
        from benchmarks.whole.__main__ import replaced

        result = json.loads((options.output / f"{options.name}.json").read_text())
        PAGE.write_text(replaced(PAGE.read_text(), section(result), HEADING))
        return 0
    changes = {name: value for name in CHANGED if (value := getattr(options, name)) is not None}
    cases = [
        replace(CASES[name], **changes)
        for name in harness.chosen(options.cases, list(CASES), "cases")
    ]
    options.rounds = 1
    return Learning(options, cases, harness.chosen(options.sides, SIDES)).run()


if __name__ == "__main__":
    sys.exit(main())
