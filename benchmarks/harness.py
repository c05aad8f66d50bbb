"""What every benchmark does alike. A benchmark is a small declaration beside it: its options, its
sides, a function that measures one of them, and the columns of its table.

options   @command(module, doc, rounds=3, sides=(SIDES, "help"), ...)   the parsed options; Refused
turns     study.Study, in_turns(...), stoppable()    sides take turns, so that a drift of the machine meets all alike
ranks     launch.run_ranks(module, job, ranks)       fresh processes; each calls `module.measure(job)`
figures   step_seconds, losses, ratios, spread, over_rounds     medians over rounds, with their range
results   keep(...), earlier(...)                    JSON with command, date, machine and versions; each file whole
pages     pages.py                                   tables for a terminal and for Markdown, plots
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks import pages

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACES = ("--disk", "--folder", "--output", "--deepspeed-python", "--against")
"""Options whose values are places on one machine: the results name the option and not the place."""

T = TypeVar("T")
Options = argparse.Namespace
"""What a command line says, by name."""

# -- options ---------------------------------------------------------------------------------------

_SHARED: Mapping[str, tuple[Any, ...]] = {
    "rounds": ("how often every side takes its turn",),
    "steps": ("timed optimizer steps of a turn",),
    "warmup": ("optimizer steps before them",),
    "accumulation": ("micro-batches an optimizer step",),
    "threads": ("threads a rank",),
    "clip": ("clip gradients to this norm; 0: never",),
    "budget": ("minutes: no further round is begun that would not end in time", float),
    "timeout": ("seconds after which one turn is given up",),
    "resume": ("keep the results of the same --name, and continue where they stopped",),
    "name": ("results are written to OUTPUT/NAME.json (and .md, .png)",),
    "output": ("the folder of the results", Path),
    "deepspeed_python": ("an interpreter that has DeepSpeed, if this one has not",),
    "against": ("`src` folders of other checkouts", Path, {"nargs": "*"}),
    "json": ("print the JSON in place of the tables",),
}


class Refused(ValueError):
    """A wrong command line: what was given, and what to write instead."""


def parser(
    module: str, doc: str | None, *, results: bool = True, **options: Any
) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.MODULE`, with --name and --output if it has `results`. A
    module of the form "NAME.py" is started as a file.

    Of an option that several benchmarks have (`_SHARED`) its default is given. Any other is
    `name=(default, help, *more)`, where `more` are a type, choices, or {"nargs": ...} for argparse.
    The default says what is read: False is a flag, a list takes several values. Without a default
    (`...`) the values stand on the command line without a name.
    """
    name, _, file = module.partition(".")
    p = argparse.ArgumentParser(
        prog=f"python benchmarks/{module}" if file == "py" else f"python -m benchmarks.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if results:
        options = {"name": name, "output": RESULTS, **options}
    for name, given in options.items():
        default, text, *more = given if isinstance(given, tuple) else (given, *_SHARED[name])
        how: dict[str, Any] = {"default": default, "help": text}
        sample = default[0] if isinstance(default, list) and default else default
        if default is False:
            how["action"] = "store_true"
        elif isinstance(sample, int | float | Path):
            how["type"] = type(sample)
        if isinstance(default, list):
            how["nargs"] = "+"
        for extra in more:
            if isinstance(extra, dict) and extra.keys() <= {"nargs", "metavar"}:
                how |= extra
            else:
                how |= {"type": extra} if isinstance(extra, type) else {"choices": list(extra)}
        if default is ...:
            p.add_argument(name, **how)
        else:
            p.add_argument(f"--{name.replace('_', '-')}", **how)
    return p


def parsed(p: argparse.ArgumentParser, arguments: Sequence[str] | None) -> Options:
    """The options, with `command`: the command line, PATH in place of this machine's paths."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = p.parse_args(given)
    words: list[str] = []
    for word in given:
        option, sign, _ = word.partition("=")
        if option in PLACES and sign:
            words.append(f"{option}=PATH")
        elif (words and words[-1] in PLACES) or word.startswith(os.sep):
            words.append("PATH")
        else:
            words.append(word)
    options.command = f"{p.prog} {shlex.join(words)}".strip()
    options.earlier_commands = []
    return options


def command(module: str, doc: str | None, **options: Any) -> Callable[..., Callable[..., int]]:
    """Makes a command of `main(options, ...)`; where it is `Refused`, it says why and answers 2."""

    def made(main: Callable[..., int]) -> Callable[..., int]:
        def read() -> argparse.ArgumentParser:
            return parser(module, doc, **options)

        @wraps(main)
        def told(arguments: Sequence[str] | None = None, *more: Any, **named: Any) -> int:
            try:
                return main(parsed(read(), arguments), *more, **named)
            except Refused as error:
                print(f"error: {error}", file=sys.stderr)
                return 2

        told.parser = read  # type: ignore[attr-defined]
        return told

    return made


def check_at_least(options: Options, least: int, *names: str) -> None:
    """Refuses an option below `least`."""
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < least:
            option = name.replace("_", "-")
            raise Refused(f"--{option} {value}: expected at least {least}.")


def chosen(names: Iterable[str], known: Sequence[str], option: str = "sides") -> list[str]:
    """Names in the order of `known`; "fsdp2" stands for "fsdp2-..." too. Refuses other names."""
    found: set[str] = set()
    for name in names:
        fit = {name} if name in known else {k for k in known if k.startswith(f"{name}-")}
        if not fit:
            raise Refused(
                f"--{option} {name}: there is no such name; choose from {', '.join(known)}, or the"
                " beginning of some."
            )
        found |= fit
    return [name for name in known if name in found]


# -- turns -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """One turn of one side. `status` is "ok", "failed" or "timeout"; `ranks` is what each wrote."""

    side: Any
    round: int
    status: str
    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    wall_s: float = 0.0

    def to_json(self, key: str = "side") -> dict[str, Any]:
        """A plain dictionary, the side under `key`."""
        values = dict(self.__dict__)
        side = values.pop("side")
        return {key: asdict(side) if is_dataclass(side) else side, **values}  # type: ignore[arg-type]

    @classmethod
    def of(cls, values: Mapping[str, Any], key: str = "side") -> Run:
        """What `to_json` wrote."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "side": values[key]})


def in_turns(names: Iterable[T], count: int) -> Iterator[tuple[int, T]]:
    """(round, name): all names in each round, in the other direction every other round."""
    ordered = list(names)
    for number in range(count):
        for name in ordered if number % 2 == 0 else reversed(ordered):
            yield number, name


class CannotGoOn(RuntimeError):
    """Nothing more can be measured; the message says why."""


class Stop:
    """How a command ended: status 0, 1 (it could not go on) or 130 (interrupted)."""

    status = 0


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Inside, Ctrl-C, SIGTERM and `CannotGoOn` end the measuring; what was measured is kept."""
    stop = Stop()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield stop
    except KeyboardInterrupt:
        say("stopped; what was measured so far is kept")
        stop.status = 130
    except CannotGoOn as error:
        print(f"error: {error}", file=sys.stderr)
        stop.status = 1
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """A remark on standard error, at once."""
    print(f"# {text}", file=sys.stderr, flush=True)


def say_turn(run: Run, title: str) -> None:
    """How a turn ended: seconds of its steps, or the error."""
    seconds = " ".join(f"{s:.2f}" for s in step_seconds(run)) if run.status == "ok" else ""
    say(
        f"round {run.round}  {title}  {run.side}: {run.status}  {seconds or pages.essence(run.error)}"
    )


# -- figures ---------------------------------------------------------------------------------------

Look = str | Callable[[dict[str, Any]], float | None]


def slowest(ranks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Of each step the slowest rank's seconds."""
    return [max(step) for step in zip(*(rank[name] for rank in ranks), strict=True)]


def step_seconds(run: Run) -> list[float]:
    """Seconds of each timed step of a run: the slowest rank's."""
    return slowest(run.ranks, "step_s")


def losses(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [fmean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]


def by_round(runs: Iterable[Run], side: str) -> dict[int, Run]:
    """The runs of one side that ended well, by round."""
    return {run.round: run for run in runs if run.side == side and run.status == "ok"}


def ratios(runs: Iterable[Run], references: Mapping[int, Run]) -> list[float]:
    """Each run's median step over that of its round's reference: a drift of the machine cancels."""
    both = [(run, references[run.round]) for run in runs if run.round in references]
    return [median(step_seconds(run)) / median(step_seconds(other)) for run, other in both]


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Median, least and greatest; None where there is none."""
    return (median(values), min(values), max(values)) if values else (None, None, None)


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def of_ranks(
    ranks: Iterable[dict[str, Any]], look: Look, how: Callable[[list[float]], float] = max
) -> float | None:
    """The largest value over ranks (or what `how` makes of them); None where none is known."""
    found = [rank.get(look) if isinstance(look, str) else look(rank) for rank in ranks]
    known = [value for value in found if value is not None]
    return how(known) if known else None


def over_rounds(
    runs: Iterable[Run], look: Look, how: Callable[[list[float]], float] = max
) -> float | None:
    """The median over rounds of `of_ranks`."""
    return middle(of_ranks(run.ranks, look, how) for run in runs)


def scaled(value: float | None, unit: float) -> float | None:
    """The value in that unit, None where it is not known."""
    return None if value is None else value / unit


def relative(found: Sequence[float], expected: Sequence[float]) -> float | None:
    """The largest relative difference; None where nothing stands beside anything."""
    return max((abs(a - b) / abs(b) for a, b in zip(found, expected, strict=False)), default=None)


def loss_difference(
    runs: Iterable[Run], references: Mapping[int, Run], count: int | None = None
) -> float | None:
    """The largest relative difference of the first losses to those of the round's reference."""
    found = [
        relative(losses(run.ranks)[:count], losses(references[run.round].ranks))
        for run in runs
        if run.round in references
    ]
    return max((value for value in found if value is not None), default=None)


Row = dict[str, Any]


def rows_of(
    runs: Sequence[Run],
    row: Callable[[str, list[Run]], Row],
    missing: Iterable[str] = (),
    key: str = "side",
) -> list[Row]:
    """A row for each side in the order in which they ran: name, status, rounds, what
    `row(side, good runs)` says, and the error of one of which no run ended well; `missing` sides are
    not installed.
    """
    rows: list[Row] = []
    for side in dict.fromkeys(run.side for run in runs):
        mine = [run for run in runs if run.side == side]
        good = [run for run in mine if run.status == "ok"]
        if good:
            found = {key: side, "status": "ok", "rounds": len(good), **row(side, good)}
            rows.append({**found, "error": ""})
        else:
            rows.append({key: side, "status": mine[-1].status, "error": mine[-1].error})
    rows += [{key: side, "status": "not installed", "error": ""} for side in missing]
    fields = dict.fromkeys(name for row in rows for name in row)
    return [{**fields, "rounds": 0, **row} for row in rows]


# -- results ---------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where it was measured: processor, cores that this process may use, memory, system."""
    from onefold.machine.identity import cpu_name, usable_cpus
    from onefold.memory.pool import total_host_memory

    return {
        "cpu": cpu_name(),
        "cores": usable_cpus(),
        "memory_gib": round(total_host_memory() / 2**30, 1),
        "system": platform.system(),
        "kernel": platform.release(),
    }


@cache
def versions(deepspeed_python: str | None = None) -> Mapping[str, str | None]:
    """Versions of all that took part, None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "onefold"):
        found[package] = version(package)
    if deepspeed_python is not None:
        ask = "import importlib.metadata as m; print(m.version('deepspeed'))"
        found["deepspeed"] = _answer(deepspeed_python, "-c", ask)
    found["commit"] = _answer("git", "rev-parse", "--short", "HEAD")
    return found


def version(package: str) -> str | None:
    """Of a package of this interpreter."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _answer(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sources(options: Options) -> dict[str, Path]:
    """The `src` folders that are measured: "this", and those of --against by commit or folder."""
    found = {"this": ROOT / "src"}
    for path in options.against:
        commit = _answer("git", "-C", str(path), "rev-parse", "--short", "HEAD")
        found[commit or path.parent.name] = path
    return found


def about(options: Options, schema: str, packages: Iterable[str] = ()) -> dict[str, Any]:
    """What every result begins with: schema, command, date, machine, versions."""
    return {
        "schema": schema,
        "command": " && ".join(dict.fromkeys([*options.earlier_commands, options.command])),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            **versions(getattr(options, "deepspeed_python", None)),
            **{name: version(name) for name in packages},
        },
    }


def keep(
    options: Options,
    schema: str,
    page: Callable[[dict[str, Any]], str] | None = None,
    packages: Iterable[str] = (),
    **found: Any,
) -> dict[str, Any]:
    """Writes `about` and what was found as OUTPUT/NAME.json, and a page as NAME.md; answers it."""
    result = {**about(options, schema, packages), **found}
    write(options, result, page(result) if page else None)
    return result


def write(options: Options, result: Mapping[str, Any], page: str | None = None) -> None:
    """OUTPUT/NAME.json and .md, each replaced whole: a kill leaves the former one."""
    options.output.mkdir(parents=True, exist_ok=True)
    files = {"json": json.dumps(result, indent=1) + "\n", "md": page}
    for ending, text in files.items():
        if text is not None:
            part = options.output / f".{options.name}.{ending}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(options.output / f"{options.name}.{ending}")


def earlier(options: Options, schema: str, **same: Any) -> dict[str, Any] | None:
    """What an earlier command of this name has left; None without --resume, or where there is none.
    `about` names its command too. Refuses a file of another schema, or that differs in one of
    `same`.
    """
    path = options.output / f"{options.name}.json"
    if not options.resume or not path.exists():
        return None
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if old.get("schema") != schema or any(old[key] != value for key, value in same.items()):
        of = " and of this ".join([f"schema {schema}", *same])
        raise Refused(f"{path} is not of {of}; choose another --name, or leave --resume out.")
    options.earlier_commands = old["command"].split(" && ")
    return old


def write_page(module: str, doc: str | None, path: Path, page: Callable[[], str]) -> int:
    """The command of a page of docs/: writes it, or with --check answers 1 if it differs."""
    check = (False, "write nothing; fail if the page is not what the code says")
    given, text = parser(module, doc, results=False, check=check).parse_args(), page()
    if not given.check:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}: {len(text.splitlines())} lines")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    said = f"run `python -m benchmarks.{module}`."
    print(f"{path.name} is not what the code says: {said}", file=sys.stderr)
    return 1
