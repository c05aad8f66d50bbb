"""Save and load a Trainer's checkpoint: a folder of `onefold.save`, with `lightning.pt`, which has
what Lightning's file has besides weights and optimizer states: loops, callbacks, schedules,
hyperparameters. It resumes at any stage and on any number of ranks.

A strategy also loads a file that Lightning wrote under DDP.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold
from onefold.checkpoint.manifest import MANIFEST

LIGHTNING = "lightning.pt"
STATES = "optimizer_states"


class InFolder(dict[str, Any]):
    """An empty state dict, in place of one that is stored in a folder's shards."""


class _Beside:
    """Writes `lightning.pt` beside the shards. `onefold.save` calls it as it calls a tokenizer."""

    def __init__(self, rest: dict[str, Any]) -> None:
        self._rest = rest

    def save_pretrained(self, folder: str) -> None:
        torch.save(self._rest, os.path.join(folder, LIGHTNING))


def is_folder(path: str | Path) -> bool:
    return (Path(path) / MANIFEST).is_file()


def save_folder(
    path: str, checkpoint: dict[str, Any], module: nn.Module, optimizers: list[Any]
) -> None:
    """Write the shards, and the rest of the Trainer's `checkpoint` beside them. Collective.

    Raises:
        ValueError: `on_save_checkpoint` has changed the state dict, or the path is not in a file
            system.
    """
    if "://" in path:
        raise ValueError(
            f"{path!r}: every rank writes its part of a checkpoint folder into a file system that"
            " all of them see: give a path."
        )
    rest = dict(checkpoint)
    weights = rest.pop("state_dict", None)
    states = rest.get(STATES)
    if not isinstance(weights, InFolder) or weights or any(states or ()):
        raise ValueError(
            "checkpoint['state_dict'] or checkpoint['optimizer_states'] was changed by"
            " on_save_checkpoint(). Each rank writes its part and nobody has them whole: leave them"
            " as they are; onefold.full_state_dict(module) makes one dict."
        )
    if states is not None:
        rest[STATES] = []  # says that the shards include optimizer states
    onefold.save(
        path,
        model=module,
        optimizer=optimizers if states is not None else None,
        step=int(checkpoint["global_step"]),
        tokenizer=_Beside(rest),
        overwrite=True,
    )


def load_folder(
    path: str, rest: dict[str, Any], module: nn.Module, optimizers: list[Any], strict: bool
) -> dict[str, Any]:
    """Load the shards into the module, and into the optimizers if the folder has their states.
    Collective.

    Args:
        rest: the contents of `lightning.pt`.
        optimizers: empty if the Trainer only evaluates.

    Returns:
        `rest` as Lightning expects it.
    """
    wanted = optimizers if optimizers and STATES in rest else None
    onefold.load(path, model=module, optimizer=wanted, strict=strict, rng=bool(wanted))
    return {**rest, "state_dict": InFolder()}


def rest_of(path: str) -> str:
    """Return the path of `lightning.pt`.

    Raises:
        ValueError: the folder was not saved by a Trainer.
    """
    file = os.path.join(path, LIGHTNING)
    if not os.path.isfile(file):
        raise ValueError(
            f"{path} has no {LIGHTNING}: it was saved by onefold.save, not by a Trainer. Start the"
            " fit without ckpt_path=, and call onefold.load(path, model=self) in on_fit_start()."
        )
    return file
