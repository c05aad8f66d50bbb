"""The commands of `onefold`."""

from __future__ import annotations

import io
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from onefold.cli.checkpoint import app as checkpoint_app
from onefold.cli.config import app as config_app
from onefold.cli.doctor import doctor_command
from onefold.cli.options import with_readable_help
from onefold.cli.plan import plan_command
from onefold.cli.report import report_command
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
app.command("report")(report_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")
with_readable_help(app)


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
