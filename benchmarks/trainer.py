"""What Hugging Face's Trainer adds to a step, on Onefold and on its peers:
`python -m benchmarks.trainer [--layers 6] [--width 256] [--sides ...]`.

| side                      | what makes the steps                                               |
|---------------------------|--------------------------------------------------------------------|
| "loop 1", "loop 3"        | a loop of one's own over `onefold.shard` at that stage             |
| "trainer 1", "trainer 3"  | `onefold.hf.Trainer` at that stage, the same model and data        |
| "trainer name 1", "... 3" | transformers' Trainer with `deepspeed={...}`, served by Onefold    |
| "loop ddp", "trainer ddp" | the same on DistributedDataParallel, with transformers' Trainer    |
| "trainer fsdp2"           | transformers' Trainer with accelerate's FSDP plugin, version 2     |
| "trainer deepspeed 1", "... 3" | transformers' Trainer on DeepSpeed itself (`--deepspeed-python`) |

All of them clip by the norm and step AdamW and a schedule. Two ranks over gloo, one thread each. In
each round every side takes its turn, in the other direction every other round; a turn is a fresh
process a rank, which has imported the libraries before anything is measured (`trainer_sides`). A figure of a turn
is its quickest step, of the slower rank: other work on the machine only adds. Of a side, it is the
median of its turns. A ratio is the median of the rounds' own ratios: of the wall clock, and of the
processor's time; its interval holds the true median with 95 %. The peak is what the resident memory
of a rank rises by during the timed steps, above what the libraries take. Writes
benchmarks/results/NAME.json and NAME.md.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.trainer_sides import BATCH, TOKENS

SCHEMA = "onefold-trainer/2"
SIDES = (
    "loop 1", "trainer 1", "trainer name 1", "loop 3", "trainer 3", "trainer name 3", "loop ddp",
    "trainer ddp", "trainer fsdp2", "trainer deepspeed 1", "trainer deepspeed 3",
)  # fmt: skip
#: How much longer a step of Trainer on Onefold may take than one of Onefold's own loop.
GOAL = 1.02
#: Beside what every Trainer is set where it was measured: DDP's, which most people use.
REFERENCE = "trainer ddp"


def kind_of(side: str) -> str:
    """Which process a side needs: "plain", "name" or "deepspeed"."""
    word = side.split()[1]
    return word if word in ("name", "deepspeed") else "plain"


def loop_of(side: str) -> str | None:
    """The loop of one's own that a Trainer is compared with; None for a loop, and without one."""
    how, *on = side.split()
    return f"loop {on[-1]}" if how == "trainer" and kind_of(side) != "deepspeed" else None


# -- figures ---------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The values between which the true median lies with 95 %, by order statistics."""
    ordered, n = sorted(values), len(values)
    left = 0
    while 2 * sum(math.comb(n, k) for k in range(left + 2)) / 2**n <= 0.05:
        left += 1
    return ordered[left], ordered[n - 1 - left]


def rows_of(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each side: its medians, its multiples of the loop beside it and of `REFERENCE`."""
    turns: dict[tuple[str, int], dict[str, Any]] = {}
    for both in zip(*ranks, strict=True):
        turns[both[0]["side"], both[0]["round"]] = {
            key: min(max(each) for each in zip(*(run[key] for run in both), strict=True))
            for key in ("step_s", "cpu_s")
        } | {"loss": both[0]["loss"], "peak_mib": _greatest(run["peak_mib"] for run in both)}
    rows = []
    for side in dict.fromkeys(side for side, _ in turns):
        own = {number: turn for (s, number), turn in turns.items() if s == side}
        row: dict[str, Any] = {"side": side}
        row |= {key: median(turn[key] for turn in own.values()) for key in ("step_s", "cpu_s")}
        row["peak_mib"] = _greatest(turn["peak_mib"] for turn in own.values())
        row["loss"] = own[min(own)]["loss"]
        for name, other in {"loop": loop_of(side), "ddp": REFERENCE}.items():
            if other in (None, side) or (side.startswith("loop") and name == "ddp"):
                continue
            shared = [number for number in own if (other, number) in turns]
            for key in ("step_s", "cpu_s") if shared else ():
                each = [own[n][key] / turns[str(other), n][key] for n in shared]
                row[f"{key}_of_{name}"] = median(each)
                row[f"{key}_of_{name}_range"] = (min(each), max(each))
                row[f"{key}_of_{name}_interval"] = interval(each)
        rows.append(row)
    return rows


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# -- measuring -------------------------------------------------------------------------------------


def measured(options: Any, sides: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The runs of each rank, as far as they came when interrupted.

    Raises:
        RuntimeError: a rank failed, or did not end in time; says how.
    """
    runs: list[list[dict[str, Any]]] = [[], []]
    job = {name: getattr(options, name) for name in ("steps", "warmup", "layers", "width")}
    with harness.stoppable():
        for number, side in harness.in_turns(sides, options.rounds):
            kind = kind_of(side)
            python = options.deepspeed_python if kind == "deepspeed" else sys.executable
            asked, how = {**job, "side": side, "kind": kind}, {"timeout": options.timeout}
            found = launch.all_ranks("benchmarks.trainer_sides", asked, 2, python=python, **how)
            load = os.getloadavg()[0]
            for own, seen in zip(runs, found, strict=True):
                own.append({"round": number, "side": side, "load": load, **seen})
            step = median(found[0]["step_s"])
            harness.say(f"round {number}  {side}: {1e3 * step:.1f} ms, load {load:.1f}")
    return runs


# -- the command -----------------------------------------------------------------------------------


def _ratio(key: str) -> pages.Cell:
    def cell(row: Any) -> str:
        if f"{key}_interval" not in row:
            return pages.DASH
        return "{:.3f} ({:.3f}–{:.3f})".format(row[key], *row[f"{key}_interval"])

    return cell


COLUMNS: pages.Columns = {
    "side": pages.shown("side"),
    "step, ms": pages.shown("step_s", "{:.0f}", 1e-3),
    "processor, ms": pages.shown("cpu_s", "{:.0f}", 1e-3),
    "peak, MiB": pages.shown("peak_mib", "{:.0f}"),
    "step ÷ its loop": _ratio("step_s_of_loop"),
    "processor ÷ its loop": _ratio("cpu_s_of_loop"),
    "step ÷ Trainer on DDP": _ratio("step_s_of_ddp"),
    "processor ÷ Trainer on DDP": _ratio("cpu_s_of_ddp"),
    "loss": pages.shown("loss", "{:.4f}"),
}


def page(document: dict[str, Any]) -> str:
    """The table, and what it is of."""
    shape, rows = document["model"], document["rows"]
    half = "where the true median lies with 95 %"
    loads = sorted(run["load"] for run in document["runs"][0])
    rounds = 1 + max(run["round"] for run in document["runs"][0])
    if rounds < 6:
        half = "the least and the greatest"
    return pages.page(
        "# Hugging Face's Trainer beside loops of one's own",
        (
            f"A Llama of {shape['layers']} layers of {shape['width']}, {shape['tokens']} tokens a"
            f" rank, fp32, two ranks over gloo with one thread each. {rounds} rounds; the median"
            f" of the rounds, and in brackets {half}. Load of the machine {loads[0]:.1f} to"
            f" {loads[-1]:.1f}, two of which are the ranks: processor time is what to trust where"
            " it is more."
        ),
        pages.table(COLUMNS, rows),
        pages.where(document),
    )


@harness.command(
    "trainer",
    __doc__,
    rounds=5,
    steps=10,
    warmup=3,
    timeout=300.0,
    deepspeed_python=sys.executable,
    sides=(list(SIDES), "what makes the steps", SIDES),
    layers=(6, "layers of the Llama"),
    width=(256, "its width"),
)
def main(options: harness.Options) -> int:
    """0 if every side was measured and computed something."""
    harness.check_at_least(options, 1, "rounds", "steps", "warmup", "layers", "width")
    sides = list(options.sides)
    if any(kind_of(side) == "deepspeed" for side in sides) and not launch.interpreter_has(
        options.deepspeed_python, "deepspeed"
    ):
        sides = [side for side in sides if kind_of(side) != "deepspeed"]
        harness.say("DeepSpeed is not installed (--deepspeed-python): its sides are left out")
    runs = measured(options, sides)
    if not runs[0]:
        return 1
    shape = {"layers": options.layers, "width": options.width, "tokens": BATCH * TOKENS}
    kept = {"model": shape, "goal": GOAL, "rows": rows_of(runs), "runs": runs}
    packages = ("transformers", "accelerate")
    pages.show(page(harness.keep(options, SCHEMA, page, packages, **kept)))
    return 0 if all(math.isfinite(row["loss"]) for row in kept["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
