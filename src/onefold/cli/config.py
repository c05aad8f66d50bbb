"""`onefold config explain FILE`: what became of each key of a DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.show import answered, show

app = typer.Typer(no_args_is_help=True, help="Look into configurations of other libraries.")
#: What can become of a key, in the order of the table.
OUTCOMES = ("served", "auto", "inert", "unknown", "refused")


@app.callback()
def _only_explain() -> None:
    """Look into configurations of other libraries."""


@app.command("explain")
@answered
def explain_command(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed JSON file.", show_default=False)],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Check the batch sizes for so many ranks."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> int:
    """Say what became of each key: served, left open by "auto", inert (without meaning here), unknown,
    or refused. Exit status: 0 it can be trained with, 1 something is refused, 2 it cannot be read.
    """
    from onefold.deepspeed.meaning import explain

    found = explain(file, ranks)
    keys = sorted((asdict(key) for key in found.keys), key=lambda k: OUTCOMES.index(k["outcome"]))
    rest = {"refusal": found.refusal, "remarks": list(found.remarks)}
    show(as_json, "config", {"keys": keys, **rest})
    return int(found.refusal is not None or any(k["outcome"] == "refused" for k in keys))
