"""The command: which peers, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.checkpoint import disk, report, summary
from benchmarks.checkpoint.rows import LoadRow, Run
from benchmarks.checkpoint.settings import (
    LIGHT,
    NOTES,
    PEERS,
    WAYS,
    Counts,
    Turn,
    peers_turns,
    pretrained_turns,
)
from benchmarks.harness import RESULTS, essence, machine, version
from benchmarks.peers import launch
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import Setting

#: Starts the ranks of a turn: `launch.run_ranks`, or what a test puts in its place.
RunRanks = Callable[..., dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    """The options; with the defaults a round takes about 20 minutes on two cores."""
    p = harness.parser(
        "checkpoint",
        __doc__,
        rounds=3,
        threads=1,
        timeout=900.0,
        name="checkpoint",
        output=RESULTS,
        deepspeed_python=sys.executable,
        json=False,
    )
    p.add_argument(
        "--peers",
        nargs="*",
        default=list(PEERS),
        choices=PEERS,
        metavar="PEER",
        help=f"which of {', '.join(PEERS)}",
    )
    p.add_argument(
        "--ways",
        nargs="*",
        default=list(WAYS),
        choices=WAYS,
        metavar="WAY",
        help=f"which of {', '.join(WAYS)}",
    )
    p.add_argument("--model", default="gpt-110m", choices=list(SHAPES))
    p.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="who saves; loads are on as many, on twice and on half as many",
    )
    p.add_argument(
        "--saves", type=int, default=2, help="saves of a turn that the training waits for"
    )
    p.add_argument(
        "--behind",
        type=int,
        default=3,
        help="saves of a turn behind the training, in each of the peer's ways",
    )
    p.add_argument("--steps", type=int, default=3, help="steps timed alone before each of these")
    p.add_argument("--tokens", type=int, default=256, help="tokens a rank and step")
    p.add_argument("--same-ranks", action="store_true", help="no loads on other numbers of ranks")
    p.add_argument(
        "--folder",
        type=Path,
        help="where checkpoints go while they are needed: on the disk to be measured",
    )
    return p


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(self, options: argparse.Namespace, folder: Path, run_ranks: RunRanks) -> None:
        self.options, self.folder, self.run_ranks = options, folder, run_ranks
        self.runs: list[Run] = []
        self.missing: list[str] = []
        self.weights = 0

    def _start(self, module: str, turn: Turn | None, ranks: int, **more: Any) -> dict[str, Any]:
        o = self.options
        setting = Setting(model=o.model, tokens=o.tokens, ranks=ranks, threads=o.threads)
        job = {"turn": turn.to_json() if turn else None, "setting": setting.to_json(), **more}
        python = (
            o.deepspeed_python if turn and turn.peer.startswith("deepspeed") else sys.executable
        )
        return self.run_ranks(
            f"benchmarks.checkpoint.{module}",
            job,
            ranks,
            threads=o.threads,
            python=python,
            timeout=o.timeout,
        )

    def take(self, turn: Turn, number: int) -> None:
        """One turn, which starts where the turn before it has left the folders."""
        o = self.options
        if turn.kind == "pretrained":
            outcome = self._start(
                "pretrained",
                turn,
                turn.ranks,
                folder=str(self.folder / "weights"),
                toy=str(self.folder / "toy-weights"),
            )
        else:
            counts = LIGHT if turn.light else Counts(saves=o.saves, behind=o.behind, steps=o.steps)
            place = self.folder / f"{turn.peer}-{turn.saved}"
            outcome = self._start(
                "worker", turn, turn.ranks, counts=asdict(counts), folder=str(place)
            )
        self.runs.append(Run(turn, number, **outcome))
        said = (
            f"{self.runs[-1].status} in {self.runs[-1].wall_s:.0f} s {essence(self.runs[-1].error)}"
        )
        harness.say(f"round {number}  {turn.title}: {said}")

    def round(self, number: int) -> Iterator[None]:
        """Every turn of one round; yields when a peer is through."""
        o = self.options
        for peer in (p for p in o.peers if p not in self.missing):
            for turn in peers_turns(peer, o.ranks, not o.same_ranks):
                if turn.kind == "save" or (self.folder / f"{peer}-{turn.saved}").exists():
                    self.take(turn, number)
            for path in self.folder.glob(f"{peer}-*"):
                disk.remove(path)
            disk.settle()
            yield
        ways = [w for w in o.ways if w not in self.missing]
        if ways and not self.weights:
            written = self._start(
                "pretrained",
                None,
                1,
                folder=str(self.folder / "weights"),
                toy=str(self.folder / "toy-weights"),
            )
            if written["status"] != "ok":
                raise RuntimeError(
                    f"the Hugging Face folder could not be written: {written['error']}"
                )
            self.weights = written["ranks"][0]["bytes"]
        for turn in pretrained_turns(ways, o.ranks, not o.same_ranks):
            self.take(turn, number)
        yield

    def write(self, finished: bool) -> dict[str, Any]:
        """Results so far as JSON (`summary` describes it) and Markdown."""
        o, runs = self.options, self.runs
        saves, behind, loads = (
            summary.save_rows(runs),
            summary.behind_rows(runs),
            summary.load_rows(runs),
        )
        opened, place, parameters = (
            summary.open_rows(runs, self.weights),
            machine(),
            count_parameters(o.model),
        )
        head = harness.about(o, summary.SCHEMA)
        head["versions"]["transformers"] = version("transformers")
        result = {
            **head,
            "finished": finished,
            "file_system": disk.file_system(self.folder),
            "cached": self._cached(loads),
            "model": {"name": o.model, "parameters": parameters, "state_bytes": 12 * parameters},
            "ranks": o.ranks,
            "tokens": o.tokens,
            "notes": NOTES,
            "goals": [
                summary.to_json(g)
                for g in summary.goals(saves, behind, loads, o.ranks, place["cores"])
            ],
            "saves": [summary.to_json(r) for r in saves],
            "behind": [summary.to_json(r) for r in behind],
            "loads": [summary.to_json(r) for r in loads],
            "pretrained": [summary.to_json(r) for r in opened],
            "missing": self.missing,
            "runs": [r.to_json() for r in runs],
        }
        harness.keep(o, result, report.to_markdown(result))
        return result

    @staticmethod
    def _cached(loads: Sequence[LoadRow]) -> str:
        """Whether cold loads were cold, by what the kernel counted."""
        known = [
            row.disk_gb / (row.need_gb * row.ranks) for row in loads if row.disk_gb is not None
        ]
        if not known:
            return "Whether cold loads came from the disk is not known: the kernel does not count."
        said = "came from the disk" if min(known) > 0.9 else "came from the page cache in part"
        return (
            "Before cold loads the files were taken out of the page cache (posix_fadvise): of"
            f" their bytes {min(known):.0%} to {max(known):.0%} were read from the disk, so they"
            f" {said}. What the disk itself or a virtual machine's host caches cannot be told from"
            " here."
        )


def _absent(options: argparse.Namespace) -> list[str]:
    """Peers and ways whose packages are not installed."""
    absent = launch.absent(options.peers, options.deepspeed_python)
    gone = [peer for peer in options.peers if peer in absent]
    return gone + (list(options.ways) if options.ways and version("transformers") is None else [])


def main(arguments: Sequence[str] | None = None, run_ranks: RunRanks = launch.run_ranks) -> int:
    """0 when every turn ended well, 1 when one failed, 2 for a wrong command line, 130 after
    Ctrl-C.
    """
    options = harness.parsed(parser(), arguments)
    try:
        harness.check_at_least(options, 1, "ranks", "rounds", "saves", "steps", "tokens")
        harness.check_at_least(options, 0, "behind")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if shutil.which(options.deepspeed_python) is None:
        print(
            f"error: --deepspeed-python {options.deepspeed_python}: expected an interpreter.",
            file=sys.stderr,
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    session = Session(options, folder, run_ranks)
    try:
        with harness.stoppable() as stop:
            session.missing = _absent(options)
            for number in range(1, options.rounds + 1):
                for _ in session.round(number):
                    session.write(finished=False)
        result = session.write(finished=stop.status == 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(result))
    else:
        print(report.to_markdown(result))
        print(f"written: {os.path.join(options.output, options.name)}.json, .md")
    return stop.status or int(any(run.status != "ok" for run in session.runs))
