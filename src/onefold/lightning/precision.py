"""Which recipe the Trainer's `precision=` means.

| precision                | parameters compute in              | under          | the optimizer steps |
|--------------------------|------------------------------------|----------------|---------------------|
| "32-true" (default)      | the recipe's precision             |                | fp32                |
| "bf16-mixed", "16-mixed" | their own dtype, as under DDP      | torch.autocast | fp32                |
| "bf16-true"              | bf16: the recipe's precision       |                | fp32 masters        |
| "64-true"                | fp64                               |                | fp64                |
| others                   | refused                            |                |                     |
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from onefold.hosts import computing_in
from onefold.recipe import Recipe


def in_precision(recipe: Recipe, plugin: Any) -> Recipe:
    """Return the recipe with the precision that the Trainer asks for.

    Args:
        plugin: Lightning's precision plugin, which the Trainer makes from `precision=`.

    Raises:
        ValueError: the recipe names another precision, or this one is not supported here.
    """
    asked, own = f"precision={plugin.precision!r}", recipe.compute_dtype
    shown = str(own).removeprefix("torch.")
    narrow = own in (torch.bfloat16, torch.float16)
    if type(plugin) is Precision:
        return recipe
    if type(plugin) is MixedPrecision:
        if narrow:
            raise ValueError(
                f"Trainer({asked}) runs torch.autocast over fp32 parameters, and the recipe"
                f" computes in {shown}: leave one of them out."
            )
        return recipe
    if type(plugin) is DoublePrecision:
        if own is not None:
            raise ValueError(
                f"Trainer({asked}) computes in fp64, and the recipe in {shown}: leave one of them"
                " out."
            )
        return recipe
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        if own is not None and own != torch.bfloat16:
            raise ValueError(
                f"Trainer({asked}) computes in bf16, and the recipe in {shown}: leave one of them"
                " out."
            )
        return recipe if own is not None else computing_in(recipe, torch.bfloat16)
    if type(plugin) is HalfPrecision:
        raise ValueError(
            f"Trainer({asked}) has no loss scaling, so that small gradients vanish: use"
            ' precision="16-mixed", or "bf16-true".'
        )
    raise ValueError(
        f"onefold.lightning.Strategy does not know the precision plugin {type(plugin).__name__}:"
        ' use precision="32-true", "bf16-mixed", "16-mixed", "bf16-true" or "64-true". Weights in 8'
        ' and 4 bits are the recipe\'s: Strategy(stage=3, frozen="nf4").'
    )


def converts(plugin: Any) -> bool:
    """Whether the plugin may change the module's dtype.

    Under "bf16-true" it must not: the recipe makes the bf16 copies that compute, and the master
    weights keep their precision.
    """
    return not isinstance(plugin, HalfPrecision)
