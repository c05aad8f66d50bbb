"""`onefold train`: its options are the fields of `TrainConfig`, so that each is written, checked
and described once.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from onefold.train.config import TrainConfig, read_options
from onefold.train.errors import TrainError
from onefold.train.output import Claim, run_of
from onefold.train.process import end_with_parent

#: The option that opens each panel of the help, in the order of `TrainConfig`.
PANELS = {
    "model": "What is trained, on what",
    "stage": "How it is divided among the ranks",
    "group": "Between nodes, where links are slow",
    "offload_optimizer": "Where state rests",
    "micro_batch": "Batches and length",
    "lr": "Optimization",
    "activation_checkpointing": "Memory and speed of the computation",
    "save_every": "What the run survives",
    "max_restarts": "Starting again, on several machines",
    "eval_every": "What is measured and shown",
}


def train(**given: Any) -> None:
    """Train or fine-tune a language model over all the ranks this machine has.

    Without an option: SmolLM2-135M-Instruct on Python's reference text. Under torchrun, Slurm or
    any launcher that sets RANK, this process joins as one rank instead of starting its own.
    """
    config_file = given.pop("config_file")
    as_json = bool(given.get("json"))
    try:
        code = _train(given, config_file)
    except TrainError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # What holds here holds on the first rank of this machine, too: torchrun ends this one
            # when that has spoken
            time.sleep(1.0)
        if as_json:
            print(json.dumps({"event": "error", "kind": "TrainError", "message": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _train(given: dict[str, Any], config_file: Path | None) -> int:
    """See `onefold.train.early` for the order: what can be told without torch is told before torch
    is imported.
    """
    from onefold.train.early import check_batch, check_early
    from onefold.train.launch import from_slurm, joins, launch

    config = read_options(given, config_file)
    check_early(config)
    for name, value in from_slurm(os.environ).items():
        os.environ.setdefault(name, value)
    if not joins(os.environ):
        return launch(config)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun, and of no use without it
        end_with_parent()
    check_batch(config, int(os.environ["WORLD_SIZE"]))
    claim = (
        Claim.take(Path(config.output), run_of(config, os.environ))
        if config.output is not None
        else None
    )
    config.check_recipe()
    from onefold.train.worker import run_rank

    return run_rank(config, claim)


def _option(key: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """The command-line option of one field; None means that it was not given."""
    flag = key.replace("_", "-")
    kind: Any = _plain_type(field.annotation)
    if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("repeated"):
        kind = list[str]
    names = (
        [f"--{flag}/--no-{flag}"]
        if kind is bool and key not in ("json", "overwrite")
        else [f"--{flag}"]
    )
    default = field.default
    known = "" if default is None or isinstance(default, bool) else f" (default: {default})"
    option = typer.Option(
        *names, help=f"{field.description}{known}", show_default=False, rich_help_panel=panel
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _plain_type(annotation: Any) -> Any:
    """What the command line reads for a field: unions with None and tuples, which it has no form
    for, become plain types.
    """
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = kinds[0] if len(kinds) == 1 else str
    if typing.get_origin(annotation) is tuple:
        return str
    return (
        annotation
        if annotation in (bool, int, float, str) or typing.get_origin(annotation) is Literal
        else str
    )


def _with_options(function: Any) -> Any:
    """Give `function` the signature that typer reads."""
    config = inspect.Parameter(
        "config_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--config",
                help="YAML or TOML file with any of these options; the command line wins.",
                show_default=False,
            ),
        ],
    )
    parameters, panel = [config], ""
    for name, field in TrainConfig.model_fields.items():
        panel = PANELS.get(name, panel)
        parameters.append(_option(field.alias or name, field, panel))
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {p.name: p.annotation for p in parameters}
    return function


train_command = _with_options(train)
