"""A run of two ranks, killed at random moments; it must go on with the undisturbed run's bits."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import run
from benchmarks.faults.ranks import Ranks
from onefold.checkpoint.folder import OWNER, latest
from onefold.inspection.verify import examine, is_like_a_checkpoint

WORLD, STEPS, EVERY = 2, 24, 2
SETTINGS = [(stage, asynchronous) for stage in (3, 0, 1, 2) for asynchronous in (True, False)]


@dataclass
class Kill:
    """One kill and what came of it.

    Attributes:
        moment: "start" (before the first step of this start), "step" or "save" (a checkpoint was
            being written when the signal went out).
        first: the rank that was killed first. gap: seconds until the other. after: seconds from the
            start of the ranks.
        reached: the last step that a rank had done. newest: the step of the newest checkpoint that
            was left, 0 if none.
        wrong: what was not as it must be; nothing if the run went on bit-equal.
    """

    stage: int
    asynchronous: bool
    moment: str = ""
    first: int = 0
    gap: float = 0.0
    after: float = 0.0
    reached: int = 0
    newest: int = 0
    wrong: list[str] = field(default_factory=list)


Lines = list[dict[str, Any]]


def _rank(rank: int, say: run.Log, stage: int, root: str | None, asynchronous: bool) -> None:
    run.train(stage, rank, STEPS, Path(root) if root else None, EVERY, asynchronous, say)


def _nothing(rank: int, say: run.Log) -> None:
    """What a rank does that is there to be started."""


class Drill:
    """Runs, killed until there were `kills` of them, half of them during a save."""

    def __init__(
        self, fork: Any, kills: int, seed: int = 0, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.fork, self.goal, self.tell = fork, kills, tell
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.runs: list[str] = []  # what was wrong with the end of each run, "" if nothing was
        self._references: dict[int, list[Lines]] = {}
        # That a start takes until it is at its end, as far as seen; kills come within it
        self._seconds = 0.0
        self._saving = 0.02  # the same of a save

    def done(self) -> bool:
        return len(self.kills) >= self.goal and not self._behind()

    def _behind(self) -> bool:
        """Whether fewer than half of the kills so far came during a save."""
        return 2 * self._in_saves() < len(self.kills)

    def _in_saves(self) -> int:
        return sum(k.moment == "save" for k in self.kills)

    def go(self) -> None:
        """All of it. Takes about a second a kill.

        Raises:
            RuntimeError: so many runs came to their end unkilled that the drill cannot be at work:
                no save is seen to begin, say.
        """
        number = 0
        with Ranks(self.fork, 1, _nothing) as ranks:  # starts the fork server
            ranks.ended(60.0)
        while not self.done():
            (stage, asynchronous), before = SETTINGS[number % len(SETTINGS)], len(self.kills)
            with tempfile.TemporaryDirectory(prefix="faults-run-") as root:
                self.runs.append(self._one_run(Path(root), stage, asynchronous))
            number += 1
            if number > 20 + 2 * self.goal:
                raise RuntimeError(
                    f"{number} runs came to their end, with {len(self.kills)} kills,"
                    f" {self._in_saves()} of them in a save"
                )
            wrong = sum(bool(k.wrong) for k in self.kills) + sum(map(bool, self.runs))
            self.tell(
                f"{len(self.kills)} kills ({self._in_saves()} in a save), {number} runs to the end,"
                f" {wrong} wrong"
            )
            for sentence in [s for kill in self.kills[before:] for s in kill.wrong] + [
                s for s in self.runs[-1:] if s
            ]:
                self.tell(f"wrong at stage {stage}, asynchronous={asynchronous}: {sentence}")

    def _one_run(self, root: Path, stage: int, asynchronous: bool) -> str:
        """Start the run again and again until its end. Returns what is wrong with the end."""
        reference = self._reference(stage)
        waiting: list[Kill] = []  # killed, and nobody has seen yet how the run goes on
        newest = 0
        while True:
            litter = unfinished(root)  # of the last start: no save of the next one
            with Ranks(self.fork, WORLD, _rank, stage, str(root), asynchronous) as ranks:
                kill = (
                    None
                    if self.done()
                    else self._attempt(ranks, root, litter, Kill(stage, asynchronous))
                )
                if kill is None and not ranks.ended(60.0):
                    return (
                        f"stage {stage}: a run from step {newest} on hung:"
                        f" {[run.lines(ranks.lines(r))[-1:] for r in range(WORLD)]}"
                    )
                failure = ranks.failed() if kill is None else ""
                said = [run.lines(ranks.lines(rank)) for rank in range(WORLD)]
            if failure:
                return f"stage {stage}, from step {newest} on: {failure}"
            wrong = [
                sentence
                for rank in range(WORLD)
                for sentence in judge(said[rank], reference[rank], newest, rank)
            ]
            if (
                wrong
                or all(any(line["at"] == "step" for line in s) for s in said)
                or all(s and s[-1]["at"] == "end" for s in said)
            ):
                for earlier in waiting:
                    earlier.wrong += wrong
                waiting.clear()
            if kill is None:
                ends = [s[-1] if s else {} for s in said]
                if [e.get("at") for e in ends] != ["end"] * WORLD:
                    return f"stage {stage}: the run stopped at {ends}"
                return "; ".join(wrong)
            self._look(kill, root, said)
            waiting.append(kill)
            self.kills.append(kill)
            newest = kill.newest

    def _attempt(self, ranks: Ranks, root: Path, litter: list[str], kill: Kill) -> Kill | None:
        """Kill the ranks at a random moment. None: they were at their end before it came."""
        if self._behind() or self.random.random() < 0.2:
            if not self._await_save(ranks, root, litter, number=self.random.randint(1, 3)):
                return None
            delay = self.random.uniform(0, 1.2 * self._saving)
        else:
            delay = self.random.uniform(0, self._seconds)
        if ranks.ended(delay):
            self._seconds += 0.5 * (time.monotonic() - ranks.begun - self._seconds)
            return None
        kill.first, kill.gap = (
            self.random.randrange(WORLD),
            self.random.choice((0.0, self.random.uniform(0, 0.1))),
        )
        kill.moment = "save" if set(unfinished(root)) - set(litter) else "step"
        ranks.kill(kill.first)
        kill.after = time.monotonic() - ranks.begun
        time.sleep(kill.gap)
        for rank in range(WORLD):
            ranks.kill(rank)
        for process in ranks.processes:
            process.join(10.0)
        return kill

    def _await_save(self, ranks: Ranks, root: Path, litter: list[str], number: int) -> bool:
        """Wait for this start's `number`-th save to begin. False: the ranks ended before."""
        seen: dict[str, float] = dict.fromkeys(litter, 0.0)
        while not ranks.ended(0.0):
            now, there = time.monotonic(), unfinished(root)
            for name in there:
                if name not in seen:
                    seen[name], number = now, number - 1
                    if number == 0:
                        return True
            for name, since in seen.items():
                if since and name not in there:
                    self._saving += 0.2 * (now - since - self._saving)
                    seen[name] = 0.0
            time.sleep(0.0002)
        return False

    def _look(self, kill: Kill, root: Path, said: list[Lines]) -> None:
        """What the kill has left: only whole checkpoints, and no step lost that was saved."""
        steps = [line["step"] for lines in said for line in lines if line["at"] == "step"]
        kill.reached = max(steps, default=0)
        if kill.moment == "step" and not steps:
            kill.moment = "start"
        for folder in sorted(root.iterdir()):
            if not folder.name.startswith(".") and is_like_a_checkpoint(folder):
                kill.wrong += [
                    f"{folder.name} is not whole after the kill: {problem}"
                    for problem in examine(folder).problems
                ]
        newest = latest(root)
        kill.newest = int(newest.name.removeprefix("step-")) if newest else 0
        # A synchronous save has ended when the next step is done; one behind the training when the
        # next one begins.
        owed = kill.reached - 1 if not kill.asynchronous else kill.reached - 1 - EVERY
        if owed >= EVERY and kill.newest < owed // EVERY * EVERY:
            kill.wrong.append(
                f"step {kill.reached} was done, and the newest checkpoint is of step {kill.newest}"
            )

    def _reference(self, stage: int) -> list[Lines]:
        """What each rank says in a run that nobody disturbs and nothing is saved of."""
        if stage not in self._references:
            with Ranks(self.fork, WORLD, _rank, stage, None, False) as ranks:
                if not ranks.ended(60.0) or ranks.failed():
                    raise RuntimeError(f"the undisturbed run failed: {ranks.failed()}")
                self._seconds = self._seconds or time.monotonic() - ranks.begun
                self._references[stage] = [run.lines(ranks.lines(rank)) for rank in range(WORLD)]
        return self._references[stage]


def judge(said: Lines, reference: Lines, newest: int, rank: int) -> list[str]:
    """How a rank differs from the undisturbed run; `newest` is the step it had to go on from."""
    states = {line["step"]: line["state"] for line in reversed(reference)}
    losses = {line["step"]: line["loss"] for line in reference if line["at"] == "step"}
    wrong = []
    for line in said:
        step = line["step"]
        if line["at"] == "start" and step != newest:
            wrong.append(
                f"rank {rank} went on from step {step}, and the newest checkpoint was of step"
                f" {newest}"
            )
        if line["state"] != states[step]:
            wrong.append(
                f"rank {rank}: at {line['at']} {step} its state is not that of the undisturbed run"
            )
        if line["at"] == "step" and line["loss"] != losses[step]:
            loss, other = float.fromhex(line["loss"]), float.fromhex(losses[step])
            wrong.append(f"rank {rank}: the loss of step {step} is {loss}, undisturbed {other}")
    return wrong[:3]


def unfinished(root: Path) -> list[str]:
    """Checkpoints that are being written. (Old ones that are being removed have no owner.)"""
    try:
        return [
            name
            for name in os.listdir(root)
            if name.endswith(".unfinished") and (root / name / OWNER).exists()
        ]
    except FileNotFoundError:
        return []
