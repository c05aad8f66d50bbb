"""What Trainer writes and reads, for a sharded model.

    output_dir/checkpoint-300/
        model.safetensors, config.json, ...     as save_pretrained writes them: from_pretrained opens the folder
        adapter_model.safetensors, ...          instead of it, for adapters of peft
        onefold/                                masters and optimizer states: load at any stage, on any number of ranks
        scheduler.pt, trainer_state.json, rng_state_0.pth, training_args.bin         Trainer's own

No rank holds the model whole: each writes and reads its intervals. Weights are written in the dtype
that the model was loaded in.
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
from onefold.pretrained.huggingface import recognizes

#: The folder of training state in a checkpoint of Trainer's.
STATE = "onefold"
#: Where weights are written before they are moved to their place.
_ASIDE = ".onefold-unfinished"
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model.*\.bin"
)


def save_weights(model: nn.Module, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write the model, or its adapters, into a folder that may hold other things. Collective.

    Weights that were there are replaced once the new ones are whole. Other adapters than "default"
    get a folder of their names, as peft has it.

    Raises:
        CheckpointError: on every rank.
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
    """Write masters, optimizer states and all that a run goes on from. Collective.

    Frozen parameters are left out where the checkpoint is one of adapters.
    """
    frozen = not getattr(model, "peft_config", None)
    path = Path(folder) / STATE
    onefold.save(path, model=model, optimizer=optimizer, step=step, overwrite=True, frozen=frozen)


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read what `save_weights` (or Trainer itself) has written into the sharded model, from the
    masters beside it where there are some. Collective.

    Raises:
        ValueError: there are no weights in it.
        CheckpointError: on every rank: they are of another model.
    """
    path = Path(folder)
    refuse_empty(path)
    adapters = list(getattr(model, "peft_config", None) or ())
    if has_state(path):
        load_state(model, None, path)
    elif adapters:
        for name in adapters:
            onefold.load_adapters(model, path if name == "default" else path / name, name)
    else:
        onefold.load_pretrained(model, path)


def load_state(model: nn.Module, optimizer: Any, folder: str | os.PathLike[str]) -> None:
    """Read what `save_state` has written. Collective.

    Raises:
        CheckpointError: on every rank: it is of another model.
        ValueError: the model has trained parameters that it lacks.
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
    """Whether a checkpoint of Trainer's has what `save_state` writes."""
    return (Path(folder) / STATE / MANIFEST).is_file()


def refuse_empty(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError if there are no weights in a folder."""
    path = Path(folder)
    inside = path.iterdir() if path.is_dir() else ()
    found = (recognizes(p) or (p / "adapter_model.safetensors").is_file() for p in inside)
    if not (has_state(path) or recognizes(path) or any(found)):
        raise ValueError(
            f"there is no checkpoint in {path}: expected model.safetensors,"
            f" adapter_model.safetensors, or a folder {STATE!r} that onefold.hf has saved."
        )


def _dtype(model: nn.Module) -> torch.dtype | str | None:
    """What the model was loaded in; where its parameters differ, what they are stepped in."""
    declared = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(declared) == 1:
        return declared.pop()
    return None if onefold.engine_of(model).recipe.compute_dtype is None else "master"


def _move_into(made: Path, target: Path) -> None:
    """All files of a folder into another, in place of the weights there."""
    target.mkdir(exist_ok=True)
    new = {file.name for file in made.iterdir()}
    for file in sorted(made.iterdir()):
        os.replace(file, target / file.name)
    for file in sorted(target.iterdir()):
        if file.name not in new and file.is_file() and _WEIGHTS.fullmatch(file.name):
            file.unlink()
    made.rmdir()
