"""The command: which settings and peers, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.peers import adapters, launch, report, summary
from benchmarks.peers.launch import Run
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import NOTES, PEERS, PRECISIONS, SIZES, Setting, matrix

RESULTS = launch.ROOT / "benchmarks" / "results"


@dataclass
class Comparison:
    """One setting and all that was measured in it so far."""

    setting: Setting
    runs: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def rows(self) -> list[summary.Row]:
        return summary.summarize(self.setting, self.runs, self.missing)

    def wanted(self, peers: Sequence[str]) -> list[str]:
        """Those of the peers that can run here, in the order of a round."""
        return [p for p in peers if self.setting.applies(p) and p not in self.missing]

    def has_round(self, number: int, peers: Sequence[str]) -> bool:
        """Whether the round is complete. What an interruption left of one is dropped: its peers met
        another machine.
        """
        there = {run.peer for run in self.runs if run.round == number}
        if there >= set(self.wanted(peers)):
            return True
        if there:
            print(
                f"# round {number} of {self.setting.key} was incomplete: it is measured again",
                file=sys.stderr,
            )
            self.runs = [run for run in self.runs if run.round != number]
        return False


def parser() -> argparse.ArgumentParser:
    """The options; with the defaults a round takes about 45 minutes on two cores."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, allow_abbrev=False
    )
    which = f"which of {', '.join(PEERS)}; a family's name takes all of it"
    p.add_argument("--peers", nargs="+", default=list(PEERS), metavar="PEER", help=which)
    full = (
        "every combination, hours; else those that differ from the first of each option in one"
        " respect"
    )
    p.add_argument("--full", action="store_true", help=full)
    p.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    p.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument(
        "--accumulation",
        nargs="+",
        type=int,
        default=[1, 4],
        help="micro-batches an optimizer step",
    )
    p.add_argument("--model", default="gpt-110m", choices=list(SHAPES))
    p.add_argument(
        "--tokens", type=int, help="tokens a rank and micro-batch in place of the size's own"
    )
    p.add_argument("--rounds", type=int, default=3, help="how often every peer takes its turn")
    p.add_argument(
        "--steps",
        type=int,
        default=4,
        help="timed optimizer steps of a turn (fewer where a step is long)",
    )
    p.add_argument("--warmup", type=int, default=2, help="optimizer steps before them")
    p.add_argument(
        "--clip",
        type=float,
        default=0.0,
        help="clip gradients of every peer to this norm; 0: of none",
    )
    p.add_argument("--threads", type=int, default=1, help="threads a rank")
    p.add_argument(
        "--budget", type=float, help="minutes: no further round is begun that would not end in time"
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        help="seconds after which one peer's turn is given up",
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help="communication-bound, fp32, 2 ranks, no accumulation, one round of 3 steps",
    )
    p.add_argument(
        "--resume",
        action="store_true",
        help="continue the results of the same --name where they stopped",
    )
    p.add_argument(
        "--name", default="peers", help="results are written to OUTPUT/NAME.json, .md and .png"
    )
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        help="an interpreter that has DeepSpeed, if this one has not",
    )
    p.add_argument("--json", action="store_true", help="print the JSON in place of the tables")
    return p


def chosen_peers(names: Sequence[str]) -> list[str]:
    """Peers in the order of a round, families spelled out; raises ValueError for an unknown one."""
    unknown = [n for n in names if n not in PEERS and not any(p.startswith(n + "-") for p in PEERS)]
    if unknown:
        raise ValueError(
            f"There is no peer {unknown[0]!r}; choose from {', '.join(PEERS)}, or a family such as"
            " 'onefold'."
        )
    return [
        p for p in PEERS if any(p == n or (p.startswith(n + "-") and n not in PEERS) for n in names)
    ]


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """The settings that the command line asks for."""
    if options.quick:
        options.sizes, options.precisions, options.ranks, options.accumulation = (
            ["communication"],
            ["fp32"],
            [2],
            [1],
        )
        options.rounds, options.steps, options.warmup = 1, 3, 1
    if (
        min(options.ranks) < 1
        or min(options.accumulation) < 1
        or options.steps < 1
        or options.warmup < 0
        or options.rounds < 1
    ):
        raise ValueError(
            "--ranks, --accumulation, --steps and --rounds must be at least 1, --warmup at least 0."
        )
    return matrix(
        model=options.model,
        sizes=options.sizes,
        precisions=options.precisions,
        ranks=options.ranks,
        accumulations=options.accumulation,
        tokens=options.tokens,
        warmup=options.warmup,
        steps=options.steps,
        clip=options.clip,
        threads=options.threads,
        full=options.full,
    )


def document(
    options: argparse.Namespace, comparisons: Sequence[Comparison], *, finished: bool
) -> dict[str, Any]:
    """What is written to disk; `summary` describes it."""
    return {
        "schema": summary.SCHEMA,
        "command": "python -m benchmarks.peers " + shlex.join(options.arguments),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "finished": finished,
        "machine": summary.machine(),
        "versions": summary.versions(options.deepspeed_python),
        "models": {options.model: {"parameters": count_parameters(options.model)}},
        "notes": NOTES,
        "comparisons": [
            {
                "setting": c.setting.to_json(),
                "rows": [r.to_json() for r in c.rows()],
                "runs": [r.to_json() for r in c.runs],
            }
            for c in comparisons
        ],
    }


def write(
    options: argparse.Namespace, comparisons: Sequence[Comparison], *, finished: bool
) -> dict[str, Any]:
    """Results so far as JSON, Markdown and PNG; each file is replaced whole."""
    measured = [c for c in comparisons if c.runs]
    result = document(options, measured, finished=finished)
    keep(result, report.to_markdown(result), options.output, options.name)
    if finished:
        report.plot(result, options.output / f"{options.name}.png")
    return result


def earlier(options: argparse.Namespace) -> dict[str, Comparison]:
    """What an earlier command of this name measured, by the setting's key; empty without
    --resume.
    """
    path = options.output / f"{options.name}.json"
    if not options.resume or not path.exists():
        return {}
    old = json.loads(path.read_text())
    if old.get("schema") != summary.SCHEMA:
        raise ValueError(
            f"{path} is not of schema {summary.SCHEMA}; choose another --name, or leave --resume"
            " out."
        )
    found = [
        Comparison(Setting(**c["setting"]), [Run(**r) for r in c["runs"]])
        for c in old["comparisons"]
    ]
    return {c.setting.key: c for c in found}


def turns(
    options: argparse.Namespace, comparisons: Sequence[Comparison], peers: Sequence[str]
) -> Iterator[Comparison]:
    """Measure, and yield a comparison whenever a round of it is complete.

    Every setting gets its first round before any gets a second, so a budget that ends early leaves
    no setting out.
    """
    started = time.monotonic()
    for number in range(1, options.rounds + 1):
        for comparison in comparisons:
            if comparison.has_round(number, peers):
                continue
            spent = [run.wall_s for run in comparison.runs if run.round == number - 1]
            if options.budget and time.monotonic() - started + sum(spent) > 60 * options.budget:
                print(
                    f"# the budget of {options.budget:g} minutes is spent: round {number} is"
                    " left out",
                    file=sys.stderr,
                )
                return
            for peer in comparison.wanted(peers):
                python = (
                    options.deepspeed_python if peer.startswith("deepspeed") else sys.executable
                )
                run = launch.run_peer(
                    peer, comparison.setting, number, python=python, timeout=options.timeout
                )
                comparison.runs.append(run)
                _say(comparison.setting, run)
            yield comparison


def _say(setting: Setting, run: Run) -> None:
    steps = (
        " ".join(f"{s:.2f}" for s in summary.step_seconds(run))
        if run.status == "ok"
        else report.essence(run.error)
    )
    print(
        f"# round {run.round}  {setting.key}  {run.peer}: {run.status}  {steps}",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every turn ended well, 1 when a peer failed, 2 for a wrong command line, 130 after
    Ctrl-C.
    """
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        settings, peers, known = settings_of(options), chosen_peers(options.peers), earlier(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pythons = {"deepspeed": options.deepspeed_python, "onefold": sys.executable}
    needed = {adapters.requirement(p) for p in peers} - {None}
    absent = {
        package
        for package in needed
        if package and not launch.interpreter_has(pythons[package], package)
    }
    comparisons = [known.pop(s.key, Comparison(s)) for s in settings]
    for comparison in comparisons:
        comparison.missing = [
            p for p in peers if adapters.requirement(p) in absent and comparison.setting.applies(p)
        ]
    kept = [*known.values(), *comparisons]
    status = 0
    # `timeout` and schedulers end us like Ctrl-C
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for _ in turns(options, comparisons, peers):
            write(options, kept, finished=False)
    except KeyboardInterrupt:
        print("# stopped; what was measured so far is kept", file=sys.stderr)
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
    result = write(options, kept, finished=True)
    if options.json:
        print(json.dumps(result))
    else:
        for comparison in comparisons:
            print(report.plain_table(comparison.setting, comparison.rows()))
        print(report.footnotes())
        print(f"\nwritten: {options.output / options.name}.json, .md, .png")
    failed = any(run.status != "ok" for c in comparisons for run in c.runs)
    return status or int(failed)
