"""Weights that are computed in tiles (tiling) are units of some rows each:

a module   is cut for a while as `onefold.shard` would cut it, then put back: its units, its trace and its FLOPs are those of the run
a shape    has its large matrices taken out of their units, as names of architectures promise that they are computed rows by rows
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import gcd

import torch
from torch import nn

from onefold.layout import Dtypes
from onefold.plan.shapes import ModelShape, Parameter, UnitShape
from onefold.recipe import Recipe
from onefold.tiling.cut import Cut, rows_of_a_tile


class _Over(Exception):
    """Ends a cut: leaving it by an exception puts the module back as it was."""


@contextmanager
def in_tiles(module: nn.Module, recipe: Recipe) -> Iterator[tuple[str, ...]]:
    """Inside, the weights of `module` above the recipe's tile are in tiles; gives sentences about
    those that are left whole.

    Raises:
        ValueError: a row is larger than a tile may be, or an embedding does what cannot be done in
            tiles.
    """
    if recipe.tile is None:
        yield ()
        return
    try:
        with Cut(module, recipe) as cut:
            yield tuple(cut.notes)
            raise _Over
    except _Over:
        pass


def is_in_tiles(model: ModelShape) -> bool:
    """Whether some weight of a shape is in tiles."""
    return any(".tiles." in unit.name for unit in model.units)


def shape_in_tiles(model: ModelShape, recipe: Recipe) -> ModelShape:
    """A shape with its matrices above the recipe's tile in units of their own, `NAME.tiles.0` and
    so on.

    Raises:
        ValueError: a row is larger than a tile may be.
    """
    limit = recipe.tile
    if limit is None:
        return model
    units: list[UnitShape] = []
    for unit in model.units:
        large = [p for p in unit.parameters if len(p.shape) == 2 and _bytes(p, recipe) > limit]
        tiles = [tile for p in large for tile in _tiles_of(p, limit, recipe, unit.looks_up_only)]
        left = replace(unit, parameters=tuple(p for p in unit.parameters if p not in large))
        units += [left, *tiles] if left.parameters or unit is model.units[0] else tiles
    return replace(model, units=tuple(units))


def _bytes(p: Parameter, recipe: Recipe) -> int:
    return p.numel * Dtypes.of(getattr(torch, p.dtype), p.trainable, recipe).compute.itemsize


def _tiles_of(p: Parameter, limit: int, recipe: Recipe, looks_up: bool) -> list[UnitShape]:
    rows, columns = p.shape
    row = _bytes(p, recipe) // rows
    # Rows that blocks of moments allow
    whole = recipe.block // gcd(columns, recipe.block) if recipe.block and p.trainable else 1
    if row * whole > limit:
        least = f"{row * whole:,}"
        raise ValueError(
            f"tile={limit:,} bytes, but {whole} rows of {p.name!r} {p.shape} take {least}: give a"
            f" tile of {least} or more."
        )
    each = rows_of_a_tile(rows, limit // row, whole)
    path = p.name.removesuffix(".weight")
    return [
        UnitShape(
            f"{path}.tiles.{i}",
            (
                replace(
                    p, name=f"{path}.tiles.{i}.weight", shape=(min(each, rows - first), columns)
                ),
            ),
            looks_up,
        )
        for i, first in enumerate(range(0, rows, each))
    ]
