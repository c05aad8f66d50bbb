"""Sides that take turns in each of several settings: what several commands do alike."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks import harness, launch, pages
from benchmarks.harness import Row, Run

OPTIONS: Mapping[str, Any] = {
    "threads": 1,
    "budget": None,
    "resume": False,
    "deepspeed_python": sys.executable,
    "json": False,
}
"""What the command line of a study always has."""


@dataclass
class Comparison:
    """One setting, all that was measured in it so far, and the sides that are not installed."""

    setting: Any
    runs: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def turns(
    options: harness.Options,
    comparisons: Sequence[Comparison],
    sides: Callable[[Any], Sequence[str]],
    *,
    whole_rounds: bool = False,
) -> Iterator[tuple[Comparison, int, str]]:
    """(comparison, round, side) of what is still to be measured, as long as --budget lasts. Every
    comparison gets a round before any gets a second, so that a budget that ends early leaves none
    out.

    Args:
        sides: those that mean something in a setting, in the order of a round.
        whole_rounds: measure a round again of which an interruption has left a part: its sides met
            another machine.
    """
    begun, budget = time.monotonic(), getattr(options, "budget", None)
    for number in range(1, options.rounds + 1):
        for comparison in comparisons:
            wanted = [s for s in sides(comparison.setting) if s not in comparison.missing]
            there = {run.side for run in comparison.runs if run.round == number}
            if whole_rounds and there and not there >= set(wanted):
                harness.say(f"round {number} was incomplete: it is measured again")
                comparison.runs = [run for run in comparison.runs if run.round != number]
                there = set()
            left = [side for side in wanted if side not in there]
            spent = sum(
                run.wall_s
                for run in comparison.runs
                if run.round == number - 1 and run.side in left
            )
            if left and budget and time.monotonic() - begun + spent > 60 * budget:
                harness.say(
                    f"the budget of {budget:g} minutes is spent: round {number} is left out"
                )
                return
            for side in left:
                yield comparison, number, side


def take_over(
    comparisons: Sequence[Comparison],
    old: Iterable[tuple[Any, Sequence[Mapping[str, Any]]]],
    again: Sequence[str] = (),
    made: Callable[[Mapping[str, Any]], Any] = Run.of,
) -> list[Comparison]:
    """Put what was measured before into `comparisons`; answers those of other settings."""
    others = []
    mine = {comparison.setting: comparison for comparison in comparisons}
    for setting, runs in old:
        found = mine.get(setting) or Comparison(setting)
        found.runs = [made(run) for run in runs]
        if setting in mine:
            found.runs = [r for r in found.runs if r.status == "ok" or r.side not in again]
        else:
            others.append(found)
    return others


class Study:
    """One command: its settings, and what was found in them so far. A benchmark says what a turn
    is, which rows its runs give, and what stands on its page.

    Attributes:
        key: what the results call a side. parts, part: what they call the settings, and one.
        whole_rounds: see `turns`.
    """

    schema: str
    key, parts, part = "side", "comparisons", "setting"
    whole_rounds = False

    def __init__(
        self,
        options: harness.Options,
        settings: Iterable[Any],
        sides: Sequence[str],
        **same: Any,
    ) -> None:
        """Takes over what an earlier command has left, unless it differs in one of `same`."""
        self.options, self.sides = options, sides
        self.asked = [Comparison(setting) for setting in settings]
        self.old = harness.earlier(options, self.schema, **same) or {}
        again = () if self.whole_rounds else sides
        others = take_over(self.asked, self.known(), again, self.run_of)
        self.comparisons = [*others, *self.asked]
        absent = launch.absent(sides, options)
        for c in self.asked:
            c.missing = [side for side in self.those(c.setting) if side in absent]

    def known(self) -> list[tuple[Any, list[dict[str, Any]]]]:
        """(setting, runs) of what an earlier command has left."""
        return [(self.read(c[self.part]), c["runs"]) for c in self.old.get(self.parts, ())]

    def run_of(self, values: Mapping[str, Any]) -> Any:
        """A run from its JSON."""
        return Run.of(values, self.key)

    def read(self, setting: dict[str, Any]) -> Any:
        """A setting from its JSON."""
        raise NotImplementedError

    def those(self, setting: Any) -> Sequence[str]:
        """The sides that mean something in a setting."""
        return self.sides

    def take(self, setting: Any, side: str) -> dict[str, Any]:
        """One turn; what `launch.run_ranks` answers."""
        raise NotImplementedError

    def turn(self, setting: Any, side: str, number: int) -> Any:
        """One turn as a run, which is told."""
        run = Run(side, number, **self.take(setting, side))
        harness.say_turn(run, setting.title)
        return run

    def found(self, comparison: Comparison) -> dict[str, Any]:
        """What the runs of a setting come to: "rows", and more."""
        raise NotImplementedError

    def named(self, parts: list[dict[str, Any]]) -> Any:
        """The settings as the JSON has them."""
        return parts

    def document(self) -> dict[str, Any]:
        """What the JSON has beside the settings and their runs."""
        return {}

    def page(self, result: dict[str, Any]) -> str:
        """The page of a result."""
        raise NotImplementedError

    def charts(self, result: dict[str, Any]) -> list[list[pages.Panel]]:
        """The panels of its plot."""
        return []

    @property
    def failed(self) -> bool:
        """Whether a turn of this command did not end well."""
        return any(run.status != "ok" for c in self.asked for run in c.runs)

    def measure(self) -> None:
        """All turns, each of which is written at once."""
        for c, number, side in turns(
            self.options, self.asked, self.those, whole_rounds=self.whole_rounds
        ):
            c.runs.append(self.turn(c.setting, side, number))
            self.write(finished=False)

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON and Markdown."""
        parts = [
            {
                self.part: asdict(c.setting),
                **self.found(c),
                "runs": [run.to_json(self.key) for run in c.runs],
            }
            for c in self.comparisons
            if c.runs
        ]
        kept = {"finished": finished, **self.document(), self.parts: self.named(parts)}
        return harness.keep(self.options, self.schema, self.page, **kept)

    def run(self) -> int:
        """Measure, write and print: 0, 1 when a turn failed, 130 after Ctrl-C."""
        with harness.stoppable() as stop:
            self.measure()
        result = self.write(finished=stop.status == 0)
        pages.plot(self.options.output / f"{self.options.name}.png", self.charts(result))
        if self.options.json:
            print(json.dumps(result))
        else:
            pages.show(self.page(result))
        return stop.status or int(self.failed)


def timings(
    good: Sequence[Run],
    same: Mapping[int, Run],
    names: Sequence[str] = ("ratio", "ratio_low", "ratio_high"),
    *,
    faster: bool = False,
) -> Row:
    """Of the runs of a side: `step_s`, the median over all timed steps of all rounds, and under
    `names` the median over rounds of its ratio to the run of `same` in that round, with the least
    and the greatest. `faster`: the ratio is theirs to ours.
    """
    ratios = [1 / r if faster else r for r in harness.ratios(good, same)]
    step = median(second for run in good for second in harness.step_seconds(run))
    return {"step_s": step, **dict(zip(names, harness.spread(ratios), strict=True))}
