"""What a habit is, and the decorator that names one.

A habit is a piece of an ordinary training script. It says at which place of the loop it stands
(`at`), or is a class with a method for each such place:

| place | called | returns |
|---|---|---|
| `build` | first | the model |
| `before` | before the model is wrapped | |
| `optimizer_before` | before the model is wrapped | an optimizer, or a list of them |
| `after` | when the model has been wrapped | |
| `optimizer` | then | an optimizer, or a list of them |
| `batch` | in each step, with a seed | what `forward` reads as `s.batch` |
| `zero` | in place of `optimizer.zero_grad()` | |
| `forward` | in place of the default one | the loss |
| `loss` | with the loss | the loss |
| `backward` | in place of `loss.backward()` | |
| `gradients` | after backward | |
| `step` | in place of `optimizer.step()` | |
| `weights` | after the step | |
| `log` | after that, to look only | |
| `end` | after the last step | |
| `script` | in place of all steps | |
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

#: Where a habit is run: on one process, and on two ranks at each stage.
COLUMNS = ("one", "0", "1", "2", "3")
BITS, ROUNDING, REFUSED = "same bits", "rounding", "refused"
#: What one rank alone cannot do: every rank is told so within seconds.
STALLED = "StallError"
#: Right or refused: the page says which.
EITHER = "right or refused"
REPLACES = (
    "build",
    "optimizer_before",
    "optimizer",
    "batch",
    "zero",
    "forward",
    "backward",
    "step",
    "script",
)
PLACES = (*REPLACES, "before", "after", "loss", "gradients", "weights", "log", "end")


@dataclass(frozen=True)
class Habit:
    """One habit, and what is expected of it in each column.

    Attributes:
        title: how the page names it. subject: the module that it stands in.
        make: gives a fresh object with the methods of its places.
        expect: by column, `BITS`, `ROUNDING` (which takes the same bits too), `REFUSED`, `STALLED`
            or `EITHER`.
        reference: "ddp"; where DDP cannot run "mean", plain backward passes and the mean of
            gradients over ranks; or "plain", the bare model, given the same batch on all ranks.
        composes: whether random compositions may draw it.
        options: further arguments of Recipe.zero. ddp: of DistributedDataParallel. units: as in
            onefold.shard.
        alike: stages have the same bits as each other. slow: runs with `--all` only.
        rtol, atol: what "rounding" means for it.
    """

    title: str
    subject: str
    make: Callable[[], Any]
    expect: Mapping[str, str]
    places: frozenset[str]
    reference: str = "ddp"
    composes: bool = True
    steps: int = 3
    rtol: float = 1e-5
    atol: float = 1e-6
    options: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    units: Any = None
    alike: bool = False
    slow: bool = False


HABITS: dict[str, Habit] = {}


def habit(
    title: str,
    at: str | None = None,
    *,
    expect: str = BITS,
    one: str | None = None,
    zero: str | None = None,
    sharded: str | None = None,
    three: str | None = None,
    **more: Any,
) -> Callable[[Any], Any]:
    """Register a function that stands at `at`, or a class whose methods are named after their
    places.

    Args:
        title: what people would call it; unique.
        expect: in all columns; `one`, `zero`, `sharded` (stages 1 to 3) and `three` say otherwise
            for their columns.
        more: further fields of `Habit`.
    """
    expected = dict.fromkeys(COLUMNS, expect) | {
        "one": one or (BITS if expect == ROUNDING else expect),
        "0": zero or expect,
    }
    if sharded is not None:
        expected |= dict.fromkeys(("1", "2", "3"), sharded)
        if expect == BITS:
            expected["one"] = one or BITS
    if three is not None:
        expected["3"] = three

    def register(thing: Any) -> Any:
        assert title not in HABITS, f"two habits are called {title!r}"
        make = thing if at is None else lambda: SimpleNamespace(**{at: thing})
        places = (
            frozenset([at])
            if at is not None
            else frozenset(name for name in PLACES if hasattr(thing, name))
        )
        assert places and places <= set(PLACES), f"{title!r} stands nowhere: at={at!r}"
        composes = more.pop("composes", not places & {"build", "script", "backward", "forward"})
        HABITS[title] = Habit(
            title,
            thing.__module__.rpartition(".")[2],
            make,
            expected,
            places,
            composes=composes,
            **more,
        )
        return thing

    return register


def everything() -> dict[str, Habit]:
    """All habits, in the order of their subjects' names in `SUBJECTS`."""
    from scripts import subjects

    found = {module.name for module in pkgutil.iter_modules(subjects.__path__)}
    assert found == set(subjects.SUBJECTS), (
        f"subjects/__init__.py and its folder differ in {found ^ set(subjects.SUBJECTS)}"
    )
    for name in subjects.SUBJECTS:
        importlib.import_module(f"scripts.subjects.{name}")
    return {title: habit for title, habit in HABITS.items() if habit.subject in subjects.SUBJECTS}
