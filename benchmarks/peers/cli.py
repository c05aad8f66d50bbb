"""The command: which settings and peers, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.harness import RESULTS
from benchmarks.peers import launch, report, summary
from benchmarks.peers.launch import Run
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import NOTES, PEERS, PRECISIONS, SIZES, Setting, matrix


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
            harness.say(
                f"round {number} of {self.setting.key} was incomplete: it is measured again"
            )
            self.runs = [run for run in self.runs if run.round != number]
        return False


def parser() -> argparse.ArgumentParser:
    """The options; with the defaults a round takes about 45 minutes on two cores."""
    p = harness.parser(
        "peers",
        __doc__,
        rounds=3,
        steps=4,
        warmup=2,
        clip=0.0,
        threads=1,
        budget=None,
        timeout=900.0,
        resume=False,
        name="peers",
        output=RESULTS,
        deepspeed_python=sys.executable,
        json=False,
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
    p.add_argument(
        "--quick",
        action="store_true",
        help="communication-bound, fp32, 2 ranks, no accumulation, one round of 3 steps",
    )
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
    harness.check_at_least(options, 1, "ranks", "accumulation", "steps", "rounds")
    harness.check_at_least(options, 0, "warmup")
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


def write(
    options: argparse.Namespace, comparisons: Sequence[Comparison], *, finished: bool
) -> dict[str, Any]:
    """Results so far as JSON (`summary` describes it), Markdown and PNG."""
    result = {
        **harness.about(options, summary.SCHEMA),
        "finished": finished,
        "models": {options.model: {"parameters": count_parameters(options.model)}},
        "notes": NOTES,
        "comparisons": [
            {
                "setting": c.setting.to_json(),
                "rows": [r.to_json() for r in c.rows()],
                "runs": [r.to_json() for r in c.runs],
            }
            for c in comparisons
            if c.runs
        ],
    }
    harness.keep(options, result, report.to_markdown(result))
    if finished:
        report.plot(result, options.output / f"{options.name}.png")
    return result


def earlier(options: argparse.Namespace) -> dict[str, Comparison]:
    """What an earlier command of this name measured, by the setting's key."""
    old = harness.earlier(options, summary.SCHEMA) or {"comparisons": []}
    found = [
        Comparison(Setting(**c["setting"]), [Run(**r) for r in c["runs"]])
        for c in old["comparisons"]
    ]
    return {c.setting.key: c for c in found}


def turns(
    options: argparse.Namespace, comparisons: Sequence[Comparison], peers: Sequence[str]
) -> Iterator[Comparison]:
    """Measure, and yield a comparison whenever a round of it is complete."""

    def wanted(comparison: Comparison, number: int) -> list[str]:
        return [] if comparison.has_round(number, peers) else comparison.wanted(peers)

    def before(comparison: Comparison, number: int, _: list[str]) -> list[Run]:
        return [run for run in comparison.runs if run.round == number]

    for number, comparison, sides in harness.rounds(options, comparisons, wanted, before):
        for peer in sides:
            python = options.deepspeed_python if peer.startswith("deepspeed") else sys.executable
            run = launch.run_peer(
                peer, comparison.setting, number, python=python, timeout=options.timeout
            )
            comparison.runs.append(run)
            harness.say_turn(run, comparison.setting.key, peer)
        yield comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every turn ended well, 1 when a peer failed, 2 for a wrong command line, 130 after
    Ctrl-C.
    """
    options = harness.parsed(parser(), arguments)
    try:
        settings, peers, known = settings_of(options), chosen_peers(options.peers), earlier(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    absent = launch.absent(peers, options.deepspeed_python)
    comparisons = [known.pop(s.key, Comparison(s)) for s in settings]
    for comparison in comparisons:
        comparison.missing = [p for p in peers if p in absent and comparison.setting.applies(p)]
    kept = [*known.values(), *comparisons]
    with harness.stoppable() as stop:
        for _ in turns(options, comparisons, peers):
            write(options, kept, finished=False)
    result = write(options, kept, finished=True)
    if options.json:
        print(json.dumps(result))
    else:
        for comparison in comparisons:
            print(report.plain_table(comparison.setting, comparison.rows()))
        print(report.footnotes())
        print(f"\nwritten: {options.output / options.name}.json, .md, .png")
    failed = any(run.status != "ok" for c in comparisons for run in c.runs)
    return stop.status or int(failed)
