"""Just the recipe of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.integrations.deepspeed.config.auto import OF_RECIPES, refuse_auto
from onefold.integrations.deepspeed.config.reader import read_deepspeed
from onefold.recipe import Recipe


def recipe_from(config: Mapping[str, Any] | str, world_size: int | None = None) -> Recipe:
    """The recipe that a DeepSpeed configuration (a dict or the path of its JSON file) asks for.

    `notes` lists the keys that have no effect here. Batch sizes are checked against `world_size` if
    it is given.

    Raises:
        ValueError: the configuration contradicts itself, or says "auto" where it decides the
            recipe. NotImplementedError: it asks for what is not built.
    """
    read = read_deepspeed(config, world_size)
    refuse_auto(
        [path for path in read.undecided() if path.startswith(("zero_optimization.", *OF_RECIPES))]
    )
    return Recipe.zero(**read.recipe_arguments).replace(notes=tuple(read.recipe_notes))
