"""The recipe of a Trainer: from its argument `recipe`, or from `onefold` in its training arguments.

| given                                     | means                                              |
|-------------------------------------------|----------------------------------------------------|
| a `Recipe`                                | that recipe                                        |
| 3, "3"                                    | `Recipe.zero(stage=3)`                             |
| {"stage": 3, "frozen": "nf4"}             | `Recipe.zero(stage=3, frozen="nf4")`               |
| '{"stage": 3}', "recipe.json"             | the same, as text or in a file, for a command line |

`bf16=True` or `fp16=True` in the training arguments sets the recipe's precision, if the recipe does
not name one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from onefold import hosts
from onefold.reading import parse_json
from onefold.recipe import COMPUTE_DTYPES, Recipe

#: The name of the field of training arguments.
FIELD = "onefold"
_EXPECTED = (
    'a Recipe, a stage from 0 to 3, a dict such as {"stage": 3}, the same as JSON text, or the path'
    " of a .json file"
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' TrainingArguments with a field for the recipe.

    On a command line, write `--onefold 3`, `--onefold recipe.json` or
    `--onefold '{"stage": 3, "frozen": "nf4"}'`. Arguments of other classes (`SFTConfig`) take the
    recipe as an attribute: `args.onefold = 3`.
    """

    onefold: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Onefold's recipe: a stage, a JSON text, or the path of a JSON file."},
    )


def recipe_of(given: Any, args: Any) -> Recipe:
    """Return the recipe that a Trainer was given, as its argument or in its training arguments.

    Raises:
        ValueError: no recipe was given, or two were, or the value is not a recipe.
    """
    field_value = getattr(args, FIELD, None)
    if given is not None and field_value is not None:
        raise ValueError(
            f"the recipe was given twice: recipe={given!r} and args.{FIELD}={field_value!r}. Keep"
            " one of them."
        )
    if given is None and field_value is None:
        raise ValueError(
            "this Trainer was given no recipe: pass recipe=onefold.Recipe.zero(stage=3), or set"
            f" args.{FIELD} = 3."
        )
    name = "recipe" if given is not None else f"args.{FIELD}"
    return _read(name, given if given is not None else field_value)


def _read(name: str, value: Any) -> Recipe:
    shown = f"{name}={value!r}"
    if isinstance(value, str):
        try:
            value = parse_json(Path(value).read_text("utf-8") if value.endswith(".json") else value)
        except OSError as error:
            raise ValueError(f"{shown} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise ValueError(f"{shown} is no JSON ({error}): expected {_EXPECTED}.") from None
    if isinstance(value, Recipe):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Recipe.zero(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"{shown}: expected {_EXPECTED}.")
    if "stage" not in value:
        raise ValueError(f'{shown} names no stage: add "stage", as in {{"stage": 3}}.')
    return Recipe.zero(**value)


def in_precision(recipe: Recipe, asked: str) -> Recipe:
    """Return the recipe with the precision that the training arguments ask for.

    Args:
        asked: accelerate's name of the precision: "no", "bf16", "fp16" or "fp8".

    Raises:
        ValueError: the recipe names another precision, or this one is not supported here.
    """
    own = recipe.parameters.dtype
    if asked == "fp8":
        raise ValueError("fp8 is not supported by onefold.hf: set bf16=True or fp16=True.")
    if torch.float16 in (own, COMPUTE_DTYPES.get(asked)) and recipe.step_in_backward:
        raise ValueError(
            "fp16 skips steps whose gradients overflow, and the recipe steps behind the backward"
            " pass, before that is known: set bf16=True, or leave step_in_backward out."
        )
    return hosts.in_precision(recipe, COMPUTE_DTYPES.get(asked), f"{asked}=True")
