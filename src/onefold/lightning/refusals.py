"""Refuse what does not work with a sharded module. Each message says what to write instead."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from onefold.recipe import Recipe
from onefold.runtime.hooks import engine_of, is_sharded

FORMS = ("folder", "file")


def recipe_given(recipe: Any, stage: Any, options: dict[str, Any]) -> Recipe:
    """Return the recipe of a strategy, from the arguments of its constructor.

    Raises:
        ValueError: neither a recipe nor a stage was given, or both were, or `recipe` is not a
            `Recipe`.
    """
    if isinstance(recipe, Recipe):
        extra = [f"stage={stage!r}"] if stage is not None else []
        extra += [f"{name}=" for name in options]
        if extra:
            raise ValueError(
                f"Strategy was given a recipe and {', '.join(extra)} besides: put all of it into the"
                " recipe."
            )
        return recipe
    if recipe is not None:
        raise ValueError(
            f"Strategy(recipe={recipe!r}): expected a Recipe such as onefold.Recipe.zero(stage=3);"
            " a stage alone is Strategy(stage=3)."
        )
    if stage is None:
        raise ValueError(
            "Strategy was given no recipe: write Strategy(stage=3), or"
            " Strategy(onefold.Recipe.zero(stage=3, ...))."
        )
    return Recipe.zero(stage, **options)


def check_form(form: Any) -> None:
    """Raise ValueError if `form` is not a form of checkpoints."""
    if form not in FORMS:
        raise ValueError(
            f'checkpoint={form!r}: expected "folder" (each rank writes its shards; the default) or'
            ' "file" (rank 0 writes one file, as under DDP).'
        )


def check_start(method: str) -> None:
    """Raise ValueError for a start method whose ranks could not bring their weights back."""
    if method != "popen":
        raise ValueError(
            f"start_method={method!r}: Lightning brings back one rank's weights from processes that"
            ' it forks or spawns, and each rank has a part. Use "popen" (the default), torchrun or'
            " Slurm."
        )


def check_trainer(trainer: Any, form: str, io: Any) -> None:
    """Raise ValueError for a callback or plugin that copies the module as if it were whole."""
    for callback in trainer.callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} copies the whole module on every rank and mixes it with"
                " this rank's parts. Average with onefold.ema.EMA in a callback of yours, as"
                " docs/lightning.md shows: it is sharded as the model is."
            )
    if form == "folder" and isinstance(io, AsyncCheckpointIO):
        raise ValueError(
            'AsyncCheckpointIO writes what one rank holds, and checkpoint="folder" has each rank'
            ' write its part. Leave the plugin out, or give Strategy(checkpoint="file").'
        )


def check_model(module: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError if the module is sharded by another recipe."""
    if is_sharded(module) and engine_of(module).recipe != recipe:
        raise ValueError(
            "this module is sharded by another recipe already. Give Trainer the strategy that it"
            " was sharded by, or a fresh module and ckpt_path= of a checkpoint, which loads at any"
            " stage."
        )


def bare_optimizers(optimizers: Any) -> list[Any]:
    """Return torch's optimizers without Lightning's wrappers."""
    return [o.optimizer if isinstance(o, LightningOptimizer) else o for o in optimizers]
