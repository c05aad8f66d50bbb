"""`onefold report RUN`: the run in a folder as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.options import option, refuse


def report_command(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.", show_default=False)],
    output: Annotated[Path | None, option("The file to write (default: RUN/report.html).")] = None,
    as_json: Annotated[
        bool, option("Say in JSON what was written, and what the run left out.", None, "--json")
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
        refuse(error, as_json)
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
