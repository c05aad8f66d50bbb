"""What every benchmark does alike. A benchmark is a small declaration beside it: its options, its
sides, a function that measures one of them, and the columns of its table.

options   parser(module, doc, rounds=3, sides=(SIDES, "help"), ...), parsed, command, Refused
turns     Comparison, turns(...), in_turns(...), stoppable()    sides take turns, so that a drift of the machine meets all alike
ranks     launch.run_ranks(module, job, ranks)                  fresh processes; each calls `module.measure(job)`
figures   step_seconds, losses, ratios, spread, over_rounds     medians over rounds, with their range
results   about(...), keep(...), earlier(...)                   JSON with command, date, machine and versions; each file whole
pages     shown, text_table, markdown_table, page, where        the same columns for a terminal and for Markdown
plot      Panel, plot                                           bars and curves, as a PNG
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
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DASH = "–"
PLACES = ("--disk", "--folder", "--output", "--deepspeed-python", "--against")
"""Options whose values are places on one machine: the results name the option and not the place."""

T = TypeVar("T")

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
    """A parser for `python -m benchmarks.MODULE`, with --name and --output if it has `results`.

    Of an option that several benchmarks have (`_SHARED`) its default is given. Any other is
    `name=(default, help, *more)`, where `more` are a type, choices, or {"nargs": ...} for argparse.
    The default says what is read: False is a flag, a list takes several values.
    """
    p = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if results:
        options = {"name": module, "output": RESULTS, **options}
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
        p.add_argument(f"--{name.replace('_', '-')}", **how)
    return p


def parsed(p: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `command`: the command line as the results tell it, PATH in place of this
    machine's paths.
    """
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


def command(main: Callable[..., int]) -> Callable[..., int]:
    """`main(arguments, ...)` that answers 2, and says why, where the command line is `Refused`."""

    @wraps(main)
    def told(arguments: Sequence[str] | None = None, *more: Any, **named: Any) -> int:
        try:
            return main(arguments, *more, **named)
        except Refused as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return told


def check_at_least(options: argparse.Namespace, least: int, *names: str) -> None:
    """Refuses an option below `least`."""
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < least:
            option = name.replace("_", "-")
            raise Refused(f"--{option} {value}: expected at least {least}.")


def chosen(names: Iterable[str], known: Sequence[str], option: str = "sides") -> list[str]:
    """Names in the order of `known`; one that is none of them stands for all that begin with it and
    a dash. Refuses a name that fits none.
    """
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
    """One turn of one side in one round. `status` is "ok", "failed" or "timeout"; `ranks` holds
    what each rank wrote.
    """

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


@dataclass
class Comparison:
    """One setting, all that was measured in it so far, and the sides that are not installed."""

    setting: Any
    runs: list[Run] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def turns(
    options: argparse.Namespace,
    comparisons: Sequence[Comparison],
    sides: Callable[[Any], Sequence[str]],
    *,
    whole_rounds: bool = False,
) -> Iterator[tuple[Comparison, int, str]]:
    """(comparison, round, side) of what is still to be measured, as long as --budget lasts. Every
    comparison gets a round before any gets a second, so that a budget that ends early leaves none
    out.

    Args:
        sides: those that mean something in a setting, in the order of a round.
        whole_rounds: measure a round again of which an interruption has left a part: its sides met
            another machine.
    """
    begun, budget = time.monotonic(), getattr(options, "budget", None)
    for number in range(1, options.rounds + 1):
        for comparison in comparisons:
            wanted = [s for s in sides(comparison.setting) if s not in comparison.missing]
            there = {run.side for run in comparison.runs if run.round == number}
            if whole_rounds and there and not there >= set(wanted):
                say(f"round {number} was incomplete: it is measured again")
                comparison.runs = [run for run in comparison.runs if run.round != number]
                there = set()
            left = [side for side in wanted if side not in there]
            spent = sum(
                run.wall_s
                for run in comparison.runs
                if run.round == number - 1 and run.side in left
            )
            if left and budget and time.monotonic() - begun + spent > 60 * budget:
                say(f"the budget of {budget:g} minutes is spent: round {number} is left out")
                return
            for side in left:
                yield comparison, number, side


def take_over(
    comparisons: Sequence[Comparison],
    old: Iterable[tuple[Any, Sequence[Mapping[str, Any]]]],
    again: Sequence[str] = (),
    key: str = "side",
) -> list[Comparison]:
    """Put what an earlier command measured, as (setting, runs), into the comparisons of the same
    setting; answers the other ones. Sides of `again` that failed are measured again.
    """
    others = []
    mine = {comparison.setting: comparison for comparison in comparisons}
    for setting, runs in old:
        found = mine.get(setting) or Comparison(setting)
        found.runs = [Run.of(run, key) for run in runs]
        if setting in mine:
            found.runs = [r for r in found.runs if r.status == "ok" or r.side not in again]
        else:
            others.append(found)
    return others


def in_turns(names: Iterable[T], count: int) -> Iterator[tuple[int, T]]:
    """(round, name): all names in each round, in the other direction every other round."""
    ordered = list(names)
    for number in range(count):
        for name in ordered if number % 2 == 0 else reversed(ordered):
            yield number, name


class Stop:
    """How a command ended: status 0, or 130 where it was interrupted."""

    status = 0


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Inside, Ctrl-C and SIGTERM (`timeout`, schedulers) end the measuring and not the command: what
    was measured so far is kept.
    """
    stop = Stop()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield stop
    except KeyboardInterrupt:
        say("stopped; what was measured so far is kept")
        stop.status = 130
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """A remark on standard error, at once."""
    print(f"# {text}", file=sys.stderr, flush=True)


def say_turn(run: Run, title: str) -> None:
    """How a turn ended: seconds of its steps, or the error."""
    seconds = " ".join(f"{s:.2f}" for s in step_seconds(run)) if run.status == "ok" else ""
    say(f"round {run.round}  {title}  {run.side}: {run.status}  {seconds or essence(run.error)}")


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
    """The median step of each run over that of the reference of its round: a drift of the machine
    from round to round cancels.
    """
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
    """The largest relative difference of the first `count` losses to those of the reference of the
    same round.
    """
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
    cpu, memory = platform.processor() or platform.machine(), None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu
        )
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": memory,
        "system": platform.system(),
        "kernel": platform.release(),
    }


@cache
def versions(deepspeed_python: str | None = None) -> Mapping[str, str | None]:
    """Versions of all that took part, None for what is not installed; DeepSpeed's is asked of the
    interpreter that runs it.
    """
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


def sources(options: argparse.Namespace) -> dict[str, Path]:
    """The `src` folders that are measured: "this", and those of --against by commit (or else by the
    name of their folder).
    """
    found = {"this": ROOT / "src"}
    for path in options.against:
        commit = _answer("git", "-C", str(path), "rev-parse", "--short", "HEAD")
        found[commit or path.parent.name] = path
    return found


def about(options: argparse.Namespace, schema: str, *packages: str) -> dict[str, Any]:
    """What every result begins with: schema, command, date, machine, versions (of `packages`
    too).
    """
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
    options: argparse.Namespace, result: Mapping[str, Any], markdown: str | None = None
) -> None:
    """`result` and its page as OUTPUT/NAME.json and .md. Each file is replaced whole, so that a
    kill leaves the former one.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    files = {"json": json.dumps(result, indent=1) + "\n", "md": markdown}
    for ending, text in files.items():
        if text is not None:
            part = options.output / f".{options.name}.{ending}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(options.output / f"{options.name}.{ending}")


def earlier(options: argparse.Namespace, schema: str, **same: Any) -> dict[str, Any] | None:
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


# -- pages -----------------------------------------------------------------------------------------

Cell = Callable[[Any], str]
Columns = Mapping[str, Cell]


def shown(name: str, form: str = "{}", scale: float = 1.0) -> Cell:
    """A cell: a field of a row, a dash where there is none."""

    def cell(row: Any) -> str:
        value = row.get(name)
        return DASH if value is None else form.format(value if scale == 1.0 else value / scale)

    return cell


def range_of(low: str, high: str) -> Cell:
    """A cell: "low-high" of two fields."""

    def cell(row: Any) -> str:
        ends = (row.get(low), row.get(high))
        return DASH if None in ends else "{:.2f}-{:.2f}".format(*ends)

    return cell


def cells(columns: Columns, row: Any) -> list[str]:
    """The row as text, one string a column; of one that failed its name and status."""
    if isinstance(row, Mapping) and row.get("status", "ok") != "ok":
        return [next(iter(columns.values()))(row), row["status"], *[DASH] * (len(columns) - 2)]
    return [cell(row) for cell in columns.values()]


def text_table(columns: Columns, rows: Sequence[Any]) -> str:
    """A table of aligned text; failures are explained under it."""
    failed = failures(rows)
    text = aligned([list(columns), *[cells(columns, row) for row in rows]])
    return "\n".join([*text, *(["", *failed] if failed else [])]) + "\n"


def markdown_table(columns: Columns, rows: Sequence[Any], left: int = 1) -> str:
    """The same as a Markdown table, the first `left` columns aligned to the left; failures are not
    explained.
    """
    return markdown([list(columns), *[cells(columns, row) for row in rows]], left)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text with their columns under each other, and a rule under the first."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [text[0], "  ".join("-" * width for width in widths), *text[1:]]


def markdown(lines: Sequence[Sequence[Any]], left: int = 1) -> str:
    """The same lines as a Markdown table."""
    rows = [
        "| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines
    ]
    marks = ["---" if number < left else "---:" for number in range(len(lines[0]))]
    return "\n".join([rows[0], f"|{'|'.join(marks)}|", *rows[1:]]) + "\n"


@dataclass
class Table:
    """A heading, column names and rows of text; the first column is aligned left."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """A row; dashes where cells are left out."""
        self.rows.append([*cells, *[DASH] * (len(self.columns) - len(cells))])

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned([self.columns, *self.rows]), ""])

    def markdown(self) -> str:
        """The same as a heading and a table of Markdown."""
        return f"## {self.title}\n\n{markdown([self.columns, *self.rows])}"


def page(*parts: str) -> str:
    """Parts of a page with an empty line between them."""
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def notes(told: Mapping[str, str], of: Iterable[str] | None = None) -> list[str]:
    """A sentence for each side (of those that are named), how it is set up."""
    return [f"{name}: {note}." for name, note in told.items() if of is None or name in of]


def failures(rows: Iterable[Any]) -> list[str]:
    """A sentence for each row that failed."""
    return [
        f"{next(iter(row.values()))}: {row['status']}: {essence(row['error'])}"
        for row in rows
        if isinstance(row, Mapping) and row.get("error") and "status" in row
    ]


def essence(error: str) -> str:
    """The line of a failed worker's output that says most: the last that names an error, else the
    last.
    """
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [""]
    return next(
        (line for line in reversed(lines) if "Error" in line or "error:" in line), lines[-1]
    )[:300]


def where(document: Mapping[str, Any], *more: str) -> str:
    """When and on what a result was measured, and by which command: one line of a page."""
    place = document["machine"]
    named = ", ".join(f"{name} {found}" for name, found in document["versions"].items() if found)
    on = [
        place["cpu"],
        f"{place['cores']} cores",
        f"{place['memory_gib']} GiB",
        f"{place['system']} {place['kernel']}",
        *more,
    ]
    return f"Measured {document['date']} on {', '.join(on)}; {named}. `{document['command']}`"


def write_page(module: str, doc: str | None, path: Path, page: Callable[[], str]) -> int:
    """The command of a page of docs/ that follows from code: writes it, or with --check answers 1
    if it is another.
    """
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


# -- plot ------------------------------------------------------------------------------------------

COLORS = {
    "ddp": "#7f7f7f",
    "zero": "#9467bd",
    "fsdp2": "#d62728",
    "deepspeed": "#1f77b4",
}
OURS = "#2ca02c"


@dataclass
class Panel:
    """One chart: bars by side, or curves by side.

    Attributes:
        bars: heights; form: of the figures on them. marks: a short line at a height, over some of
            them. curves: (x, y) of each point. dotted: curves that are drawn so. levels: heights of
            lines through the whole panel.
    """

    label: str
    title: str = ""
    bars: Mapping[str, float] = field(default_factory=dict)
    form: str = "%.2f"
    marks: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    dotted: Sequence[str] = ()
    levels: Sequence[float] = ()
    across: str = ""


def plot(path: Path, rows: Sequence[Sequence[Panel]], width: float = 13) -> bool:
    """Panels as a PNG, a row each. False, and no file, where matplotlib is missing or there is
    nothing to draw.
    """
    if not rows:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(width, 3.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for panels, line in zip(rows, every, strict=True):
        for panel, axes in zip(panels, line, strict=True):
            _draw(panel, axes)
    figure.savefig(path, dpi=110)
    return True


def _draw(panel: Panel, axes: Any) -> None:
    if panel.bars:
        names = list(panel.bars)
        colors = [COLORS.get(name.partition("-")[0], OURS) for name in names]
        bars = axes.bar(names, list(panel.bars.values()), color=colors)
        axes.bar_label(bars, fmt=panel.form, fontsize=7)
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor", "fontsize": 7}
        axes.set_xticks(range(len(names)), names, **turned)
    if panel.marks:
        look = {"marker": "_", "s": 300, "color": "black", "label": "formula"}
        axes.scatter(list(panel.marks), list(panel.marks.values()), **look)
    for number, (name, points) in enumerate(panel.curves.items()):
        how = {"color": f"C{number}", "linewidth": 1.2, "marker": ".", "label": name}
        axes.plot(*zip(*points, strict=True), linestyle=":" if name in panel.dotted else "-", **how)
    for level in panel.levels:
        axes.axhline(level, color="black", linewidth=0.8, linestyle=":")
    if panel.marks or panel.curves:
        axes.legend(fontsize=7, frameon=False)
    axes.set_ylabel(panel.label, fontsize=8)
    axes.set_xlabel(panel.across, fontsize=8)
    axes.set_title(panel.title, fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
