"""No habit of an ordinary script is silently different after shard(): each is right, or refused by
a sentence that names a cure.

The habits stand in scripts/subjects, what is expected of each beside it.
"""

from __future__ import annotations

import random
import runpy
import time
import zlib
from pathlib import Path

import pytest

from scripts.registry import COLUMNS, REFUSED, REPLACES, STALLED, Habit, everything
from scripts.subjects import SUBJECTS
from scripts.verdicts import (
    CRASH,
    DIFFERENT,
    HANG,
    Task,
    of_error,
    surprises,
    verdicts_of,
)

KNOWN = everything()


def columns_of(habit: Habit, every: bool) -> tuple[str, ...]:
    """Stage 3, and of every third habit one of the others, by the title's hash; `--all`: all
    columns.
    """
    others = COLUMNS[:-1]
    drawn = zlib.crc32(habit.title.encode()) % (3 * len(others))
    return COLUMNS if every else () if habit.slow else (*others[drawn : drawn + 1], "3")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_habit_is_right_or_refused_as_declared(subject: str, every: bool) -> None:
    habits = [h for h in KNOWN.values() if h.subject == subject]
    tasks: list[Task] = [((h.title,), column) for h in habits for column in columns_of(h, every)]
    problems = [
        line
        for (titles, column), verdict in zip(tasks, verdicts_of(tasks), strict=True)
        if (line := surprises(KNOWN[titles[0]], column, verdict))
    ]
    assert not problems, f"{len(problems)} surprises of {len(tasks)}:\n" + "\n".join(problems)


MORE_RANKS = [
    "a model: parameters of odd shapes, of none and of one element, and in float64",
    "a model: a branch that one rank takes",
    "a model: an embedding tied to the head",
]


def test_ranks_may_be_more_than_elements() -> None:
    found = verdicts_of([((title,), column) for title in MORE_RANKS for column in "23"], ranks=5)
    assert all(verdict.right for verdict in found), found


# -- compositions ----------------------------------------------------------------------------------

COMPOSING = sorted(
    t
    for t, h in KNOWN.items()
    if h.composes and h.reference == "ddp" and REFUSED not in h.expect.values()
)


def composed(count: int, seed: int) -> list[Task]:
    """Two to four habits each, of which no two replace the same place of the loop."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        titles = tuple(draw.sample(COMPOSING, draw.randint(2, 4)))
        places = [place for t in titles for place in KNOWN[t].places & set(REPLACES)]
        optimizers = sum("optimizer" in place for place in places)
        if len(set(places)) == len(places) and optimizers < 2:
            found.append((titles, draw.choice("0123")))
    return found


def test_compositions_of_habits_are_never_silently_different(every: bool) -> None:
    """Few and always the same; `--all`: many, others each time."""
    tasks = composed(*((150, time.time_ns()) if every else (12, 1)))
    for (titles, column), verdict in zip(tasks, verdicts_of(tasks), strict=True):
        # What does not go together in plain PyTorch either says nothing
        assert not verdict.failed or verdict.error == "reference", (
            f"{' + '.join(titles)} at stage {column}: {verdict.kind} {verdict.error} {verdict.why}"
        )


# -- the verdicts themselves -----------------------------------------------------------------------


def test_verdicts_tell_what_goes_wrong_and_go_on_behind_it() -> None:
    wanted = {
        "a number that differs": DIFFERENT,
        "weights that differ": DIFFERENT,
        "an error of the script's own": CRASH,
        "a refusal on one rank only": None,  # a stall or an uneven refusal
        "a rank that dies": None,
        "a reference that fails": CRASH,
        "weights that differ within rounding": "rounding",
        "nothing at all": "same bits",
    }
    tasks: list[Task] = [((title,), "3") for title in wanted]
    found = dict(zip(wanted, verdicts_of(tasks), strict=True))
    kinds = {title: verdict.kind for title, verdict in found.items()}
    assert kinds.pop("a refusal on one rank only") in (CRASH, STALLED)
    assert kinds.pop("a rank that dies") in (CRASH, HANG, STALLED)
    assert kinds == {title: kind for title, kind in wanted.items() if kind}
    assert (
        "number" in found["a number that differs"].why
        and "weight" in found["weights that differ"].why
    )
    assert found["a reference that fails"].error == "reference"


@pytest.mark.parametrize("folder", ["elsewhere", "onefold"])
def test_an_error_of_the_script_is_a_crash_whatever_its_folder_is_called(
    tmp_path: Path, folder: str
) -> None:
    (script := tmp_path / folder / "script.py").parent.mkdir()
    script.write_text("raise ValueError('use something else instead')")
    with pytest.raises(ValueError) as raised:
        runpy.run_path(str(script))
    assert of_error(raised.value).kind == CRASH
