"""LLaMA-Factory's v1 trainer on Onefold: call `register()` before its trainer is made.

import onefold.integrations.llamafactory as ours
ours.register()                                  # once, before llamafactory's launcher
# the YAML: dist_config: {name: fsdp2, stage: 3}

LLaMA-Factory saves and resumes through a plugin only under the names `fsdp2` and `deepspeed`, so
Onefold takes the name `fsdp2`. The other keys of `dist_config` are options of `Recipe.zero`.

This module imports llamafactory. No other part of Onefold imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin
from torch import nn

import onefold
from onefold.integrations.computing import computing_in
from onefold.recipe import Recipe

NAME = "fsdp2"
_FOLDER = "onefold"


def register() -> None:
    """Serve LLaMA-Factory's `dist_config: {name: fsdp2}` in this process."""
    DistributedPlugin(NAME).register()(shard)
    DistributedPlugin(NAME).register("save_model")(save_model)
    DistributedPlugin(NAME).register("save_checkpoint")(save_checkpoint)
    DistributedPlugin(NAME).register("load_checkpoint")(load_checkpoint)


def shard(model: nn.Module, dist_config: Any, bf16: bool = False, **_: Any) -> nn.Module:
    """Shard the model by the recipe in `dist_config`. Collective.

    Raises:
        ValueError: there is no stage, or the options are not those of a recipe.
    """
    options = {key: value for key, value in dict(dist_config).items() if key != "name"}
    if "stage" not in options:
        raise ValueError(
            f"dist_config={dict(dist_config)!r} names no stage of Onefold, which serves the name"
            f" {NAME!r} here: write dist_config: {{name: {NAME}, stage: 3}}."
        )
    recipe = Recipe.zero(**options)
    if bf16 and recipe.compute_dtype is None:
        recipe = computing_in(recipe, torch.bfloat16)
    return onefold.shard(model, recipe)


def save_model(model: nn.Module, output_dir: str, processor: Any) -> None:
    """Write a folder that `from_pretrained` opens. Each rank writes its part. Collective."""
    into = Path(output_dir)
    onefold.export(model, into / "model", tokenizer=processor)


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, ckpt_dir: str, **kwargs: Any
) -> None:
    """Save a checkpoint, and on request a folder that `from_pretrained` opens. Collective."""
    into = Path(ckpt_dir)
    onefold.save(into / _FOLDER, model=model, optimizer=optimizer, overwrite=True)
    if kwargs.get("save_ckpt_as_hf"):
        onefold.export(model, into / "hf_model", tokenizer=kwargs.get("processor"))


def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, ckpt_dir: str, **_: Any
) -> None:
    """Load a checkpoint, on any number of ranks and at any stage. Collective."""
    onefold.load(Path(ckpt_dir) / _FOLDER, model=model, optimizer=optimizer, rng=False)
