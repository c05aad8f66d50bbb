"""The command: which sides at which batch sizes, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.checkpoint.disk import file_system
from benchmarks.harness import RESULTS
from benchmarks.offload import alone, large, report, summary
from benchmarks.offload.settings import NOTES, SIDES, applies, chosen
from benchmarks.offload.summary import Run
from benchmarks.peers import launch
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import SIZES, Setting

#: Starts the ranks of a turn: `launch.run_ranks`, or what a test puts in its place.
RunRanks = Callable[..., dict[str, Any]]


@dataclass
class Comparison:
    """One setting and all that was measured in it so far."""

    setting: Setting
    runs: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def rows(self) -> list[summary.Row]:
        return summary.summarize(self.setting, self.runs, self.missing)


def parser() -> argparse.ArgumentParser:
    """The options; with the defaults a round takes about 25 minutes on two cores."""
    p = harness.parser(
        "offload",
        __doc__,
        rounds=3,
        steps=3,
        warmup=2,
        accumulation=1,
        clip=0.0,
        threads=1,
        budget=None,
        timeout=900.0,
        resume=False,
        name="offload",
        output=RESULTS,
        deepspeed_python=sys.executable,
        json=False,
    )
    which = f"which of {', '.join(SIDES)}; the beginning of names takes all of them"
    p.add_argument("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help=which)
    p.add_argument("--model", default="gpt-110m", choices=list(SHAPES))
    p.add_argument(
        "--tokens", nargs="+", type=int, default=[256, 1024], help="tokens a rank and micro-batch"
    )
    p.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument(
        "--disk",
        type=Path,
        default=Path.cwd(),
        help="a folder on the disk to be measured; what is written there is removed",
    )
    p.add_argument(
        "--copy-mib",
        type=int,
        default=64,
        help="of each of the four files of the plain copy; 0: no copy",
    )
    p.add_argument(
        "--chunk-mib", type=int, default=8, help="what the plain copy reads and writes at a time"
    )
    p.add_argument("--quick", action="store_true", help="256 tokens, fp32, one round of two steps")
    p.add_argument(
        "--large",
        action="store_true",
        help="a model too large for its memory, and SmolLM2 on one process: 15 minutes more",
    )
    p.add_argument("--only-large", action="store_true", help="nothing but that")
    p.add_argument(
        "--only-smollm2",
        action="store_true",
        help="nothing but SmolLM2 on one process: some 3 minutes",
    )
    p.add_argument(
        "--large-size", default="1.3b", help="a size that examples/larger_than_memory.py knows"
    )
    p.add_argument("--large-steps", type=int, default=5)
    p.add_argument(
        "--deepspeed-adam",
        action="store_true",
        help="DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler",
    )
    return p


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """The settings that the command line asks for.

    Raises:
        ValueError: a number is too small.
    """
    if options.quick:
        options.tokens, options.precisions, options.rounds, options.steps = (
            options.tokens[:1],
            options.precisions[:1],
            1,
            2,
        )
    harness.check_at_least(
        options, 1, "tokens", "ranks", "accumulation", "steps", "rounds", "warmup"
    )
    names = {tokens: size for size, tokens in SIZES.items()}
    shared = {
        name: getattr(options, name)
        for name in ("model", "ranks", "accumulation", "warmup", "steps", "clip", "threads")
    }
    return [
        Setting(
            tokens=tokens, size=names.get(tokens, "larger batch"), precision=precision, **shared
        )
        for precision in options.precisions
        for tokens in options.tokens
    ]


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(
        self, options: argparse.Namespace, comparisons: list[Comparison], run_ranks: RunRanks
    ) -> None:
        self.options, self.comparisons, self.run_ranks = options, comparisons, run_ranks
        self.large: dict[str, Any] | None = None
        self.smollm2: dict[str, Any] | None = None
        self.kept: list[Comparison] = []
        self.commands: list[str] = []
        old = harness.earlier(options, summary.SCHEMA)
        if old is not None:
            self._continue(old)

    def _continue(self, old: dict[str, Any]) -> None:
        """Take over what an earlier command of this name measured."""
        self.large, self.smollm2, self.commands = (
            old["large"],
            old.get("smollm2"),
            old["command"].split(" && "),
        )
        mine = {c.setting.key: c for c in self.comparisons}
        for c in old["comparisons"]:
            setting, runs = Setting(**c["setting"]), [Run(**r) for r in c["runs"]]
            if setting.key in mine:
                mine[setting.key].runs = runs
            else:
                self.kept.append(Comparison(setting, runs))

    def turns(self, sides: Sequence[str], disk: Path) -> Iterator[None]:
        """Measure; a side that is complete in a round is not measured in it again."""

        def wanted(comparison: Comparison, number: int) -> list[str]:
            there = {run.side for run in comparison.runs if run.round == number}
            return [
                s
                for s in sides
                if applies(s, comparison.setting) and s not in there | {*comparison.missing}
            ]

        def before(comparison: Comparison, number: int, again: list[str]) -> list[Run]:
            return [run for run in comparison.runs if run.round == number and run.side in again]

        for number, comparison, again in harness.rounds(
            self.options, self.comparisons, wanted, before
        ):
            for side in again:
                self._turn(side, comparison, number, disk)
                yield

    def _turn(self, side: str, comparison: Comparison, number: int, disk: Path) -> None:
        options, setting = self.options, comparison.setting
        job = {
            "side": side, "setting": setting.to_json(), "disk": None, "own_adam": options.deepspeed_adam,
            "copy_mib": options.copy_mib, "chunk_mib": options.chunk_mib,
        }  # fmt: skip
        python = options.deepspeed_python if SIDES[side].family == "deepspeed" else sys.executable
        with tempfile.TemporaryDirectory(dir=disk) as place:
            job["disk"] = place if SIDES[side].on_disk else None
            found = self.run_ranks(
                "benchmarks.offload.worker",
                job,
                setting.ranks,
                threads=setting.threads,
                python=python,
                timeout=options.timeout,
            )
        run = Run(side, number, **found)
        comparison.runs.append(run)
        harness.say_turn(run, setting.key, side)

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON (`summary` describes it) and Markdown."""
        options = self.options
        measured = [c for c in [*self.kept, *self.comparisons] if c.runs]
        rows = [(c.setting, c.rows()) for c in measured]
        result = {
            **harness.about(options, summary.SCHEMA, *self.commands),
            "finished": finished,
            "disk": {
                "file_system": file_system(options.disk),
                "copy_mib": options.copy_mib,
                "chunk_mib": options.chunk_mib,
            },
            "models": {options.model: {"parameters": count_parameters(options.model)}},
            "notes": NOTES,
            "comparisons": [
                {
                    "setting": c.setting.to_json(),
                    "rows": [row.to_json() for row in some],
                    "pairs": [asdict(pair) for pair in summary.pairs(c.runs)],
                    "runs": [run.to_json() for run in c.runs],
                }
                for c, (_, some) in zip(measured, rows, strict=True)
            ],
            "large": self.large,
            "smollm2": self.smollm2,
            "goals": summary.goals(rows, self.large, self.smollm2),
        }
        harness.keep(options, result, report.to_markdown(result))
        return result

    def measure_large(self, disk: Path) -> None:
        o, shared = (
            self.options,
            {
                "steps": self.options.large_steps,
                "tokens": 256,
                "threads": self.options.threads,
            },
        )
        if not o.only_smollm2:
            self.large = large.measure(
                disk,
                options=("--size", o.large_size),
                ranks=o.ranks,
                timeout=max(o.timeout, 3600.0),
                **shared,
            )
        self.smollm2 = alone.measure(disk, timeout=o.timeout, **shared)

    @property
    def failed(self) -> bool:
        """Whether something was measured and did not end well."""
        there = [found["status"] for found in (self.large, self.smollm2) if found is not None]
        there += [run.status for comparison in self.comparisons for run in comparison.runs]
        return any(status not in ("ok", "not installed") for status in there)


def main(arguments: Sequence[str] | None = None, run_ranks: RunRanks = launch.run_ranks) -> int:
    """0 when every turn ended well, 1 when one failed, 2 for a wrong command line, 130 after
    Ctrl-C.
    """
    options = harness.parsed(parser(), arguments)
    try:
        sides, comparisons = chosen(options.sides), [Comparison(s) for s in settings_of(options)]
        session = Session(options, comparisons, run_ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    absent = launch.absent(sides, options.deepspeed_python)
    for comparison in comparisons:
        comparison.missing = [
            side for side in sides if side in absent and applies(side, comparison.setting)
        ]
    disk = Path(tempfile.mkdtemp(prefix="offload-", dir=options.disk)).resolve()
    try:
        with harness.stoppable() as stop:
            only_large = options.only_large or options.only_smollm2
            for _ in () if only_large else session.turns(sides, disk):
                session.write(finished=False)
            if options.large or only_large:
                session.measure_large(disk)
        result = session.write(finished=stop.status == 0)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    print(json.dumps(result) if options.json else report.to_markdown(result))
    return stop.status or int(session.failed)
