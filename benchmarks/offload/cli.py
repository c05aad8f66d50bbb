"""The command: which sides at which batch sizes, how many rounds, where the results go."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.disk import file_system
from benchmarks.kept import keep
from benchmarks.offload import alone, large, report, summary
from benchmarks.offload.settings import NOTES, SIDES, applies, chosen
from benchmarks.offload.summary import Run
from benchmarks.peers import adapters, launch
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.report import essence
from benchmarks.peers.settings import SIZES, Setting
from benchmarks.peers.summary import machine, step_seconds, versions

RESULTS = launch.ROOT / "benchmarks" / "results"
PATHS = ("--disk", "--output", "--deepspeed-python")
"""Options whose values are places on one machine: the results name the option and not the place."""

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
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.offload", description=__doc__, allow_abbrev=False
    )
    which = f"which of {', '.join(SIDES)}; the beginning of names takes all of them"
    p.add_argument("--sides", nargs="+", default=list(SIDES), metavar="SIDE", help=which)
    p.add_argument("--model", default="gpt-110m", choices=list(SHAPES))
    p.add_argument(
        "--tokens", nargs="+", type=int, default=[256, 1024], help="tokens a rank and micro-batch"
    )
    p.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--accumulation", type=int, default=1, help="micro-batches an optimizer step")
    p.add_argument("--rounds", type=int, default=3, help="how often every side takes its turn")
    p.add_argument("--steps", type=int, default=3, help="timed optimizer steps of a turn")
    p.add_argument(
        "--warmup",
        type=int,
        default=2,
        help="optimizer steps before them; the first makes the states",
    )
    p.add_argument(
        "--clip",
        type=float,
        default=0.0,
        help="clip gradients to this norm (sides that step behind are left out); 0: never",
    )
    p.add_argument("--threads", type=int, default=1, help="threads a rank")
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
    p.add_argument(
        "--budget", type=float, help="minutes: no further round is begun that would not end in time"
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=900.0,
        help="seconds after which one side's turn is given up",
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
        "--resume",
        action="store_true",
        help="keep the results of the same --name, and continue where they stopped",
    )
    p.add_argument(
        "--name", default="offload", help="results are written to OUTPUT/NAME.json and .md"
    )
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument(
        "--deepspeed-python",
        default=sys.executable,
        help="an interpreter that has DeepSpeed, if this one has not",
    )
    p.add_argument(
        "--deepspeed-adam",
        action="store_true",
        help="DeepSpeedCPUAdam in place of torch's AdamW: it needs a compiler",
    )
    p.add_argument("--json", action="store_true", help="print the JSON in place of the tables")
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
    if (
        min(
            *options.tokens,
            options.ranks,
            options.accumulation,
            options.steps,
            options.rounds,
            options.warmup,
        )
        < 1
    ):
        raise ValueError(
            "--tokens, --ranks, --accumulation, --steps, --rounds and --warmup must be at least 1."
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


def shown_command(arguments: Sequence[str], program: str = "python -m benchmarks.offload") -> str:
    """The command as the results tell it, PATH in place of this machine's paths."""
    out: list[str] = []
    for argument in arguments:
        option, sign, _ = argument.partition("=")
        if option in PATHS and sign:
            out.append(f"{option}=PATH")
        else:
            out.append("PATH" if out and out[-1] in PATHS else argument)
    return f"{program} {shlex.join(out)}".strip()


class Session:
    """One command: its turns, and what they found so far."""

    def __init__(
        self, options: argparse.Namespace, comparisons: list[Comparison], run_ranks: RunRanks
    ) -> None:
        self.options, self.comparisons, self.run_ranks = options, comparisons, run_ranks
        self.large: dict[str, Any] | None = None
        self.smollm2: dict[str, Any] | None = None
        self.kept: list[Comparison] = []
        self.versions = versions(options.deepspeed_python)
        self.commands: list[str] = []
        if options.resume:
            self._continue()
        self.commands.append(shown_command(options.arguments))

    def _continue(self) -> None:
        """Take over what an earlier command of this name measured.

        Raises:
            ValueError: that file is something else.
        """
        path = self.options.output / f"{self.options.name}.json"
        if not path.exists():
            return
        old = json.loads(path.read_text())
        if old.get("schema") != summary.SCHEMA:
            raise ValueError(
                f"{path} is not of schema {summary.SCHEMA}; choose another --name, or leave"
                " --resume out."
            )
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
        """Measure; a side that is complete in a round is not measured in it again. Every setting
        gets a round before any gets a second.
        """
        options, begun = self.options, time.monotonic()
        for number in range(1, options.rounds + 1):
            for comparison in self.comparisons:
                there = {run.side for run in comparison.runs if run.round == number}
                wanted = [
                    s
                    for s in sides
                    if applies(s, comparison.setting)
                    and s not in comparison.missing
                    and s not in there
                ]
                spent = [
                    run.wall_s
                    for run in comparison.runs
                    if run.round == number - 1 and run.side in wanted
                ]
                if options.budget and time.monotonic() - begun + sum(spent) > 60 * options.budget:
                    print(
                        f"# the budget of {options.budget:g} minutes is spent: round {number} is"
                        " left out",
                        file=sys.stderr,
                    )
                    return
                for side in wanted:
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
        text = (
            " ".join(f"{s:.2f}" for s in step_seconds(run))
            if run.status == "ok"
            else essence(run.error)
        )
        print(
            f"# round {number}  {setting.key}  {side}: {run.status}  {text}",
            file=sys.stderr,
            flush=True,
        )

    def document(self, *, finished: bool) -> dict[str, Any]:
        """What is written to disk; `summary` describes it."""
        options = self.options
        measured = [c for c in [*self.kept, *self.comparisons] if c.runs]
        rows = [(c.setting, c.rows()) for c in measured]
        return {
            "schema": summary.SCHEMA,
            "command": " && ".join(dict.fromkeys(self.commands)),
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "finished": finished,
            "machine": machine(),
            "versions": self.versions,
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

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON and Markdown; each file is replaced whole."""
        options, result = self.options, self.document(finished=finished)
        keep(result, report.to_markdown(result), options.output, options.name)
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
    options = parser().parse_args(arguments)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sides, comparisons = chosen(options.sides), [Comparison(s) for s in settings_of(options)]
        session = Session(options, comparisons, run_ranks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pythons = {"deepspeed": options.deepspeed_python, "onefold": sys.executable}
    needed = {package for side in sides if (package := adapters.requirement(side))}
    absent = {
        package for package in needed if not launch.interpreter_has(pythons[package], package)
    }
    for comparison in comparisons:
        comparison.missing = [
            side
            for side in sides
            if adapters.requirement(side) in absent and applies(side, comparison.setting)
        ]
    status = 0
    # `timeout` and schedulers end us like Ctrl-C
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    disk = Path(tempfile.mkdtemp(prefix="offload-", dir=options.disk)).resolve()
    try:
        for _ in () if options.only_large or options.only_smollm2 else session.turns(sides, disk):
            session.write(finished=False)
        if options.large or options.only_large or options.only_smollm2:
            session.measure_large(disk)
    except KeyboardInterrupt:
        print("# stopped; what was measured so far is kept", file=sys.stderr)
        status = 130
    finally:
        signal.signal(signal.SIGTERM, before)
        try:
            result = session.write(finished=status == 0)
        finally:
            shutil.rmtree(disk, ignore_errors=True)
    print(json.dumps(result) if options.json else report.to_markdown(result))
    return status or int(session.failed)
