"""The command: which cases and sides, where the results go. What has ended is on the disk, and
--resume goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import harness
from benchmarks.convergence import report, summary
from benchmarks.convergence.settings import CASES, SIDES, Case, chosen
from benchmarks.convergence.summary import Run
from benchmarks.harness import RESULTS, essence
from benchmarks.peers.launch import run_ranks

CHANGED = (
    "model",
    "tokenizer",
    "data",
    "precision",
    "steps",
    "seq",
    "micro_batch",
    "lr",
    "held_out",
    "every",
    "ranks",
    "ranks_a_node",
    "lora",
)
"""Fields of a case that have an option of their name."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = harness.parser(
        "convergence",
        __doc__,
        threads=1,
        timeout=21600.0,
        resume=False,
        name="convergence",
        output=RESULTS,
        json=False,
    )
    p.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        metavar="CASE",
        help=f"which of {', '.join(CASES)}",
    )
    p.add_argument(
        "--sides",
        nargs="+",
        metavar="SIDE",
        help=f"which of {', '.join(SIDES)}; without it the case's own",
    )
    for name in CHANGED:
        kind = type(getattr(CASES["smollm2"], name))
        p.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar=kind.__name__.upper(),
            help=f"{name} of every case chosen",
        )
    return p


def cases_of(options: argparse.Namespace) -> dict[str, Case]:
    """The cases with the options' changes.

    Raises:
        ValueError: a name that is unknown, or a number that cannot be.
    """
    changes = {name: value for name in CHANGED if (value := getattr(options, name)) is not None}
    out = {}
    for name in options.cases:
        if name not in CASES:
            raise ValueError(f"--cases {name}: expected some of {', '.join(CASES)}.")
        case = out[name] = replace(CASES[name], **changes)
        small = [
            n
            for n in ("steps", "micro_batch", "held_out", "every", "ranks", "ranks_a_node")
            if getattr(case, n) < 1
        ]
        if small or case.seq < 2 or case.ranks % case.ranks_a_node:
            raise ValueError(
                "expected --steps, --micro-batch, --held-out, --every and --ranks of at least 1,"
                " --seq of at least 2, and --ranks-a-node "
                "that divides --ranks; got"
                f" {', '.join(f'{n}={getattr(case, n)}' for n in (*small, 'seq', 'ranks', 'ranks_a_node'))}."
            )
    return out


def run_side(case: Case, side: str, threads: int, timeout: float) -> Run:
    """Train one side in fresh processes."""
    job = {"side": side, "setting": case.to_json(), "threads": threads, "timeout": timeout}
    found = run_ranks(
        "benchmarks.convergence.worker", job, case.ranks, threads=threads, timeout=timeout
    )
    curve = found["ranks"][0] if found["status"] == "ok" else {}
    return Run(side, found["status"], curve, found.get("error", ""), found["wall_s"], threads)


class Session:
    """One command: what it runs, and what was found so far."""

    def __init__(self, options: argparse.Namespace, run: Callable[..., Run]) -> None:
        self.options, self.run = options, run
        self.cases = cases_of(options)
        self.wanted = {name: chosen(case, options.sides) for name, case in self.cases.items()}
        self.runs: dict[str, list[Run]] = {name: [] for name in self.cases}
        self.commands: list[str] = []
        old = harness.earlier(options, summary.SCHEMA)
        if old is not None:
            self._continue(old)

    def _continue(self, old: dict[str, Any]) -> None:
        """Take over what an earlier command of this name has found.

        Raises:
            ValueError: a case of it was another.
        """
        self.commands = old["command"].split(" && ")
        for name, found in old["cases"].items():
            case = Case.of(found["case"])
            if name in self.cases and case.shared != self.cases[name].shared:
                mine, theirs = self.cases[name].shared, case.shared
                differ = ", ".join(
                    f"{key} {theirs[key]} then and {mine[key]} now"
                    for key in mine
                    if mine[key] != theirs[key]
                )
                raise ValueError(
                    f"{self.options.name}.json has case {name} with {differ}: choose another"
                    " --name, or leave --resume out, and it is written anew."
                )
            self.cases.setdefault(name, case)
            self.runs[name] = [
                Run(**run)
                for run in found["runs"]
                if run["status"] == "ok" or name not in self.wanted
            ]

    def turns(self) -> Iterator[None]:
        """Run what is not there yet; each side's result is taken in as it ends."""
        for name, sides in self.wanted.items():
            for side in sides:
                if any(run.side == side for run in self.runs[name]):
                    continue
                run = self.run(self.cases[name], side, self.options.threads, self.options.timeout)
                self.runs[name].append(run)
                text = (
                    f"held out {run.final:.4f} in {run.wall_s:.0f} s"
                    if run.status == "ok"
                    else essence(run.error)
                )
                harness.say(f"{name}  {side}: {run.status}  {text}")
                yield

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON (`summary` describes it), Markdown and PNG."""
        options = self.options
        result = {
            **harness.about(options, summary.SCHEMA, *self.commands),
            "finished": finished,
            "notes": {name: side.note for name, side in SIDES.items()},
            "cases": {
                name: {
                    "case": self.cases[name].to_json(),
                    "rows": [row.to_json() for row in summary.summarize(self.cases[name], runs)],
                    "runs": [run.to_json() for run in runs],
                }
                for name in CASES
                if (runs := self.runs.get(name))
            },
        }
        harness.keep(options, result, report.to_markdown(result))
        report.plot(result, options.output / f"{options.name}.png")
        return result


def main(arguments: Sequence[str] | None = None, run: Callable[..., Run] = run_side) -> int:
    """0 when every side ended within its limit, 1 when one did not, 2 for a wrong command line, 130
    after Ctrl-C.
    """
    options = harness.parsed(parser(), arguments)
    try:
        session = Session(options, run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with harness.stoppable() as stop:
        for _ in session.turns():
            session.write(finished=False)
    result = session.write(finished=stop.status == 0)
    print(json.dumps(result) if options.json else report.to_text(result))
    far = [
        (name, side)
        for name, case in session.cases.items()
        for side in summary.missed(summary.summarize(case, session.runs[name]))
    ]
    for name, side in far:
        harness.say(f"{name}  {side}: failed, or not within its limit")
    return stop.status or int(bool(far))
