"""What every benchmark does alike: options, turns, medians, the JSON that is written, tables, plots.

options   parser(module, doc, rounds=3, name="peers", ...)    the shared ones by name, with this benchmark's defaults
turns     rounds(...), in_turns(...), stoppable()             sides take turns, so that a drift of the machine meets all alike
figures   step_seconds, losses, ratios, spread                medians over rounds, with their range
results   about(...), keep(...), earlier(...)                 JSON with command, date, machine and versions; each file whole
pages     shown, text_table, markdown_table, where, figure    the same columns for a terminal and for Markdown
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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DASH = "–"
PLACES = ("--disk", "--folder", "--output", "--deepspeed-python", "--against")
"""Options whose values are places on one machine: the results name the option and not the place."""

T = TypeVar("T")

# -- options ---------------------------------------------------------------------------------------

_SHARED: Mapping[str, dict[str, Any]] = {
    "rounds": {"type": int, "help": "how often every side takes its turn"},
    "steps": {"type": int, "help": "timed optimizer steps of a turn"},
    "warmup": {"type": int, "help": "optimizer steps before them"},
    "accumulation": {"type": int, "help": "micro-batches an optimizer step"},
    "threads": {"type": int, "help": "threads a rank"},
    "clip": {"type": float, "help": "clip gradients to this norm; 0: never"},
    "budget": {
        "type": float,
        "help": "minutes: no further round is begun that would not end in time",
    },
    "timeout": {"type": float, "help": "seconds after which one turn is given up"},
    "resume": {
        "action": "store_true",
        "help": "keep the results of the same --name, and continue where they stopped",
    },
    "name": {"help": "results are written to OUTPUT/NAME.json (and .md, .png)"},
    "output": {"type": Path, "help": "the folder of the results"},
    "deepspeed_python": {"help": "an interpreter that has DeepSpeed, if this one has not"},
    "json": {"action": "store_true", "help": "print the JSON in place of the tables"},
}


def parser(module: str, doc: str | None, **shared: Any) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.MODULE` with the shared options that are named, each with
    its default.
    """
    p = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default in shared.items():
        p.add_argument(f"--{name.replace('_', '-')}", default=default, **_SHARED[name])
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
    return options


def check_at_least(options: argparse.Namespace, least: int, *names: str) -> None:
    """Raises ValueError for an option below `least`."""
    for name in names:
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {value}: expected at least {least}.")


# -- turns -----------------------------------------------------------------------------------------


class Outcome(Protocol):
    """A turn: when, how it ended ("ok", "failed", "timeout"), what each rank wrote."""

    round: int
    status: str
    ranks: list[dict[str, Any]]
    error: str
    wall_s: float


def rounds(
    options: argparse.Namespace,
    parts: Iterable[T],
    wanted: Callable[[T, int], list[str]],
    before: Callable[[T, int, list[str]], Iterable[Outcome]],
) -> Iterator[tuple[int, T, list[str]]]:
    """(round, part, sides) as long as the budget lasts. Every part gets a round before any gets a
    second, so that a budget that ends early leaves no part out.

    Args:
        wanted: the sides of a part that are still to be measured in a round.
        before: what they did in the round before, which says how long this one will take.
    """
    begun = time.monotonic()
    budget = getattr(options, "budget", None)
    parts = list(parts)
    for number in range(1, options.rounds + 1):
        for part in parts:
            sides = wanted(part, number)
            if not sides:
                continue
            spent = sum(run.wall_s for run in before(part, number - 1, sides))
            if budget and time.monotonic() - begun + spent > 60 * budget:
                say(f"the budget of {budget:g} minutes is spent: round {number} is left out")
                return
            yield number, part, sides


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


def say_turn(run: Outcome, title: str, side: str) -> None:
    """How a turn ended: seconds of its steps, or the error."""
    told = (
        " ".join(f"{s:.2f}" for s in step_seconds(run))
        if run.status == "ok"
        else essence(run.error)
    )
    say(f"round {run.round}  {title}  {side}: {run.status}  {told}")


# -- figures ---------------------------------------------------------------------------------------


def step_seconds(run: Outcome) -> list[float]:
    """Seconds of each timed step of a run: the slowest rank's."""
    return [max(step) for step in zip(*(rank["step_s"] for rank in run.ranks), strict=True)]


def losses(run: Outcome) -> list[float]:
    """Loss of each step, the mean over ranks."""
    return [fmean(step) for step in zip(*(rank["losses"] for rank in run.ranks), strict=True)]


def by_round(runs: Iterable[Any], side: str, name: str = "side") -> dict[int, Any]:
    """The runs of one side that ended well, by round."""
    return {run.round: run for run in runs if getattr(run, name) == side and run.status == "ok"}


def ratios(runs: Iterable[Any], references: Mapping[int, Any]) -> list[float]:
    """The median step of each run over that of the reference of its round: a drift of the machine
    from round to round cancels.
    """
    both = [(run, references[run.round]) for run in runs if run.round in references]
    return [median(step_seconds(run)) / median(step_seconds(other)) for run, other in both]


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Median, least and greatest; None where there is none."""
    return (median(values), min(values), max(values)) if values else (None, None, None)


def loss_difference(
    runs: Iterable[Any], references: Mapping[int, Any], count: int | None = None
) -> float | None:
    """The largest relative difference of the first `count` losses to those of the reference of the
    same round.
    """
    both = [
        pair
        for run in runs
        if run.round in references
        for pair in zip(losses(run)[:count], losses(references[run.round])[:count], strict=False)
    ]
    return max((abs(mine - theirs) / abs(theirs) for mine, theirs in both), default=None)


def sides_of(
    runs: Sequence[Any],
    row: Callable[[str, list[Any]], Any],
    failed: Callable[..., Any],
    missing: Iterable[str] = (),
    name: str = "side",
) -> list[Any]:
    """A row for each side in the order in which they ran: `row(side, good runs)`, or
    `failed(side, status, error=...)` where none ended well; `missing` sides are not installed.
    """
    rows = []
    for side in dict.fromkeys(getattr(run, name) for run in runs):
        mine = [run for run in runs if getattr(run, name) == side]
        good = [run for run in mine if run.status == "ok"]
        rows.append(
            row(side, good) if good else failed(side, mine[-1].status, error=mine[-1].error)
        )
    return rows + [failed(side, "not installed") for side in missing]


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


def commit(source: Path) -> str:
    """The commit that the checkout of `source` is at, or else the name of its folder."""
    return _answer("git", "-C", str(source), "rev-parse", "--short", "HEAD") or source.parent.name


def about(options: argparse.Namespace, schema: str, *earlier_commands: str) -> dict[str, Any]:
    """What every result begins with: schema, command, date, machine, versions."""
    return {
        "schema": schema,
        "command": " && ".join(dict.fromkeys([*earlier_commands, options.command])),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": dict(versions(getattr(options, "deepspeed_python", None))),
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

    Raises:
        ValueError: that file is of another schema, or differs in one of `same`.
    """
    path = options.output / f"{options.name}.json"
    if not options.resume or not path.exists():
        return None
    old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if old.get("schema") != schema or any(old[key] != value for key, value in same.items()):
        of = " and of this ".join([f"schema {schema}", *same])
        raise ValueError(f"{path} is not of {of}; choose another --name, or leave --resume out.")
    return old


# -- pages -----------------------------------------------------------------------------------------

Cell = Callable[[Any], str]
Columns = Mapping[str, Cell]


def shown(name: str, form: str = "{}", scale: float = 1.0) -> Cell:
    """A cell: a field of a row (or a key of a dictionary), a dash where there is none."""

    def cell(row: Any) -> str:
        value = row.get(name) if isinstance(row, Mapping) else getattr(row, name)
        return DASH if value is None else form.format(value if scale == 1.0 else value / scale)

    return cell


def range_of(low: str, high: str) -> Cell:
    """A cell: "low-high" of two fields."""

    def cell(row: Any) -> str:
        ends = (getattr(row, low), getattr(row, high))
        return DASH if None in ends else "{:.2f}-{:.2f}".format(*ends)

    return cell


def cells(columns: Columns, row: Any) -> list[str]:
    """The row as text, one string a column; of one that failed its name and status."""
    if getattr(row, "status", "ok") != "ok":
        return [next(iter(columns.values()))(row), row.status, *[DASH] * (len(columns) - 2)]
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

    def __str__(self) -> str:
        return "\n".join([self.title, *aligned([self.columns, *self.rows]), ""])

    def markdown(self) -> str:
        """The same as a heading and a table of Markdown."""
        return f"## {self.title}\n\n{markdown([self.columns, *self.rows])}"


def failures(rows: Iterable[Any]) -> list[str]:
    """A sentence for each row that failed."""
    return [
        f"{next(iter(vars(row).values()))}: {row.status}: {essence(row.error)}"
        for row in rows
        if getattr(row, "error", "")
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


def figure(width: float, height: float) -> Any:
    """A figure that is drawn into a file; None where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def plain_axes(axes: Any) -> None:
    """Small labels, no frame above and at the right."""
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
