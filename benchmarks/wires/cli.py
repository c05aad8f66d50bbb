"""The command: which links and sides, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.peers import adapters
from benchmarks.peers.launch import ROOT, interpreter_has
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.report import essence
from benchmarks.peers.settings import Setting
from benchmarks.peers.summary import machine, step_seconds, versions
from benchmarks.wires import hosts, launch, report, summary
from benchmarks.wires.settings import HOSTS, RANKS_A_HOST, SIDES, Link, available, chosen, read_rate
from benchmarks.wires.summary import Run

RESULTS = ROOT / "benchmarks" / "results"
PATHS = ("--output", "--deepspeed-python")
"""Options whose values are places on one machine: the results name the option and not the place."""


@dataclass
class Measured:
    """One link and all that was measured over it so far."""

    link: Link
    stream: dict[str, Any] | None = None
    runs: list[Run] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.wires", description=__doc__, allow_abbrev=False
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
    p.add_argument("--accumulation", type=int, default=1, help="micro-batches an optimizer step")
    p.add_argument("--rounds", type=int, default=1, help="how often every side takes its turn")
    p.add_argument("--steps", type=int, default=2, help="timed optimizer steps of a turn")
    p.add_argument("--warmup", type=int, default=1, help="optimizer steps before them")
    p.add_argument("--threads", type=int, default=1, help="threads a rank")
    p.add_argument(
        "--budget", type=float, help="minutes: no further round is begun that would not end in time"
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        help="seconds after which one side's turn is given up",
    )
    p.add_argument(
        "--resume",
        action="store_true",
        help="keep the results of the same --name, and continue where they stopped",
    )
    p.add_argument(
        "--name", default="wires", help="results are written to OUTPUT/NAME.json, .md and .png"
    )
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        help="an interpreter that has DeepSpeed, if this one has not",
    )
    p.add_argument("--json", action="store_true", help="print the JSON in place of the tables")
    return p


def setting_of(options: argparse.Namespace) -> Setting:
    """What all sides share.

    Raises:
        ValueError: a number is too small.
    """
    if (
        min(
            options.tokens,
            options.accumulation,
            options.rounds,
            options.steps,
            options.warmup,
            options.threads,
        )
        < 1
        or options.delay < 0
    ):
        raise ValueError(
            "--tokens, --accumulation, --rounds, --steps, --warmup and --threads must be at least"
            " 1, --delay at least 0 milliseconds."
        )
    names = ("model", "tokens", "precision", "accumulation", "steps", "warmup", "threads")
    return Setting(ranks=HOSTS * RANKS_A_HOST, **{name: getattr(options, name) for name in names})


def shown_command(arguments: Sequence[str]) -> str:
    """The command as the results tell it, PATH in place of this machine's paths."""
    out: list[str] = []
    for argument in arguments:
        option, sign, _ = argument.partition("=")
        out.append(
            "PATH"
            if out and out[-1] in PATHS
            else f"{option}=PATH"
            if option in PATHS and sign
            else argument
        )
    return f"python -m benchmarks.wires {shlex.join(out)}".strip()


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(self, options: argparse.Namespace, run_side: Callable[..., Run]) -> None:
        self.options, self.run_side, self.setting = options, run_side, setting_of(options)
        self.sides = chosen(options.sides)
        self.links = [Measured(Link(read_rate(rate), options.delay)) for rate in options.rates]
        self.versions = versions(options.deepspeed_python)
        self.commands: list[str] = []
        self.skipped: str | None = None
        self.missing: list[str] = []
        if options.resume:
            self._continue()
        self.commands.append(shown_command(options.arguments))

    def _continue(self) -> None:
        """Take over what an earlier command of this name measured.

        Raises:
            ValueError: that file is something else, or of another setting.
        """
        path = self.options.output / f"{self.options.name}.json"
        if not path.exists():
            return
        old = json.loads(path.read_text())
        if old.get("schema") != summary.SCHEMA or old["setting"] != self.setting.to_json():
            raise ValueError(
                f"{path} is not of schema {summary.SCHEMA} and of this setting; choose another"
                " --name, or leave --resume out."
            )
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
        """Measure. Every link gets a round before any gets a second; a side that is complete in a
        round is not measured in it again.
        """
        options, begun = self.options, time.monotonic()
        wanted_links = {Link(read_rate(rate), options.delay) for rate in options.rates}
        for number in range(1, options.rounds + 1):
            for measured in self.links:
                there = {run.side for run in measured.runs if run.round == number}
                wanted = [
                    side for side in self.sides if side not in there and side not in self.missing
                ]
                if measured.link not in wanted_links or not wanted:
                    continue
                spent = sum(
                    run.wall_s
                    for run in measured.runs
                    if run.round == number - 1 and run.side in wanted
                )
                if options.budget and time.monotonic() - begun + spent > 60 * options.budget:
                    print(
                        f"# the budget of {options.budget:g} minutes is spent: round {number} is"
                        " left out",
                        file=sys.stderr,
                    )
                    return
                measured.stream = measured.stream or launch.measured(measured.link)
                for side in wanted:
                    run = self.run_side(
                        side,
                        self.setting,
                        measured.link,
                        number,
                        python=self.python(side),
                        timeout=options.timeout,
                    )
                    measured.runs.append(run)
                    text = (
                        " ".join(f"{s:.2f}" for s in step_seconds(run))
                        if run.status == "ok"
                        else essence(run.error)
                    )
                    print(
                        f"# round {number}  {measured.link.title}  {side}: {run.status}  {text}",
                        file=sys.stderr,
                        flush=True,
                    )
                    yield

    def document(self, *, finished: bool) -> dict[str, Any]:
        """What is written to disk; `summary` describes it."""
        options = self.options
        return {
            "schema": summary.SCHEMA,
            "command": " && ".join(dict.fromkeys(self.commands)),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "finished": finished,
            "skipped": self.skipped,
            "machine": machine(),
            "versions": self.versions,
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
        keep(result, report.to_markdown(result), options.output, options.name)
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
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
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
    pythons = {"deepspeed": options.deepspeed_python, "onefold": sys.executable}
    needed = {
        package for side in session.sides if (package := adapters.requirement(SIDES[side].family))
    }
    absent = {package for package in needed if not interpreter_has(pythons[package], package)}
    session.missing = [side for side in session.sides if SIDES[side].family in absent]
    status = 0
    # `timeout` and schedulers end us like Ctrl-C
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for _ in session.turns():
            session.write(finished=False)
    except KeyboardInterrupt:
        print("# stopped; what was measured so far is kept", file=sys.stderr)
        status = 130
    except hosts.HostError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    finally:
        signal.signal(signal.SIGTERM, before)
    result = session.write(finished=status == 0)
    print(json.dumps(result) if options.json else report.to_text(result))
    failed = any(
        run.status != "ok" and not SIDES[run.side].optional
        for measured in session.links
        for run in measured.runs
    )
    return status or int(failed)
