"""The commands of `onefold`; the short ones are here."""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from onefold.cli.checkpoint import app as checkpoint_app
from onefold.cli.doctor import doctor_command
from onefold.cli.options import Json, option, with_readable_help
from onefold.cli.plan import plan_command
from onefold.cli.show import answered, show
from onefold.cli.train import train_command

app = typer.Typer(
    name="onefold",
    help="Train PyTorch models with every byte of training state held once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.add_typer(checkpoint_app, name="checkpoint")
config_app = typer.Typer(no_args_is_help=True, help="Look into configurations of other libraries.")
app.add_typer(config_app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"onefold {version('onefold')}")
        except PackageNotFoundError:
            typer.echo("onefold (running from its source folder)")
        raise typer.Exit()


@app.callback()
def root(
    show: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Half of a character, as JSON may hold, can be written in no encoding
        sys.stdout.reconfigure(errors="backslashreplace")


@app.command("report")
@answered
def report_command(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.", show_default=False)],
    output: Annotated[Path | None, option("The file to write (default: RUN/report.html).")] = None,
    as_json: Json = False,
) -> int:
    """Write one HTML page about a run: loss, throughput, memory, traffic, timeline, predicted
    against measured. It opens offline.
    """
    from onefold.observe.report import write_report

    show(as_json, "report", {"report": str(write_report(run, output))})
    return 0


#: What can become of a key, in the order of the table.
OUTCOMES = ("served", "auto", "inert", "unknown", "refused")


@config_app.callback()
def _only_explain() -> None:
    """Look into configurations of other libraries."""


@config_app.command("explain")
@answered
def explain_command(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed JSON file.", show_default=False)],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Check the batch sizes for so many ranks."),
    ] = None,
    as_json: Json = False,
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


with_readable_help(app)
