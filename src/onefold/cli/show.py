"""What the commands share to answer: a mapping of titles to rows becomes tables or JSON, an error a
sentence and an exit status.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import typer

from onefold.cli.options import refuse
from onefold.wording import few, in_words, readable

#: The most rows of a table that people see; --json has them all.
MOST = 40


def show(as_json: bool, event: str, found: Mapping[str, Any]) -> None:
    """Print {title: a value, or rows of a table} for people, or as one JSON object."""
    if as_json:
        from pydantic_core import to_jsonable_python

        said = to_jsonable_python(dict(found), inf_nan_mode="strings", fallback=str)
        print(json.dumps({"event": event, **said}))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # As wide as it needs in a file: nothing is cut off
    width = None if sys.stdout.isatty() else 1000
    out = Console(highlight=False, soft_wrap=True, width=width)
    for title, rows in found.items():
        if isinstance(rows, Mapping):
            rows = [{"what": name, "is": _text(name, value)} for name, value in rows.items()]
        if rows in (None, "", []):
            continue
        if not isinstance(rows, list) or not isinstance(rows[0], Mapping):
            out.print(f"[bold]{escape(title)}[/bold] {escape(_text(title, rows))}")
            continue
        columns = dict.fromkeys(name for row in rows for name in row)
        table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2))
        for row in rows[:MOST]:
            table.add_row(*(escape(_text(name, row.get(name))) for name in columns))
        out.print(table)
        if len(rows) > MOST:
            out.print(f"and {len(rows) - MOST} more; --json lists all")


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(k, v)}" for k, v in value.items() if v not in (None, False))
    if isinstance(value, list | tuple):
        return few((_text(name, one) for one in value), MOST) or "none"
    if name in ("bytes", "total", "free"):
        return readable(value)
    form = ".6g" if isinstance(value, float) else "," * (name in ("elements", "parameters"))
    return format(value, form) if form else str(value)


def answered(command: Callable[..., int]) -> Callable[..., None]:
    """Make a command of a function that returns the exit status. An error that the user can mend is
    told in a sentence, with status 2. A signal ends it with status 128 + its number, and it leaves no files.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        import torch  # noqa: F401, before Ctrl-C becomes an exception

        from onefold.processes.signals import interruptible

        as_json = given["as_json"]
        try:
            with interruptible():
                status = command(**given)
        except KeyboardInterrupt as stop:
            (number,) = stop.args
            text = f"stopped by {signal.Signals(number).name}; nothing was written."
            refuse(text, as_json, 128 + number, "Stopped")
        except (ValueError, OSError) as error:
            text = f"{in_words(error)}." if isinstance(error, OSError) else str(error)
            refuse(text, as_json, kind=type(error).__name__)
        raise typer.Exit(status)

    return run


def busy(text: str, as_json: bool) -> AbstractContextManager[object]:
    """Say in a terminal what is being done, as long as the block runs."""
    from rich.console import Console

    return Console(stderr=True, quiet=as_json).status(text)
