"""Parameters whose values rest elsewhere until their unit is laid out.

Who keeps them says so on the parameter, under `KEEPER`; `shard` asks for a unit's values just
before it lays the unit out, so that no rank holds more than a unit of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

#: Where a parameter names its keeper.
KEEPER = "_onefold_keeper"


class Keeper(Protocol):
    """Who has the values of parameters that no engine has yet."""

    def give_up(self, params: Sequence[nn.Parameter]) -> None:
        """Make them whole on every rank, with rank 0's values, and keep them no longer.
        Collective.
        """


def fetch(params: Iterable[nn.Parameter]) -> None:
    """Make parameters whole whose values a keeper has; others are left alone. Collective if any
    is.
    """
    kept: dict[int, tuple[Keeper, list[nn.Parameter]]] = {}
    for param in params:
        keeper = param.__dict__.get(KEEPER)
        if keeper is not None:
            kept.setdefault(id(keeper), (keeper, []))[1].append(param)
    for keeper, held in kept.values():
        keeper.give_up(held)
