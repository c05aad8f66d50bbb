"""The command: which cases and sides, where the results go. What has ended is on the disk, and
--resume goes on behind it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.convergence import report, summary
from benchmarks.convergence.settings import CASES, SIDES, Case, chosen
from benchmarks.convergence.summary import Run
from benchmarks.kept import keep
from benchmarks.peers.launch import ROOT, run_ranks
from benchmarks.peers.report import essence
from benchmarks.peers.summary import machine, versions

RESULTS = ROOT / "benchmarks" / "results"
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
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=__doc__, allow_abbrev=False
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
    p.add_argument("--threads", type=int, default=1, help="threads a rank")
    p.add_argument(
        "--timeout", type=float, default=21600.0, help="seconds after which a side is given up"
    )
    p.add_argument(
        "--resume",
        action="store_true",
        help="keep the results of the same --name, and run what is not among them",
    )
    p.add_argument(
        "--name",
        default="convergence",
        help="results are written to OUTPUT/NAME.json, .md and .png",
    )
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument("--json", action="store_true", help="print the JSON in place of the tables")
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
        self.versions = {
            name: version
            for name, version in versions(sys.executable).items()
            if name != "deepspeed"
        }
        self.commands: list[str] = []
        if options.resume:
            self._continue()
        self.commands.append(
            f"python -m benchmarks.convergence {shlex.join(shown(options.arguments))}".strip()
        )

    def _continue(self) -> None:
        """Take over what an earlier command of this name has found.

        Raises:
            ValueError: that file is something else, or a case of it was another.
        """
        path = self.options.output / f"{self.options.name}.json"
        if not path.exists():
            return
        old = json.loads(path.read_text())
        other = f"choose another --name, or leave --resume out, and {path} is written anew."
        if old.get("schema") != summary.SCHEMA:
            raise ValueError(f"{path} is not of schema {summary.SCHEMA}: {other}")
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
                raise ValueError(f"{path} has case {name} with {differ}: {other}")
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
                print(f"# {name}  {side}: {run.status}  {text}", file=sys.stderr, flush=True)
                yield

    def document(self, *, finished: bool) -> dict[str, Any]:
        """What is written to disk; `summary` describes it."""
        return {
            "schema": summary.SCHEMA,
            "command": " && ".join(dict.fromkeys(self.commands)),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "finished": finished,
            "machine": machine(),
            "versions": self.versions,
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

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON, Markdown and PNG; each file is replaced whole."""
        options, result = self.options, self.document(finished=finished)
        keep(result, report.to_markdown(result), options.output, options.name)
        report.plot(result, options.output / f"{options.name}.png")
        return result


def shown(arguments: Sequence[str]) -> list[str]:
    """The command as the results tell it: without the place on this machine that --output names."""
    out: list[str] = []
    for argument in arguments:
        out.append(
            "PATH"
            if out and out[-1] == "--output"
            else "--output=PATH"
            if argument.startswith("--output=")
            else argument
        )
    return out


def main(arguments: Sequence[str] | None = None, run: Callable[..., Run] = run_side) -> int:
    """0 when every side ended within its limit, 1 when one did not, 2 for a wrong command line, 130
    after Ctrl-C.
    """
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        session = Session(options, run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    status = 0
    # `timeout` and schedulers end us like Ctrl-C
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for _ in session.turns():
            session.write(finished=False)
    except KeyboardInterrupt:
        print("# stopped; what has ended is kept, and --resume goes on", file=sys.stderr)
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    result = session.write(finished=status == 0)
    print(json.dumps(result) if options.json else report.to_text(result))
    far = [
        (name, side)
        for name, case in session.cases.items()
        for side in summary.missed(summary.summarize(case, session.runs[name]))
    ]
    for name, side in far:
        print(f"# {name}  {side}: failed, or not within its limit", file=sys.stderr)
    return status or int(bool(far))
