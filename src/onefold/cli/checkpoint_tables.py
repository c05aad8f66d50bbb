"""Print checkpoints as words and tables, for people."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from onefold.cli.tables import plain_table
from onefold.inspection.diff import Difference, TensorDifference
from onefold.inspection.summary import Listed, Summary, TensorSummary
from onefold.inspection.verify import Examination
from onefold.plan.tables import _print, count

#: The most problems and differences that are shown; --json has them all.
MOST = 40
#: What is compared in each part besides its tensors.
VALUES = {
    "weights": "",
    "optimizer": "parameter groups, step counts",
    "rest": "step, scheduler, scaler, data position, extra",
    "random": "each rank's generators",
}


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, file=sys.stdout)


def _show(out: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Make a table, with a header if a column has a name; see `plain_table`."""
    table = plain_table(title, *columns)
    table.show_header = any(columns)
    for row in rows:
        table.add_row(*map(escape, row))
    _print(out, table)


def show_list(root: Path, found: Sequence[Listed]) -> None:
    """Print a folder's checkpoints, and what is wrong with those that are not whole."""
    out = _console()
    title = f"checkpoints in {escape(str(root))}, the newest first"
    table = plain_table(title, "name", " step", "saved", " ranks", " size", "")
    for c in found:
        state = "[bold red]not whole[/bold red]" if c.wrong else "whole by names and sizes"
        figures = _or_dash(c.step), c.created or "–", _or_dash(c.ranks), _bytes(c.nbytes)
        table.add_row(escape(c.path.name), *figures, state)
    _print(out, table)
    for c in found:
        if c.wrong:
            out.print(f"{escape(c.path.name)}: {escape(c.wrong)}")
    out.print("[dim]onefold checkpoint verify reads every byte.[/dim]")


def show_summary(summary: Summary, tensors: Sequence[TensorSummary] | None) -> None:
    """Print the summary of a checkpoint, and its tensors one by one if they are given."""
    out = _console()
    step = f"step {summary.step}" if summary.step is not None else "no step given"
    out.print(
        f"[bold]{escape(str(summary.path))}[/bold]: {summary.form}, {step},"
        f" {count(summary.parameters)} parameters"
    )
    by = summary.saved_by
    if by:
        mesh = f" ({by['mesh']})" if "mesh" in by else ""
        ranks = f"{_plural(by.get('world_size', '?'), 'rank')}{escape(mesh)}"
        where = f"on {ranks} at stage {by.get('stage', '?')}"
        versions = ", ".join(
            f"{name} {by[name]}" for name in ("onefold", "torch", "python") if name in by
        )
        cut = f"; resharded for {by['resharded_for']} ranks" if "resharded_for" in by else ""
        out.print(
            f"saved {summary.created or 'at an unknown time'} {where}, by {escape(versions)}{cut}"
        )
    rows: list[Sequence[str]] = [
        (s.kind, s.state, s.dtype, str(s.tensors), f"{s.elements:,}", _bytes(s.nbytes))
        for s in summary.sorts
    ]
    _show(out, "tensors", ("kind", "state", "dtype", " tensors", " elements", " bytes"), rows)
    if summary.groups:
        numbered = any(g.number for g in summary.groups)
        columns: Sequence[str] = ("optimizer", " group", " tensors", " elements", "options")
        rows = [
            (
                g.optimizer + (f" {g.number}" if numbered else ""),
                *(str(g.index), str(len(g.names)), f"{g.elements:,}", _options(g.options)),
            )
            for g in summary.groups
        ]
        _show(out, "parameter groups", columns, rows)
    if summary.resumes:
        _show(out, "what resumes besides the weights", ("", ""), summary.resumes.items())
    files = [(n, _bytes(size) if size >= 0 else "") for n, size in _shortened(summary.files)]
    _show(out, "files", ("name", " bytes"), files)
    if tensors is not None:
        columns = ("name", "kind", "state", "dtype", "shape", " bytes", "in", "also called")
        _show(out, f"{len(tensors)} tensors", columns, map(_tensor, tensors))


def _tensor(t: TensorSummary) -> tuple[str, ...]:
    files = f"{t.files[0]} to {t.files[-1]}" if len(t.files) > 1 else "".join(t.files)
    what = (t.item.name, t.item.kind, t.item.state, t.dtype, str(list(t.shape)))
    return (*what, _bytes(t.nbytes), files, ", ".join(t.aliases))


def show_verdict(verdict: Examination, seconds: float) -> None:
    """Print that a checkpoint is whole, or everything that is wrong with it."""
    out = _console()
    name = escape(str(verdict.folder))
    read = (
        f"{verdict.files} files, {verdict.tensors} tensors, {_bytes(verdict.nbytes)} read in"
        f" {seconds:.1f} s"
    )
    if verdict.problems:
        count = len(verdict.problems)
        out.print(f"[bold red]{name}: {_plural(count, 'problem')}[/bold red] ({read})")
        for p in verdict.problems[:MOST]:
            out.print(f"  {escape(str(p))}")
        if count > MOST:
            out.print(f"  and {count - MOST} more; --json lists all")
    else:
        out.print(f"[bold]{name}: whole[/bold] ({read}; every checksum agrees)")
    for p in verdict.notes[:MOST]:
        out.print(f"  [dim]note: {escape(str(p))}[/dim]")


def show_written(target: Path, files: Sequence[str], nbytes: int, seconds: float) -> None:
    """Print where the new folder is, and its files."""
    out = _console()
    out.print(
        f"wrote {escape(str(target))}: {_plural(len(files), 'file')}, {_bytes(nbytes)} in"
        f" {seconds:.1f} s"
    )


def show_difference(
    found: Difference, made: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> None:
    """Print each part's verdict, then every difference."""
    out = _console()
    for which, m in zip(("first", "second"), made, strict=True):
        facts = ", ".join(
            f"{k.replace('_', ' ')} {v}" for k, v in m.items() if k != "from" and v is not None
        )
        out.print(f"{which}: {escape(str(m['from']))}{f' ({escape(facts)})' if facts else ''}")
    for part in parts:
        if part in found.skipped:
            out.print(f"  {part}: not compared (only Onefold's checkpoints say it)")
            continue
        tensors, values = found.differing(part)
        if tensors or values:
            counts = [_plural(n, what) for n, what in ((tensors, "tensor"), (values, "value")) if n]
            verb = "differs" if tensors + values == 1 else "differ"
            out.print(f"  [bold red]{part}: {' and '.join(counts)} {verb}[/bold red]")
        else:
            count = found.compared.get(part, 0)
            looked = ", ".join(
                x for x in (_plural(count, "tensor") if count else "", VALUES[part]) if x
            )
            out.print(f"  {part}: the same{f' ({looked})' if looked else ''}")
    if found.tensors:
        figures = (" elements", " of", " largest", " relative", " at")
        rows = [
            (
                d.item.name,
                f"{d.item.kind} {d.item.state}".strip(),
                d.what,
                *_figures(d),
                d.first,
                d.second,
            )
            for d in found.tensors[:MOST]
        ]
        _show(
            out, "tensors that differ", ("name", "kind", "what", *figures, "first", "second"), rows
        )
    if found.values:
        differing = [(v.part, v.where, str(v.first), str(v.second)) for v in found.values[:MOST]]
        _show(out, "values that differ", ("part", "where", "first", "second"), differing)
    left = max(0, len(found.tensors) - MOST) + max(0, len(found.values) - MOST)
    if left:
        out.print(f"and {left} more; --json lists all")
    same = f"[bold]the same[/bold] ({_bytes(found.nbytes)} of tensors compared)"
    out.print(same if found.equal else "[bold]they differ[/bold]")


def _figures(d: TensorDifference) -> tuple[str, ...]:
    if d.what != "values":
        return ("", f"{d.of:,}" if d.of else "", "", "", "")
    bits = d.largest == 0  # such as 0.0 and -0.0
    largest = "nan" if math.isnan(d.largest) else "bits only" if bits else f"{d.largest:.3g}"
    relative = "" if bits else f"{d.relative:.2g}"
    return (f"{d.differing:,}", f"{d.of:,}", largest, relative, f"{d.at:,}")


def _shortened(files: Mapping[str, int], most: int = 24) -> list[tuple[str, int]]:
    """Return all files if they are few, else the first and the last ones."""
    listed = list(files.items())
    if len(listed) <= most:
        return listed
    half = most // 2
    between = listed[half:-half]
    left = f"... {len(between)} more, {_bytes(sum(n for _, n in between))}"
    return [*listed[:half], (left, -1), *listed[-half:]]


def _options(options: Mapping[str, Any]) -> str:
    said = {k: v for k, v in options.items() if v is not None and v is not False}
    return ", ".join(f"{k} {_value(v)}" for k, v in said.items())


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_value, value)) + ")"
    if hasattr(value, "item") and getattr(value, "numel", lambda: 2)() == 1:
        value = value.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plural(count: Any, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _bytes(count: int) -> str:
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)
