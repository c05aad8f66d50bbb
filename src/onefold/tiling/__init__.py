"""Linear layers larger than the device: a few rows of their weights are gathered and computed at a
time (ZeRO-Infinity's memory-centric tiling, arXiv 2104.07857, section 5.1.3).

    onefold.tiling.tile_linears(model, "256MB")      # before shard()
    model = onefold.shard(model, Recipe.zero(3))

Each tile is a submodule and a unit of its own: gathered when it is called, released after the call,
reduced, stepped and stored like any other. State dicts and checkpoints have `head.tiles.0.weight` and
so on. Results equal those of the whole layer within rounding: matrix libraries choose kernels by shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from onefold.recipe.options import bytes_of
from onefold.runtime.units import OwnUnit

#: Matrix kernels work in blocks of rows, and a partly filled block takes as long as a full one.
ROWS = 64

__all__ = ["Tile", "TiledLinear", "tile_linears"]


class Tile(OwnUnit, nn.Linear):
    """Some rows of a linear layer."""


class TiledLinear(nn.Module):
    """A linear layer in tiles: y = cat(x @ W_i.T + b_i).

    Args:
        linear: the layer, whose weight and bias the tiles take over as views.
        rows: outputs of each tile; the last one may have fewer.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.tiles = nn.ModuleList()
        for first in range(0, linear.out_features, rows):
            here = slice(first, min(first + rows, linear.out_features))
            tile = Tile(linear.in_features, here.stop - first, linear.bias is not None, "meta")
            for name, whole in linear.named_parameters():
                part = nn.Parameter(whole.detach()[here], requires_grad=whole.requires_grad)
                setattr(tile, name, part)
            self.tiles.append(tile)
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tile(x) for tile in self.tiles], -1)


def tile_linears(
    model: nn.Module, limit: int | str, names: Sequence[str] | None = None
) -> list[str]:
    """Put a `TiledLinear` in the place of linear layers whose weight takes more than `limit` bytes,
    in place. Return their names.

    Args:
        limit: bytes of a tile's weight, as a number or a text such as "256MB".
        names: dotted names of the layers; None looks at every `nn.Linear`.

    Raises:
        ValueError: a layer that is named is no nn.Linear, one row is larger than `limit`, or tiles
            would not compute what the layer does.
    """
    most = bytes_of("limit", limit)
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    modules, done = dict(model.named_modules()), []
    for name in [n for n, m in modules.items() if type(m) is nn.Linear] if names is None else names:
        linear = modules.get(name)
        if type(linear) is not nn.Linear:
            found = "no module of this model" if linear is None else type(linear).__name__
            raise ValueError(
                f"tile_linears was given {name!r}, which is {found}: expected nn.Linear."
            )
        row = linear.in_features * linear.weight.element_size()
        if row * linear.out_features <= most:
            continue
        held, why = dict(linear.named_parameters()), ""
        if row > most:
            why = f"one row takes {row:,} bytes, and limit is {most:,}: give at least that"
        elif any(places[id(p)] > 1 for p in held.values()):
            why = "it is tied to another, or shares its bias: untie it, or name the layers to tile"
        elif not name or held.keys() - {"weight", "bias"}:
            why = (
                "it is the whole model, or its weight is computed: name other layers inside a model"
            )
        if why:
            raise ValueError(f"tile_linears: the layer {name!r} cannot be divided: {why}.")
        rows = most // row
        path, _, attribute = name.rpartition(".")
        setattr(modules[path], attribute, TiledLinear(linear, rows // ROWS * ROWS or rows))
        done.append(name)
    return done
