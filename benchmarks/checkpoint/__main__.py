"""Saving and loading of Onefold beside torch's distributed checkpoints (FSDP2) and DeepSpeed: one
model, one disk, one run.

    python -m benchmarks.checkpoint --deepspeed-python PYTHON     # three rounds of gpt-110m on 2 ranks, an hour or so
    python -m benchmarks.checkpoint --model gpt-tiny --rounds 1   # a minute or two: does it run?

A *turn* is one task of one peer in fresh processes. In a round every peer takes all its turns, and
rounds follow each other, so that a drift of the machine falls on all of them; the disk's own rate
is measured beside every save, with as many bytes, by the same processes.

The JSON, beside what every result has (`harness.about`):

    "finished": bool, "file_system": str, "cached": str,
    "model": {"name", "parameters", "state_bytes"}, "ranks": int, "tokens": int, "notes": {peer: how it is set up},
    "goals": [{...}], "saves": [...], "behind": [...], "loads": [...], "pretrained": [...],     # the rows of rows.py
    "missing": [peer],                 # not installed
    "runs": [{"turn": settings.Turn, "round", "status", "error", "wall_s", "ranks": [what each worker wrote]}]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness, launch, pages, probes
from benchmarks.checkpoint import disk, report, rows
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
from benchmarks.harness import Refused, Row, Run
from benchmarks.pages import essence
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import Setting

SCHEMA = "onefold-checkpoint/1"


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(
        self, options: harness.Options, folder: Path, run_ranks: Callable[..., dict[str, Any]]
    ) -> None:
        self.options, self.folder, self.run_ranks = options, folder, run_ranks
        self.runs: list[Run] = []
        self.weights = 0
        self.missing = _absent(options)

    def _start(self, module: str, turn: Turn | None, ranks: int, **more: Any) -> dict[str, Any]:
        o = self.options
        setting = Setting(model=o.model, tokens=o.tokens, ranks=ranks, threads=o.threads)
        side, job = turn.peer if turn else "", {"turn": asdict(turn) if turn else None, **more}
        module = f"benchmarks.checkpoint.{module}"
        return launch.run_side(side, setting, o, job, module=module, run=self.run_ranks)

    def _open(self, turn: Turn | None, ranks: int) -> dict[str, Any]:
        """A turn that opens the folder of weights; without one, the folder is written."""
        names = {"folder": "weights", "toy": "toy-weights"}
        places = {name: str(self.folder / place) for name, place in names.items()}
        return self._start("pretrained", turn, ranks, **places)

    def take(self, turn: Turn, number: int) -> None:
        """One turn, which starts where the turn before it has left the folders."""
        o = self.options
        if turn.kind == "pretrained":
            outcome = self._open(turn, turn.ranks)
        else:
            counts = LIGHT if turn.light else Counts(saves=o.saves, behind=o.behind, steps=o.steps)
            place = str(self.folder / f"{turn.peer}-{turn.saved}")
            outcome = self._start("worker", turn, turn.ranks, counts=asdict(counts), folder=place)
        run = Run(turn, number, **outcome)
        self.runs.append(run)
        said = f"{run.status} in {run.wall_s:.0f} s {essence(run.error)}"
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
            os.sync()
            yield
        ways = [w for w in o.ways if w not in self.missing]
        if ways and not self.weights:
            written = self._open(None, 1)
            if written["status"] != "ok":
                error = written["error"]
                raise RuntimeError(f"the Hugging Face folder could not be written: {error}")
            self.weights = written["ranks"][0]["bytes"]
        for turn in pretrained_turns(ways, o.ranks, not o.same_ranks):
            self.take(turn, number)
        yield

    def write(self, finished: bool) -> dict[str, Any]:
        """Results so far as JSON and Markdown."""
        o, runs = self.options, self.runs
        saves, behind, loads = rows.save_rows(runs), rows.behind_rows(runs), rows.load_rows(runs)
        parameters, cores = count_parameters(o.model), harness.machine()["cores"]
        found = {
            "finished": finished,
            "file_system": probes.file_system(self.folder),
            "cached": _cached(loads),
            "model": {"name": o.model, "parameters": parameters, "state_bytes": 12 * parameters},
            "ranks": o.ranks,
            "tokens": o.tokens,
            "notes": NOTES,
            "goals": rows.goals(saves, behind, loads, o.ranks, cores),
            "saves": saves,
            "behind": behind,
            "loads": loads,
            "pretrained": rows.open_rows(runs, self.weights),
            "missing": self.missing,
            "runs": [run.to_json("turn") for run in runs],
        }
        return harness.keep(o, SCHEMA, report.to_markdown, ("transformers",), **found)


def _cached(loads: Sequence[Row]) -> str:
    """Whether cold loads were cold, by what the kernel counted."""
    known = [r["disk_gb"] / (r["need_gb"] * r["ranks"]) for r in loads if r["disk_gb"] is not None]
    if not known:
        return "Whether cold loads came from the disk is not known: the kernel does not count."
    said = "came from the disk" if min(known) > 0.9 else "came from the page cache in part"
    return (
        "Before cold loads the files were taken out of the page cache (posix_fadvise): of"
        f" their bytes {min(known):.0%} to {max(known):.0%} were read from the disk, so they"
        f" {said}. What the disk itself or a virtual machine's host caches cannot be told from"
        " here."
    )


def _absent(options: harness.Options) -> list[str]:
    """Peers and ways whose packages are not installed."""
    gone = launch.absent(options.peers, options)
    ways = options.ways if harness.version("transformers") is None else []
    return [*(peer for peer in options.peers if peer in gone), *ways]


SOME = {"nargs": "*", "metavar": "NAME"}


@harness.command(
    "checkpoint",
    __doc__,
    rounds=3,
    threads=1,
    timeout=900.0,
    deepspeed_python=sys.executable,
    json=False,
    peers=(list(PEERS), f"which of {', '.join(PEERS)}", PEERS, SOME),
    ways=(list(WAYS), f"which of {', '.join(WAYS)}", WAYS, SOME),
    model=("gpt-110m", "which GPT", SHAPES),
    ranks=(2, "who saves; loads are on as many, on twice and on half as many"),
    saves=(2, "saves of a turn that the training waits for"),
    behind=(3, "saves of a turn behind the training, in each of the peer's ways"),
    steps=(3, "steps timed alone before each of these"),
    tokens=(256, "tokens a rank and step"),
    same_ranks=(False, "no loads on other numbers of ranks"),
    folder=(None, "where checkpoints go while they are needed: on the disk to be measured", Path),
)
def main(
    options: harness.Options, run_ranks: Callable[..., dict[str, Any]] = launch.run_ranks
) -> int:
    """A round takes about 20 minutes on two cores. `run_ranks` starts the ranks of a turn."""
    harness.check_at_least(options, 1, "ranks", "rounds", "saves", "steps", "tokens")
    harness.check_at_least(options, 0, "behind")
    if shutil.which(options.deepspeed_python) is None:
        raise Refused(f"--deepspeed-python {options.deepspeed_python}: expected an interpreter.")
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    try:
        session = Session(options, folder, run_ranks)
        with harness.stoppable() as stop:
            for number in range(1, options.rounds + 1):
                for _ in session.round(number):
                    session.write(finished=False)
        result = session.write(finished=stop.status == 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(result))
    else:
        pages.show(report.to_markdown(result))
    return stop.status or int(any(run.status != "ok" for run in session.runs))


if __name__ == "__main__":
    sys.exit(main())
