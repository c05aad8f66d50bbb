"""`onefold accelerate launch ...`: accelerate's launcher where scripts ask for DeepSpeed."""

from __future__ import annotations

import typer

from onefold.cli.options import refuse

app = typer.Typer(no_args_is_help=True, help="accelerate's launcher, with Onefold as DeepSpeed.")


@app.callback()
def _only_launch() -> None:
    """accelerate's launcher, with Onefold as DeepSpeed."""


@app.command(
    "launch",
    # Every option is accelerate's, --help among them
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    },
)
def launch_command(context: typer.Context) -> None:
    """What `accelerate launch` with the same options starts, with Onefold under the name
    deepspeed.
    """
    from onefold.integrations.deepspeed.accelerate_launch import launch

    try:
        launch(context.args)
    except ValueError as error:
        refuse(error, False)
