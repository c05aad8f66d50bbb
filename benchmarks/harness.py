"""What every benchmark does alike. A benchmark is one file beside it: its options, its sides, a
function that measures one of them on a rank, and the columns of its table.

options   @command(name, doc, rounds=3, sides=(SIDES, "help"), ...)     the parsed options; Refused
turns     Study, in_turns(...), stoppable()     sides take turns, so that a drift of the machine meets all alike
ranks     launch.run_ranks(module, job, ranks)  fresh processes; each calls `module.measure(job)`
figures   step_seconds, losses, timings, over_rounds, rows_of     medians over rounds, with their range
results   keep(...), earlier(...)               JSON with command, date, machine and versions; each file whole
pages     pages.py                              tables for a terminal and for Markdown, plots

The JSON of a Study: "finished", what `document` says, "goals", and "comparisons": a list of
{"setting": {...}, "rows": [the table], "runs": [{"side", "round", "status", "error", "wall_s",
"ranks": [what each rank's `measure` has returned]}]}.
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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from benchmarks import launch, pages
from benchmarks.launch import ROOT, Refused

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
}


def parser(
    name: str, doc: str | None, /, *, results: bool = True, **options: Any
) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks NAME`, with --name and --output if it has `results`. A
    name of the form "NAME.py" is started as a file.

    Of an option that several benchmarks have (`_SHARED`) its default is given. Any other is
    `name=(default, help, *more)`, where `more` are a type, choices, or {"nargs": ...} for argparse.
    The default says what is read: False is a flag, a list takes several values. Without a default
    (`...`) the values stand on the command line without a name.
    """
    p = argparse.ArgumentParser(
        prog=f"python benchmarks/{name}"
        if name.endswith(".py")
        else f"python -m benchmarks {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if results:
        options = {"name": name.removesuffix(".py"), "output": RESULTS, **options}
    for option, given in options.items():
        default, text, *more = given if isinstance(given, tuple) else (given, *_SHARED[option])
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
            p.add_argument(option, **how)
        else:
            p.add_argument(f"--{option.replace('_', '-')}", **how)
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


def command(name: str, doc: str | None, /, **options: Any) -> Callable[..., Callable[..., int]]:
    """Makes a command of `main(options)`; where it is `Refused`, it says why and answers 2."""

    def made(main: Callable[..., int]) -> Callable[..., int]:
        @wraps(main)
        def told(arguments: Sequence[str] | None = None) -> int:
            try:
                return main(parsed(parser(name, doc, **options), arguments))
            except Refused as error:
                print(f"error: {error}", file=sys.stderr)
                return 2

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    runs: Sequence[Run], row: Callable[[str, list[Run]], Row], missing: Iterable[str] = ()
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
            found = {"side": side, "status": "ok", "rounds": len(good), **row(side, good)}
            rows.append({**found, "error": ""})
        else:
            rows.append({"side": side, "status": mine[-1].status, "error": mine[-1].error})
    rows += [{"side": side, "status": "not installed", "error": ""} for side in missing]
    fields = dict.fromkeys(name for row in rows for name in row)
    return [{**fields, "rounds": 0, **row} for row in rows]


def timings(
    good: Sequence[Run],
    same: Mapping[int, Run],
    names: Sequence[str] = ("ratio", "ratio_low", "ratio_high"),
    *,
    faster: bool = False,
) -> Row:
    """Of the runs of a side: `step_s`, the median over all timed steps of all rounds, and under
    `names` the median over rounds of its ratio to the run of `same` in that round, with the least
    and the greatest. `faster`: the ratio is theirs to ours.
    """
    found = [1 / r if faster else r for r in ratios(good, same)]
    step = median(second for run in good for second in step_seconds(run))
    return {"step_s": step, **dict(zip(names, spread(found), strict=True))}


def goal(
    text: str, figure: float | None, most: float, form: str = "{:.2f}", least: float = 0
) -> Row:
    """A row of the table of goals: what was to be reached, what was, and whether that is it."""
    if figure is None:
        return {"goal": text, "figure": "not measured", "met": None}
    return {"goal": text, "figure": form.format(figure), "met": least <= figure <= most}


# -- results ---------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where it was measured: processor, physical cores that this process may use, memory, system."""
    from onefold.cores import physical_cores
    from onefold.machine.calibration import cpu_name
    from onefold.memory import total_host_memory

    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
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


def earlier(options: Options, schema: str) -> dict[str, Any] | None:
    """What an earlier command of this name has left; None without --resume, or where there is none.
    `about` names its command too. Refuses a file of another schema.
    """
    path = options.output / f"{options.name}.json"
    if not getattr(options, "resume", False) or not path.exists():
        return None
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if old.get("schema") != schema:
        raise Refused(
            f"{path} is not of schema {schema}; choose another --name, or leave --resume out."
        )
    options.earlier_commands = old["command"].split(" && ")
    return old


def write_page(path: Path, text: str, check: bool) -> int:
    """Writes a page that the code makes; with `check` answers 1 if it differs, and says so."""
    if not check:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.name}: {len(text.splitlines())} lines")
    elif not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is not what the code says", file=sys.stderr)
        return 1
    return 0


# -- studies ---------------------------------------------------------------------------------------

OPTIONS: Mapping[str, Any] = {
    "threads": 1,
    "budget": None,
    "resume": False,
    "deepspeed_python": sys.executable,
}
"""What the command line of a study usually has."""


@dataclass
class Comparison:
    """One setting, all that was measured in it so far, and the sides that are not installed."""

    setting: Any
    runs: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Study:
    """Sides that take turns in each of several settings. Every setting gets a round before any gets
    a second, so that a budget that ends early leaves none out.

    Attributes:
        module: where `measure(job)` is, with "side" and "setting" in the job.
        read: makes a setting of its JSON: a dataclass with `title`, and most with `ranks` and
            `threads`.
        known: the names of all sides. notes: how each is set up, by its name or that of several.
        reference: the side that ratios and loss differences refer to.
        legend: what the columns mean.
        whole_rounds: measure a round again of which an interruption has left a part: its sides met
            another machine. Otherwise only what failed is measured again.
    """

    schema: str
    module: str
    read: Callable[..., Any]
    known: Sequence[str]
    notes: Mapping[str, str]
    reference: str
    legend = ""
    whole_rounds = True

    def __init__(self, options: Options, settings: Iterable[Any]) -> None:
        """Takes over what an earlier command has left."""
        self.options, self.sides = options, chosen(options.sides, self.known)
        self.old = earlier(options, self.schema) or {}
        self.comparisons: list[Comparison] = []
        for part in self.old.get("comparisons", ()):
            runs = [Run(**run) for run in part["runs"]]
            if not self.whole_rounds:
                runs = [run for run in runs if run.status == "ok"]
            self.comparisons.append(Comparison(type(self).read(**part["setting"]), runs))
        there = {comparison.setting: comparison for comparison in self.comparisons}
        self.asked = [
            there.get(setting) or Comparison(setting) for setting in dict.fromkeys(settings)
        ]
        self.comparisons += [c for c in self.asked if c.setting not in there]
        absent = self.absent()
        for c in self.asked:
            c.missing = [side for side in self.those(c.setting) if side in absent]

    # what a benchmark says

    def absent(self) -> set[str]:
        """The sides whose library is not installed."""
        return launch.absent(self.sides, self.options)

    def those(self, setting: Any) -> Sequence[str]:
        """The sides that mean something in a setting, in the order of a round."""
        return self.sides

    def take(self, setting: Any, side: str) -> dict[str, Any]:
        """One turn; what `launch.run_ranks` answers."""
        return launch.run_side(self.module, side, setting, self.options)

    def row(self, comparison: Comparison, side: str, good: list[Run]) -> Row:
        """What the runs of a side come to."""
        raise NotImplementedError

    def columns(self, setting: Any) -> Mapping[str, pages.Cell]:
        """What the table of a setting shows of a row."""
        raise NotImplementedError

    def goals(self, judged: Sequence[tuple[Any, list[Row]]]) -> list[Row]:
        """`goal`s, of the rows of every setting."""
        return []

    def document(self) -> dict[str, Any]:
        """What the JSON has beside the settings and their runs."""
        return {}

    def more(self, result: dict[str, Any]) -> Iterable[str]:
        """Further parts of the page, behind the tables."""
        return ()

    def charts(self, result: dict[str, Any]) -> list[list[pages.Panel]]:
        """The panels of a plot."""
        return []

    # what all do

    def references(self, comparison: Comparison) -> dict[int, Run]:
        return by_round(comparison.runs, self.reference)

    def rows(self, c: Comparison) -> list[Row]:
        return rows_of(c.runs, lambda side, good: self.row(c, side, good), c.missing)

    def turns(self) -> Iterator[tuple[Comparison, int, str]]:
        """(comparison, round, side) of what is still to be measured, as long as --budget lasts."""
        begun, budget = time.monotonic(), getattr(self.options, "budget", None)
        for number in range(1, self.options.rounds + 1):
            for c in self.asked:
                wanted = [side for side in self.those(c.setting) if side not in c.missing]
                there = {run.side for run in c.runs if run.round == number}
                if self.whole_rounds and there and not there >= set(wanted):
                    say(f"round {number} was incomplete: it is measured again")
                    c.runs, there = [run for run in c.runs if run.round != number], set()
                left = [side for side in wanted if side not in there]
                last = [run.wall_s for run in c.runs if run.round == number - 1]
                if left and budget and time.monotonic() - begun + sum(last) > 60 * budget:
                    say(f"the budget of {budget:g} minutes is spent: round {number} is left out")
                    return
                for side in left:
                    yield c, number, side

    def measure(self) -> None:
        """All turns, each of which is written at once."""
        for c, number, side in self.turns():
            run = Run(side, number, **self.take(c.setting, side))
            c.runs.append(run)
            told = f"in {run.wall_s:.0f} s" if run.status == "ok" else pages.essence(run.error)
            say(f"round {number}  {c.setting.title}  {side}: {run.status} {told}")
            self.write(finished=False)

    def write(self, *, finished: bool) -> dict[str, Any]:
        """Results so far as JSON and Markdown."""
        found = [(c, self.rows(c)) for c in self.comparisons if c.runs]
        parts = [
            {"setting": asdict(c.setting), "rows": rows, "runs": [r.to_json() for r in c.runs]}
            for c, rows in found
        ]
        kept = {"finished": finished, "notes": dict(self.notes), **self.document()}
        kept["goals"] = self.goals([(c.setting, rows) for c, rows in found])
        return keep(self.options, self.schema, self.page, **kept, comparisons=parts)

    def page(self, result: dict[str, Any]) -> str:
        parts, unused = [pages.where(result), pages.goals(result["goals"])], set(self.known)
        for c in result["comparisons"]:
            setting = type(self).read(**c["setting"])
            parts += [f"**{setting.title}**", pages.table(self.columns(setting), c["rows"])]
            unused -= {row["side"] for row in c["rows"]}
        return pages.page(*parts, *self.more(result), self.legend, *pages.notes(self.notes, unused))

    @property
    def failed(self) -> bool:
        """Whether a turn of this command did not end well."""
        return any(run.status != "ok" for c in self.asked for run in c.runs)

    def run(self) -> int:
        """Measure, write and print: 0, 1 when a turn failed, 130 after Ctrl-C."""
        with stoppable() as stop:
            self.measure()
        result = self.write(finished=stop.status == 0)
        pages.plot(self.options.output / f"{self.options.name}.png", self.charts(result))
        pages.show(self.page(result))
        return stop.status or int(self.failed)
