"""What a recipe's values may be, and which of them change nothing: sentences only, no table of the
recipe's own.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from onefold.recipe.groups import without_codec
from onefold.recipe.moments import FORMATS
from onefold.recipe.tiers import without_tiers

if TYPE_CHECKING:
    from onefold.recipe.core import Recipe

_SWITCHES = (
    "reshard_after_forward",
    "overlap",
    "cast_inputs",
    "step_in_backward",
    "stochastic_rounding",
)


def check_units(units: Any) -> None:
    """Raise ValueError unless `units` is None, or a list or tuple of module names and classes."""
    if units is None:
        return
    if isinstance(units, (str, type)):
        raise ValueError(
            f"units={units!r}: expected a list of module names or classes, such as [{units!r}]."
        )
    if not isinstance(units, (list, tuple)):  # a set has no order, and the ranks must agree on one
        raise ValueError(
            f"units={units!r}: expected a list or tuple of module names or classes, in the same"
            " order on every rank."
        )
    wrong = [unit for unit in units if not isinstance(unit, (str, type))]
    if wrong:
        raise ValueError(
            f"units={units!r}: expected module names or classes, and {wrong[0]!r} is neither."
        )


def check_options(recipe: Recipe) -> None:
    """Raise ValueError for the first field beside the rows that has a value it cannot have."""
    for name in ("prefetch", "in_flight"):
        value = getattr(recipe, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name}={value!r}: expected a whole number of units, 0 or more.")
    for name in _SWITCHES:
        if not isinstance(getattr(recipe, name), bool):
            raise ValueError(f"{name}={getattr(recipe, name)!r}: expected True or False.")
    if not (isinstance(recipe.sync_buffers, bool) or recipe.sync_buffers == "norms"):
        raise ValueError(
            f"sync_buffers={recipe.sync_buffers!r}: expected True (all, as DDP), 'norms' (running"
            " statistics) or False."
        )
    if not (recipe.elementwise_optimizer is None or isinstance(recipe.elementwise_optimizer, bool)):
        raise ValueError(
            f"elementwise_optimizer={recipe.elementwise_optimizer!r}: expected True, or None or"
            " False to try the optimizer."
        )
    if recipe.moments is not None and not (
        isinstance(recipe.moments, str) and recipe.moments in FORMATS
    ):
        raise ValueError(
            f"moments={recipe.moments!r}: expected one of {', '.join(map(repr, FORMATS))}, or None."
        )
    if not isinstance(recipe.rounding_seed, int) or isinstance(recipe.rounding_seed, bool):
        raise ValueError(f"rounding_seed={recipe.rounding_seed!r}: expected a whole number.")
    check_units(recipe.units)
    seconds = recipe.stall_timeout
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < math.inf
    ):
        raise ValueError(f"stall_timeout={seconds!r}: expected a finite number of seconds above 0.")


def check_dtype(name: str, dtype: Any, optional: bool = False) -> None:
    """Raise ValueError unless `dtype` is a floating-point one (or None, if that is an option)."""
    if not (dtype is None and optional) and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise ValueError(
            f"{name}={dtype!r}: expected a floating-point"
            f" torch.dtype{' or None' if optional else ''}."
        )


def without_effect(recipe: Recipe, given: Mapping[str, Any]) -> list[str]:
    """A sentence for each option of `given` that changes nothing in this recipe, so that nothing is
    silently ignored.
    """
    sharded = recipe.parameters.placement.value == "sharded"
    said = {}
    if not sharded:
        what = (
            "with parameters that are replicated"
            if recipe.stage is None
            else f"at stage {recipe.stage}"
        )
        for name in ("prefetch", "reshard_after_forward"):
            if name in given:
                said[name] = f"{what}: it is about gathering sharded parameters (stage 3)"
    if not recipe.overlap:
        for name in ("prefetch", "in_flight"):
            if given.get(name):
                said.setdefault(name, "under overlap=False")
    if "cast_inputs" in given and recipe.parameters.dtype is None:
        said["cast_inputs"] = (
            "with precision=None: the model computes as it is and inputs stay as they come. Name a"
            " precision to cast"
        )
    elif given.get("cast_inputs") is False and recipe.parameters.dtype == torch.float32:
        said["cast_inputs"] = "in fp32: inputs are cast in the 16-bit precisions only"
    if (
        given.get("elementwise_optimizer") is not None
        and recipe.optimizer.placement.value == "replicated"
    ):
        said["elementwise_optimizer"] = (
            "where optimizer states are replicated (stage 0): every optimizer sees whole parameters"
        )
    if (
        given.get("stochastic_rounding")
        and recipe.moments != "bf16"
        and recipe.optimizer.dtype != torch.bfloat16
    ):
        said["stochastic_rounding"] = (
            "where nothing is rounded to bf16: give moments='bf16' or master_dtype=torch.bfloat16"
        )
    if given.get("rounding_seed") and not recipe.stochastic_rounding:
        said["rounding_seed"] = "without stochastic_rounding=True"
    said |= without_tiers(recipe, given) | without_codec(recipe, given)
    return [f"{name}={given[name]!r} has no effect {why}." for name, why in said.items()]


def did_you_mean(given: str, known: Collection[str]) -> str:
    """The known name that is nearest to `given`, as a question; all of them if none is near."""
    near = difflib.get_close_matches(given, sorted(known), 1)
    return f"Did you mean {near[0]!r}?" if near else f"Known options: {', '.join(sorted(known))}."
