"""What the engine knows of weights that are computed in tiles (room `tiling`): a tile is a unit of
its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import nn

from onefold.layout import Part


class WeightTile(nn.Module):
    """Some rows of a weight. They are gathered for their computation and released after it.

    Attributes:
        shared: several modules compute with it (tied weights), so a pass uses it more than once.
        looked_up: its backward pass reads no weight (that of an embedding).
    """

    looked_up: ClassVar[bool] = False
    shared: bool

    def part(self, names: Sequence[str]) -> Part:
        """Return the part that it is of the whole weight; `names` are the tile's own."""
        raise NotImplementedError


class TiledModule(nn.Module):
    """A module with a list of tiles, which is not taken for a list of blocks.

    Attributes:
        outlined: while it is above 0, a state dict shows each weight in tiles as its first tile's
            parameter.
    """

    outlined: ClassVar[int] = 0


@contextlib.contextmanager
def first_tiles() -> Iterator[None]:
    """Inside this context, state dicts show each weight in tiles as the parameter of its first
    tile. For callers that only list what a model has.
    """
    TiledModule.outlined += 1
    try:
        yield
    finally:
        TiledModule.outlined -= 1
