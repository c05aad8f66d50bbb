"""benchmarks/results/habits.md, from what the tests find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scripts.registry import BITS, EITHER, REFUSED, ROUNDING, Habit
from scripts.subjects import SUBJECTS
from scripts.verdicts import Verdict, sentence

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "habits.md"
Found = Mapping[tuple[str, str], Verdict]

HEAD = """# Habits of scripts, and what they mean after `shard()`

Written by `python -m tests.scripts write`. {count} habits, as people write them, each
in an ordinary training loop of three steps: on two ranks at every stage, against DDP, and on one process, against plain PyTorch. Losses,
final whole weights, buffers and every number that the habit prints are compared.

| a cell says | what was found |
|---|---|
| same bits | equal to the bit |
| rounding | equal within rounding: relative 10⁻⁵ in fp32 where nothing else is said in the habit |
| refused (a) | raised on every rank, by the sentence (a) below the table |
| StallError | one rank alone did what all have to do: every rank is told within seconds who stands where |

{summary}
"""


def cell(habit: Habit, column: str, verdict: Verdict) -> str:
    """What the page says. Bits that happen to be the same where only rounding is promised depend on
    the processor: the promise is said.
    """
    promise = habit.expect[column]
    if verdict.kind == BITS and (
        promise == ROUNDING or (promise == EITHER and ROUNDING in habit.expect.values())
    ):
        return ROUNDING
    return verdict.kind


def told(habit: Habit, column: str, verdict: Verdict) -> str:
    """The cell with the sentence of a refusal."""
    kind = cell(habit, column, verdict)
    return (
        f"{kind}: `{verdict.error}`: {_escaped(sentence(verdict.why))}" if kind == REFUSED else kind
    )


def section(subject: str, habits: list[Habit], found: Found) -> str:
    """The table of one subject."""
    letters: dict[str, str] = {}

    def said(habit: Habit, column: str) -> str:
        whole = told(habit, column, found[habit.title, column])
        kind, colon, why = whole.partition(": ")
        return f"{kind} ({letters.setdefault(why, _letter(len(letters)))})" if colon else kind

    lines = [
        f"## {SUBJECTS[subject]}",
        "",
        "| habit | one process | stage 0 | stages 1, 2 | stage 3 |",
        "|---|---|---|---|---|",
    ]
    for habit in habits:
        first, second = said(habit, "1"), said(habit, "2")
        middle = first if first == second else f"{first}; {second}"
        lines.append(
            f"| {_escaped(habit.title)} | {said(habit, 'one')} | {said(habit, '0')} | {middle} |"
            f" {said(habit, '3')} |"
        )
    if letters:
        lines += ["", *(f"- ({letter}) {why}" for why, letter in letters.items())]
    return "\n".join(lines) + "\n"


def text(habits: Mapping[str, Habit], found: Found) -> str:
    """The whole page."""
    sections = [section(s, [h for h in habits.values() if h.subject == s], found) for s in SUBJECTS]
    kinds = [cell(h, c, found[h.title, c]) for h in habits.values() for c in ("0", "1", "2", "3")]
    parts = ", ".join(
        f"{kinds.count(kind)} {kind}"
        for kind in sorted(set(kinds), key=lambda k: (k not in (BITS, ROUNDING), k))
    )
    summary = f"Of {len(kinds)} runs on two ranks: {parts}."
    return HEAD.format(count=len(habits), summary=summary) + "\n" + "\n".join(sections)


def _letter(at: int) -> str:
    return ("" if at < 26 else chr(ord("a") + at // 26 - 1)) + chr(ord("a") + at % 26)


def _escaped(words: str) -> str:
    return words.replace("|", "\\|")
