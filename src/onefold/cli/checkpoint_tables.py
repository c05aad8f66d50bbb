"""Checkpoints in words and tables, for people."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from onefold.checkpoint.diff import Difference, TensorDifference
from onefold.checkpoint.inspect import Listed, Summary, TensorSummary
from onefold.checkpoint.verify import Examination
from onefold.cli.tables import plain_table
from onefold.plan.tables import _print, count

#: Problems and differences shown; --json has them all.
MOST = 40
#: What else is compared in each part, beside its tensors.
VALUES = {
    "weights": "",
    "optimizer": "parameter groups, step counts",
    "rest": "step, scheduler, scaler, data position, extra",
    "random": "each rank's generators",
}


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, file=sys.stdout)


def show_list(root: Path, found: Sequence[Listed]) -> None:
    """A folder of checkpoints, and the end of those that are not whole."""
    out = _console()
    table = plain_table(
        f"checkpoints in {escape(str(root))}, the newest first",
        "name",
        " step",
        "saved",
        " ranks",
        " size",
        "",
    )
    for c in found:
        state = "[bold red]not whole[/bold red]" if c.wrong else "whole by names and sizes"
        table.add_row(
            escape(c.path.name),
            _or_dash(c.step),
            c.created or "–",
            _or_dash(c.ranks),
            _bytes(c.nbytes),
            state,
        )
    _print(out, table)
    for c in found:
        if c.wrong:
            out.print(f"{escape(c.path.name)}: {escape(c.wrong)}")
    out.print("[dim]onefold checkpoint verify reads every byte.[/dim]")


def show_summary(summary: Summary, tensors: Sequence[TensorSummary] | None) -> None:
    """All of a checkpoint; its tensors one by one if they are given."""
    out = _console()
    step = f"step {summary.step}" if summary.step is not None else "no step given"
    out.print(
        f"[bold]{escape(str(summary.path))}[/bold]: {summary.form}, {step},"
        f" {count(summary.parameters)} parameters"
    )
    by = summary.saved_by
    if by:
        where = f"on {_plural(by.get('world_size', '?'), 'rank')} at stage {by.get('stage', '?')}"
        versions = ", ".join(
            f"{name} {by[name]}" for name in ("onefold", "torch", "python") if name in by
        )
        cut = f"; resharded for {by['resharded_for']} ranks" if "resharded_for" in by else ""
        out.print(
            f"saved {summary.created or 'at an unknown time'} {where}, by {escape(versions)}{cut}"
        )
    table = plain_table("tensors", "kind", "state", "dtype", " tensors", " elements", " bytes")
    for s in summary.sorts:
        table.add_row(
            s.kind, escape(s.state), s.dtype, str(s.tensors), f"{s.elements:,}", _bytes(s.nbytes)
        )
    _print(out, table)
    if summary.groups:
        table = plain_table(
            "parameter groups", "optimizer", " group", " tensors", " elements", "options"
        )
        for g in summary.groups:
            number = f" {g.number}" if any(x.number for x in summary.groups) else ""
            table.add_row(
                escape(g.optimizer) + number,
                str(g.index),
                str(len(g.names)),
                f"{g.elements:,}",
                escape(_options(g.options)),
            )
        _print(out, table)
    if summary.resumes:
        table = plain_table("what resumes besides the weights", "", "")
        table.show_header = False
        for name, what in summary.resumes.items():
            table.add_row(name, escape(what))
        _print(out, table)
    table = plain_table("files", "name", " bytes")
    for name, nbytes in _shortened(summary.files):
        table.add_row(escape(name), _bytes(nbytes) if nbytes >= 0 else "")
    _print(out, table)
    if tensors is not None:
        table = plain_table(
            f"{len(tensors)} tensors",
            "name",
            "kind",
            "state",
            "dtype",
            "shape",
            " bytes",
            "in",
            "also called",
        )
        for t in tensors:
            files = f"{t.files[0]} to {t.files[-1]}" if len(t.files) > 1 else "".join(t.files)
            names = (
                t.item.name,
                t.item.kind,
                t.item.state,
                t.dtype,
                str(list(t.shape)),
                _bytes(t.nbytes),
                files,
                ", ".join(t.aliases),
            )
            table.add_row(*(escape(n) for n in names))
        _print(out, table)


def show_verdict(verdict: Examination, seconds: float) -> None:
    """Whole, or all that is not."""
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
    """Where the new folder is, and what is in it."""
    out = _console()
    out.print(
        f"wrote {escape(str(target))}: {_plural(len(files), 'file')}, {_bytes(nbytes)} in"
        f" {seconds:.1f} s"
    )


def show_difference(
    found: Difference, made: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> None:
    """Each part's verdict, then every difference."""
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
        table = plain_table(
            "tensors that differ",
            "name",
            "kind",
            "what",
            " elements",
            " of",
            " largest",
            " relative",
            " at",
            "first",
            "second",
        )
        for d in found.tensors[:MOST]:
            kind = f"{d.item.kind} {d.item.state}".strip()
            table.add_row(
                *(escape(x) for x in (d.item.name, kind, d.what, *_figures(d), d.first, d.second))
            )
        _print(out, table)
    if found.values:
        table = plain_table("values that differ", "part", "where", "first", "second")
        for v in found.values[:MOST]:
            table.add_row(v.part, escape(v.where), escape(str(v.first)), escape(str(v.second)))
        _print(out, table)
    left = max(0, len(found.tensors) - MOST) + max(0, len(found.values) - MOST)
    if left:
        out.print(f"and {left} more; --json lists all")
    out.print(
        "[bold]they differ[/bold]"
        if not found.equal
        else f"[bold]the same[/bold] ({_bytes(found.nbytes)} of tensors compared)"
    )


def _figures(d: TensorDifference) -> tuple[str, ...]:
    if d.what != "values":
        return ("", f"{d.of:,}" if d.of else "", "", "", "")
    bits = d.largest == 0  # such as 0.0 and -0.0
    largest = "nan" if math.isnan(d.largest) else "bits only" if bits else f"{d.largest:.3g}"
    return (
        f"{d.differing:,}",
        f"{d.of:,}",
        largest,
        "" if bits else f"{d.relative:.2g}",
        f"{d.at:,}",
    )


def _shortened(files: Mapping[str, int], most: int = 24) -> list[tuple[str, int]]:
    """All of a few files; of very many the first and the last."""
    listed = list(files.items())
    if len(listed) <= most:
        return listed
    half = most // 2
    between = listed[half:-half]
    return [
        *listed[:half],
        (f"... {len(between)} more, {_bytes(sum(n for _, n in between))}", -1),
        *listed[-half:],
    ]


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
