"""Does it learn as well? Fine-tuning, training from scratch and QLoRA with each part of ZeRO++
alone and with all, beside plain stage 3.

    python -m benchmarks.convergence                                        # every case, every side
    python -m benchmarks.convergence --cases scratch --sides plain qgz      # some; the reference is always among them
    python -m benchmarks.convergence --resume                               # go on: sides that have ended are kept

Ranks stand in two pretended nodes on this machine, so that codecs and groups do what they would
between nodes. All sides of a case start from the same weights and read the same samples in the same
order; at the end all are asked for the loss of the same held-out text. A side is within if its loss
differs from the reference's by no more than the case allows.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "notes": {side: what it is},
    "cases": {name: {
      "case": {...},                       # settings.Case, field by field
      "rows": [{...}],                     # the table: rows.rows
      "runs": [{                           # rows.Run: one a side
        "side", "status", "error", "wall_s", "threads",
        "curve": {"losses": [step], "held_out": [[step, loss]], "masters": loss | null, "step_s": [step],
                  "parameters", "trained", "between_bytes", "held_out_samples"}
      }]
    }}
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.convergence.rows import LAST, Run, missed, rows
from benchmarks.convergence.settings import CASES, REFERENCE, SIDES, YARDSTICKS, Case, chosen
from benchmarks.harness import Refused
from benchmarks.pages import DASH, Cell, Panel, shown
from benchmarks.study import Comparison, Study

CHANGED = (
    "model", "tokenizer", "data", "precision", "steps", "seq", "micro_batch", "lr", "held_out",
    "every", "ranks", "ranks_a_node", "lora",
)  # fmt: skip
"""Fields of a case that have an option of their name."""


def _beside_reference(cell: Cell) -> Cell:
    return lambda row: DASH if row["side"] == REFERENCE else cell(row)


COLUMNS: dict[str, Cell] = {
    "side": shown("side"),
    "first": shown("first", "{:.4f}"),
    "final": shown("final", "{:.4f}"),
    "difference": _beside_reference(shown("difference", "{:+.2%}")),
    "masters": shown("masters_difference", "{:+.2%}"),
    "on the way": _beside_reference(shown("largest", "{:.2%}")),
    "training": shown("trained", "{:.4f}"),
    "bytes": shown("bytes_ratio", "{:.3f}"),
    "step s": shown("step_s", "{:.2f}"),
    "verdict": shown("verdict"),
}
LEGEND = (
    "first, final: mean loss a token of the held-out text before and after training, as the side"
    " computes it (encoded where it encodes). difference: the final one's to the reference's;"
    " masters: the same of the weights that a checkpoint holds, computed with nothing encoded. on"
    " the way: the largest difference of a held-out loss after a step. training: mean training"
    f" loss of the last {LAST} steps. bytes: what a rank sends to the other node in a step, over"
    " the reference's. step s: median of the steps, on a machine that had other work: compare"
    " nothing by it."
)


def cases_of(options: harness.Options) -> dict[str, Case]:
    """The cases with the options' changes. Refuses a number that cannot be."""
    changes = {name: value for name in CHANGED if (value := getattr(options, name)) is not None}
    out = {}
    for name in harness.chosen(options.cases, list(CASES), "cases"):
        case = out[name] = replace(CASES[name], **changes)
        counts = ("steps", "micro_batch", "held_out", "every", "ranks", "ranks_a_node")
        small = [n for n in counts if getattr(case, n) < 1]
        if small or case.seq < 2 or case.ranks % case.ranks_a_node:
            told = (*small, "seq", "ranks", "ranks_a_node")
            raise Refused(
                "expected --steps, --micro-batch, --held-out, --every and --ranks of at least 1,"
                " --seq of at least 2, and --ranks-a-node that divides --ranks; got"
                f" {', '.join(f'{n}={getattr(case, n)}' for n in told)}."
            )
    return out


def run_side(case: Case, side: str, threads: int, timeout: float) -> Run:
    """Train one side in fresh processes."""
    job = {"side": side, "case": case.to_json(), "timeout": timeout}
    how: dict[str, Any] = {"threads": threads, "timeout": timeout}
    found = launch.run_ranks("benchmarks.convergence.worker", job, case.ranks, **how)
    curve = found["ranks"][0] if found["status"] == "ok" else {}
    return Run(side, found["status"], curve, found.get("error", ""), found["wall_s"], threads)


def setting(case: Case) -> str:
    """What all sides of a case share, in words."""
    nodes = case.ranks // case.ranks_a_node
    return (
        f"{case.steps} steps of {case.ranks} x {case.micro_batch} x {case.seq} tokens, {case.ranks}"
        f" ranks in {nodes} pretended nodes, AdamW to {case.lr:g} and down by a cosine,"
        f" {case.precision}, seed {case.seed}"
    )


class Convergence(Study):
    """The sides of every case, one round. `run_side` trains one side."""

    schema, parts, part = "onefold-convergence/1", "cases", "case"

    def __init__(self, options: harness.Options, run_side: Callable[..., Run]) -> None:
        self.run_side, self.cases = run_side, cases_of(options)
        options.rounds = 1
        super().__init__(options, self.cases.values(), list(SIDES))

    def known(self) -> list[tuple[Case, list[dict[str, Any]]]]:
        """Refuses a case that was another."""
        found = []
        for name, part in self.old.get("cases", {}).items():
            case = Case.of(part["case"])
            mine = self.cases.get(name, case)
            differ = ", ".join(
                f"{key} {case.shared[key]} then and {value} now"
                for key, value in mine.shared.items()
                if value != case.shared[key]
            )
            if differ:
                raise Refused(
                    f"{self.options.name}.json has case {name} with {differ}: choose another"
                    " --name, or leave --resume out, and it is written anew."
                )
            found.append((mine, part["runs"]))
        return found

    def run_of(self, values: Mapping[str, Any]) -> Run:
        return Run(**values)

    def those(self, setting: Case) -> list[str]:
        return chosen(setting, self.options.sides)

    def turn(self, setting: Case, side: str, number: int) -> Run:
        run = self.run_side(setting, side, self.options.threads, self.options.timeout)
        text = pages.essence(run.error)
        if run.status == "ok":
            text = f"held out {run.final:.4f} in {run.wall_s:.0f} s"
        harness.say(f"{setting.title}  {side}: {run.status}  {text}")
        return run

    def found(self, comparison: Comparison) -> dict[str, Any]:
        return {"rows": rows(comparison.setting, comparison.runs)}

    def named(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        names = {case.title: name for name, case in CASES.items()}
        return {names[part["case"]["title"]]: part for part in parts}

    def document(self) -> dict[str, Any]:
        return {"notes": {name: side.note for name, side in SIDES.items()}}

    def page(self, result: dict[str, Any]) -> str:
        text, used = [pages.where(result)], set()
        for found in result["cases"].values():
            case = Case.of(found["case"])
            text += [f"**{case.title}**: {setting(case)}", pages.table(COLUMNS, found["rows"])]
            used |= {row["side"] for row in found["rows"]}
        return pages.page(*text, LEGEND, *pages.notes(result["notes"], used))

    def charts(self, result: dict[str, Any]) -> list[list[Panel]]:
        """Two panels a case: held-out losses, and their differences to the reference's in percent
        with the limit.
        """
        found = []
        for part in result["cases"].values():
            case = Case.of(part["case"])
            good = [run for run in part["runs"] if run["status"] == "ok"]
            curves = {run["side"]: run["curve"]["held_out"] for run in good}
            if REFERENCE not in curves:
                continue
            theirs = [loss for _, loss in curves[REFERENCE]]
            apart = {
                side: [(n, 100 * (a / b - 1)) for (n, a), b in zip(points, theirs, strict=True)]
                for side, points in curves.items()
            }
            title, limit = "difference to the reference, %, and the limit", 100 * case.limit
            how: dict[str, Any] = {"dotted": YARDSTICKS, "across": "step"}
            left = Panel("held-out loss", case.title, curves=curves, **how)
            found.append([left, Panel("", title, curves=apart, levels=(-limit, limit), **how)])
        return found

    @property
    def failed(self) -> bool:
        """Whether a side has failed, or is not within its limit."""
        far = [(c.setting, side) for c in self.asked for side in missed(self.found(c)["rows"])]
        for case, side in far:
            harness.say(f"{case.title}  {side}: failed, or not within its limit")
        return bool(far)


CHANGES = {
    name: (None, f"{name} of every case chosen", type(getattr(CASES["smollm2"], name)))
    for name in CHANGED
}


@harness.command(
    "convergence",
    __doc__,
    threads=1,
    timeout=21600.0,
    resume=False,
    json=False,
    cases=(list(CASES), f"which of {', '.join(CASES)}"),
    sides=(None, f"which of {', '.join(SIDES)}; without it the case's own", {"nargs": "+"}),
    **CHANGES,
)
def main(options: harness.Options, run: Callable[..., Run] = run_side) -> int:
    """0 when every side ended within its limit, 1 when one did not, 130 after Ctrl-C."""
    return Convergence(options, run).run()


if __name__ == "__main__":
    sys.exit(main())
