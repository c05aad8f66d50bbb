"""Parameters whose values are kept by another object until their unit is laid out.

That object, the keeper, is an attribute of the parameter, named by `KEEPER`. `shard` asks it for a
unit's values just before it lays out the unit, so no rank holds more than one unit of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

#: The attribute of a parameter that refers to its keeper.
KEEPER = "_onefold_keeper"


class Keeper(Protocol):
    """An object that keeps the values of parameters which no engine has laid out yet."""

    def give_up(self, params: Sequence[nn.Parameter]) -> None:
        """Make the parameters whole on every rank, with rank 0's values, and forget them.
        Collective.
        """


def fetch(params: Iterable[nn.Parameter]) -> None:
    """Make those parameters whole that have a keeper; the others stay as they are. Collective if
    any has one.
    """
    kept: dict[int, tuple[Keeper, list[nn.Parameter]]] = {}
    for param in params:
        keeper = param.__dict__.get(KEEPER)
        if keeper is not None:
            kept.setdefault(id(keeper), (keeper, []))[1].append(param)
    for keeper, held in kept.values():
        keeper.give_up(held)
