"""`onefold train`. Its options are the fields of `TrainConfig`, so each is declared, checked and
described once.
"""

from __future__ import annotations

import inspect
import os
import time
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic.fields import FieldInfo

from onefold.cli.options import option, parameter, recipe_parameter, refuse, with_parameters
from onefold.processes.signals import end_with_parent
from onefold.recipe.core import DIVISION
from onefold.train.config import OPTIONS, TrainConfig, read_options
from onefold.wording import TrainError

#: {first field of a panel: title of the panel in the help}, in the order of `TrainConfig`. The
#: recipe's options come before `micro_batch`, in the panels of their own table.
PANELS = {
    "model": "What is trained, on what",
    "lora": "Adapters instead of the whole model",
    "stage": DIVISION,
    "micro_batch": "Batches and length",
    "lr": "Optimization",
    "tp": "Other axes than data",
    "activation_checkpointing": "Memory and speed of the computation",
    "save_every": "What the run survives",
    "eval_every": "What is measured and shown",
}


def train(
    config_file: Annotated[
        Path | None,
        option(
            "YAML or TOML file with any of these options; the command line wins.", None, "--config"
        ),
    ] = None,
    **given: Any,
) -> None:
    """Train or fine-tune a language model over all the ranks this machine has.

    Without an option: SmolLM2-135M-Instruct on Python's reference text. Under torchrun, Slurm or
    any launcher that sets RANK, this process joins as one rank instead of starting its own.

    A switch of a configuration file is taken back by its `--no-` form, such as --no-compile.
    """
    try:
        code = _train(given, config_file)
    except TrainError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first rank of this machine raises the same error. Wait, so that it reports the
            # error first and torchrun then ends this rank
            time.sleep(1.0)
        refuse(error, bool(given.get("json")), kind="TrainError")
    raise typer.Exit(code)


def _train(given: dict[str, Any], config_file: Path | None) -> int:
    """Check the options, and launch the run or join it as a rank. Checks that need no torch come
    before torch is imported.
    """
    from onefold.processes.host import from_slurm, joins
    from onefold.train.launch import check_early, launch

    config = read_options(given, config_file)
    check_early(config)
    for name, value in from_slurm(os.environ).items():
        os.environ.setdefault(name, value)
    if not joins(os.environ):
        return launch(config)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun: end if torchrun ends
        end_with_parent()
    config.check(int(os.environ["WORLD_SIZE"]))
    from onefold.train.worker import run_rank

    return run_rank(config)


def _parameter(key: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Make the option of a field of `TrainConfig` that is not one of the recipe's options. Numbers are
    read by `TrainConfig`, in the same words as those of a file.
    """
    kind: Any = field.annotation
    if kind is not bool and typing.get_origin(kind) is not Literal:
        kind = str
    text = " ".join((field.description or "").split())
    return parameter(key, kind, text, panel, field.default, key not in ("json", "overwrite"))


def _parameters() -> list[inspect.Parameter]:
    found, panel = [], ""
    for name, field in TrainConfig.model_fields.items():
        if name in OPTIONS:
            continue
        if name == "micro_batch":
            found += [recipe_parameter(row) for row in OPTIONS.values()]
        panel = PANELS.get(name, panel)
        found.append(_parameter(field.alias or name, field, panel))
    return found


train_command = with_parameters(train, _parameters())
