"""`onefold config explain FILE`: what became of each key of a DeepSpeed configuration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.options import refuse

app = typer.Typer(no_args_is_help=True, help="Look into configurations of other libraries.")
_TITLES = {
    "served": "served",
    "auto": "left open",
    "inert": "without meaning here",
    "unknown": "unknown",
    "refused": "refused",
}


@app.callback()
def _only_explain() -> None:
    """Look into configurations of other libraries."""


@app.command("explain")
def explain_command(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed JSON file.", show_default=False)],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Check the batch sizes for so many ranks."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Say what became of each key: served, left open by "auto", without meaning here, unknown, or
    refused. Exit status: 0 it can be trained with, 1 something is refused, 2 it cannot be read.
    """
    from onefold.deepspeed.meaning import explain

    try:
        found = explain(file, ranks)
    except (ValueError, OSError) as error:
        refuse(error, as_json)
    refused = found.refusal is not None or any(key.outcome == "refused" for key in found.keys)
    if as_json:
        print(json.dumps({"event": "config", **asdict(found)}, default=str))
        raise typer.Exit(1 if refused else 0)
    for outcome, title in _TITLES.items():
        rows = [key for key in found.keys if key.outcome == outcome]
        if not rows:
            continue
        typer.echo(f"{title}:")
        for key in rows:
            value = json.dumps(key.value, default=str)
            value = value if len(value) <= 40 else f"{value[:37]}..."
            typer.echo(f"  {key.path} = {value}{f': {key.why}' if key.why else ''}")
    told = {key.why for key in found.keys}
    if found.refusal is not None and found.refusal not in told:
        typer.echo(f"the file as a whole is refused:\n  {found.refusal}")
    for remark in found.remarks:
        typer.echo(f"note: {remark}")
    raise typer.Exit(1 if refused else 0)
