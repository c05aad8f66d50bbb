"""Write and read Trainer's checkpoints for a sharded model.

    output_dir/checkpoint-300/
        model.safetensors, config.json, ...     as save_pretrained writes them: from_pretrained opens the folder
        adapter_model.safetensors, ...          in place of model.safetensors, for peft's adapters
        onefold/                                masters and optimizer states: load at any stage, on any number of ranks
        scheduler.pt, trainer_state.json, rng_state_0.pth, training_args.bin         Trainer's own files

No rank holds the whole model: the first one writes it tensor by tensor, and each rank writes its
part of the training state. Weights are written in the dtype in which the model was loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.together import Together
from onefold.pretrained.adapters import embedding_layers
from onefold.pretrained.huggingface import recognizes

#: The folder of training state in one of Trainer's checkpoints.
STATE = "onefold"
#: The folder in which weights are written before they are moved to their place.
_ASIDE = ".onefold-unfinished"
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model.*\.bin"
)


def save_weights(model: nn.Module, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write the model, or its adapters, into a folder that may have other files. Collective.

    Existing weights are replaced once the new ones are complete. As in peft, adapters other than
    "default" get a folder of their name.

    Raises:
        CheckpointError: the weights could not be written; raised on every rank.
    """
    target, together = Path(folder), Together.of(onefold.engine_of(model))
    with together.each_rank():
        if together.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target / _ASIDE, ignore_errors=True)
    adapters = list(getattr(model, "peft_config", None) or ())
    if adapters:
        for name in adapters:
            onefold.save_adapters(model, target / _ASIDE / name, name)
    else:
        onefold.export(model, target / _ASIDE / "default", _dtype(model), tokenizer=tokenizer)
    with together.each_rank():
        if together.rank == 0:
            for made in sorted((target / _ASIDE).iterdir()):
                _move_into(made, target if made.name == "default" else target / made.name)
            (target / _ASIDE).rmdir()


def save_state(model: nn.Module, optimizer: Any, folder: str | os.PathLike[str], step: int) -> None:
    """Write master weights, optimizer states and what else a run resumes from. Collective.

    Frozen parameters are left out if the model has peft's adapters, except for embedding layers
    that peft writes beside these.
    """
    frozen = embedding_layers(model) if getattr(model, "peft_config", None) else True
    path = Path(folder) / STATE
    onefold.save(path, model=model, optimizer=optimizer, step=step, overwrite=True, frozen=frozen)


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load the weights of one of Trainer's checkpoints into the sharded model. Collective.

    They are read from the master weights of `save_state` if it has written some, else from the
    files of `save_weights` or of Trainer itself.

    Raises:
        ValueError: the folder has no weights.
        CheckpointError: the weights are of another model; raised on every rank.
    """
    path = Path(folder)
    refuse_empty(path)
    if has_state(path):
        load_state(model, None, path)
        return
    adapters = list(getattr(model, "peft_config", None) or ())
    for name in adapters:
        onefold.load_adapters(model, path if name == "default" else path / name, name)
    if not adapters:
        onefold.load_pretrained(model, path)


def load_state(model: nn.Module, optimizer: Any, folder: str | os.PathLike[str]) -> None:
    """Load what `save_state` has written. Collective.

    Raises:
        CheckpointError: the state is of another model; raised on every rank.
        ValueError: the state lacks parameters that the model trains.
    """
    path = Path(folder) / STATE
    strict = not getattr(model, "peft_config", None)
    loaded = onefold.load(path, model=model, optimizer=optimizer, strict=strict, rng=False)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    lacking = sorted(trained.intersection(loaded.missing))
    if lacking:
        raise ValueError(
            f"{path} is of another model: it has nothing for {len(lacking)} trained parameters"
            f" ({', '.join(lacking[:5])})."
        )


def has_state(folder: str | os.PathLike[str]) -> bool:
    """Whether one of Trainer's checkpoints has what `save_state` writes."""
    return (Path(folder) / STATE / MANIFEST).is_file()


def refuse_empty(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if a folder has no weights."""
    path = Path(folder)
    inside = path.iterdir() if path.is_dir() else ()
    found = (recognizes(p) or (p / "adapter_model.safetensors").is_file() for p in inside)
    if not (has_state(path) or recognizes(path) or any(found)):
        raise ValueError(
            f"there is no checkpoint in {path}: expected model.safetensors,"
            f" adapter_model.safetensors, or a folder {STATE!r} that onefold.hf has saved."
        )


def _dtype(model: nn.Module) -> torch.dtype | str | None:
    """Return the dtype in which to export weights: that in which the model was loaded.

    If its parameters have several dtypes, the master weights' dtype is used under a recipe with a
    compute dtype, and each parameter's own dtype otherwise.
    """
    declared = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(declared) == 1:
        return declared.pop()
    return None if onefold.engine_of(model).recipe.parameters.dtype is None else "master"


def _move_into(made: Path, target: Path) -> None:
    """Move all files of a folder into another, where they replace the weights."""
    target.mkdir(exist_ok=True)
    new = {file.name for file in made.iterdir()}
    for file in sorted(made.iterdir()):
        os.replace(file, target / file.name)
    for file in sorted(target.iterdir()):
        if file.name not in new and file.is_file() and _WEIGHTS.fullmatch(file.name):
            file.unlink()
    made.rmdir()
