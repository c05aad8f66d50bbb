"""The command: which links and sides, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.harness import RESULTS
from benchmarks.peers.launch import absent
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import Setting
from benchmarks.wires import hosts, launch, report, summary
from benchmarks.wires.settings import HOSTS, RANKS_A_HOST, SIDES, Link, available, chosen, read_rate
from benchmarks.wires.summary import Run


@dataclass
class Measured:
    """One link and all that was measured over it so far."""

    link: Link
    stream: dict[str, Any] | None = None
    runs: list[Run] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = harness.parser(
        "wires",
        __doc__,
        rounds=1,
        steps=2,
        warmup=1,
        accumulation=1,
        threads=1,
        budget=None,
        timeout=1800.0,
        resume=False,
        name="wires",
        output=RESULTS,
        deepspeed_python=sys.executable,
        json=False,
    )
    p.add_argument(
        "--rates",
        nargs="+",
        default=["100M", "1G", "10G"],
        metavar="RATE",
        help="bits a second of the link, each way",
    )
    p.add_argument(
        "--delay", type=float, default=0.0, metavar="MS", help="milliseconds one way, by netem"
    )
    p.add_argument(
        "--sides",
        nargs="+",
        default=available(),
        metavar="SIDE",
        help=f"which of {', '.join(available())}; or a family",
    )
    p.add_argument("--model", default="gpt-110m", choices=list(SHAPES))
    p.add_argument("--tokens", type=int, default=256, help="tokens a rank and micro-batch")
    p.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    return p


def setting_of(options: argparse.Namespace) -> Setting:
    """What all sides share.

    Raises:
        ValueError: a number is too small.
    """
    harness.check_at_least(
        options, 1, "tokens", "accumulation", "rounds", "steps", "warmup", "threads"
    )
    harness.check_at_least(options, 0, "delay")
    names = ("model", "tokens", "precision", "accumulation", "steps", "warmup", "threads")
    return Setting(ranks=HOSTS * RANKS_A_HOST, **{name: getattr(options, name) for name in names})


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(self, options: argparse.Namespace, run_side: Callable[..., Run]) -> None:
        self.options, self.run_side, self.setting = options, run_side, setting_of(options)
        self.sides = chosen(options.sides)
        self.links = [Measured(Link(read_rate(rate), options.delay)) for rate in options.rates]
        self.commands: list[str] = []
        self.skipped: str | None = None
        self.missing: list[str] = []
        old = harness.earlier(options, summary.SCHEMA, setting=self.setting.to_json())
        if old is not None:
            self._continue(old)

    def _continue(self, old: dict[str, Any]) -> None:
        """Take over what an earlier command of this name measured."""
        self.commands = old["command"].split(" && ")
        there = {Link(**found["link"]): found for found in old["links"]}
        self.links = [
            Measured(link)
            for link in dict.fromkeys([*there, *(measured.link for measured in self.links)])
        ]
        for measured in self.links:
            if (found := there.get(measured.link)) is not None:
                measured.stream = found["measured"]
                measured.runs = [
                    Run(**run)
                    for run in found["runs"]
                    if run["status"] == "ok" or run["side"] not in self.sides
                ]

    def python(self, side: str) -> str:
        return (
            str(self.options.deepspeed_python)
            if SIDES[side].family == "deepspeed"
            else sys.executable
        )

    def turns(self) -> Iterator[None]:
        """Measure; a side that is complete in a round is not measured in it again."""
        options = self.options
        links = {Link(read_rate(rate), options.delay) for rate in options.rates}

        def wanted(measured: Measured, number: int) -> list[str]:
            there = {run.side for run in measured.runs if run.round == number}
            left = [side for side in self.sides if side not in there | {*self.missing}]
            return left if measured.link in links else []

        def before(measured: Measured, number: int, again: list[str]) -> list[Run]:
            return [run for run in measured.runs if run.round == number and run.side in again]

        for number, measured, again in harness.rounds(options, self.links, wanted, before):
            measured.stream = measured.stream or launch.measured(measured.link)
            for side in again:
                run = self.run_side(
                    side,
                    self.setting,
                    measured.link,
                    number,
                    python=self.python(side),
                    timeout=options.timeout,
                )
                measured.runs.append(run)
                harness.say_turn(run, measured.link.title, side)
                yield

    def document(self, *, finished: bool) -> dict[str, Any]:
        """What is written to disk; `summary` describes it."""
        options = self.options
        return {
            **harness.about(options, summary.SCHEMA, *self.commands),
            "finished": finished,
            "skipped": self.skipped,
            "models": {options.model: {"parameters": count_parameters(options.model)}},
            "hosts": HOSTS,
            "ranks_a_host": RANKS_A_HOST,
            "notes": {name: side.note for name, side in SIDES.items()},
            "setting": self.setting.to_json(),
            "links": [
                {
                    "link": m.link.to_json(),
                    "measured": m.stream,
                    "rows": [
                        row.to_json()
                        for row in summary.summarize(self.setting, m.link, m.runs, self.missing)
                    ],
                    "runs": [run.to_json() for run in m.runs],
                }
                for m in self.links
                if m.runs
            ],
        }

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON, Markdown and PNG; each file is replaced whole."""
        options, result = self.options, self.document(finished=finished)
        harness.keep(options, result, report.to_markdown(result))
        if finished:
            report.plot(result, options.output / f"{options.name}.png")
        return result


def main(
    arguments: Sequence[str] | None = None, run_side: Callable[..., Run] = launch.run_side
) -> int:
    """0 when every turn ended well or there can be no hosts here, 1 when one failed, 2 for a wrong
    command line, 130 after Ctrl-C.

    An optional side that fails is a finding.
    """
    options = harness.parsed(parser(), arguments)
    try:
        session = Session(options, run_side)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    session.skipped = hosts.permitted(Link(read_rate(options.rates[0]), options.delay))
    if session.skipped:  # what an earlier run measured stays on the disk as it is
        print(
            json.dumps(session.document(finished=False))
            if options.json
            else f"skipped: {session.skipped}"
        )
        return 0
    families = {SIDES[side].family for side in session.sides}
    gone = absent(families, options.deepspeed_python)
    session.missing = [side for side in session.sides if SIDES[side].family in gone]
    with harness.stoppable() as stop:
        try:
            for _ in session.turns():
                session.write(finished=False)
        except hosts.HostError as error:
            print(f"error: {error}", file=sys.stderr)
            stop.status = 1
    result = session.write(finished=stop.status == 0)
    print(json.dumps(result) if options.json else report.to_text(result))
    failed = any(
        run.status != "ok" and not SIDES[run.side].optional
        for measured in session.links
        for run in measured.runs
    )
    return stop.status or int(failed)
