"""`onefold report RUN`: the run in a folder as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.options import option, refuse


def report_command(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.", show_default=False)],
    output: Annotated[Path | None, option("The file to write (default: RUN/report.html).")] = None,
    as_json: Annotated[bool, option("Say in JSON what was written.", None, "--json")] = False,
) -> None:
    """Write one HTML page about a run: loss, throughput, memory, traffic, timeline, predicted
    against measured. It opens offline.
    """
    from onefold.observe.report import write_report
    from onefold.observe.runfile import RunFileError

    try:
        path = write_report(run, output)
    except ModuleNotFoundError as error:
        refuse(f"{error}: pip install 'onefold[report]'", as_json)
    except (RunFileError, OSError) as error:
        refuse(error, as_json)
    print(json.dumps({"event": "report", "report": str(path)}) if as_json else f"wrote {path}")
