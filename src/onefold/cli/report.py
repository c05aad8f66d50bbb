"""`onefold report RUN`: the run in a folder as one HTML page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="The file to write (default: RUN/report.html).", show_default=False),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Say in JSON what was written, and what the run left out."),
    ] = False,
) -> None:
    """Write one HTML page about a run: loss, throughput, memory, traffic, timeline, predicted
    against measured. It opens offline.
    """
    from onefold.observe.report import build, save
    from onefold.observe.runfile import RunFileError

    try:
        report = build(run)
        path = save(report, output or run / "report.html")
    except (RunFileError, ModuleNotFoundError, OSError) as error:
        if as_json:
            print(
                json.dumps({"event": "error", "kind": type(error).__name__, "message": str(error)})
            )
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        figures = [asdict(tile) for tile in report.tiles]
        print(
            json.dumps(
                {
                    "event": "report",
                    "report": str(path),
                    "figures": figures,
                    "missing": report.missing,
                }
            )
        )
        return
    typer.echo(f"wrote {path}")
    for section, why in report.missing.items():
        typer.echo(f"  without {section}: {why}")
