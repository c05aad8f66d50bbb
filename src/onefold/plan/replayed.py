"""Units and reductions as a replay holds them, and the order in which passes come to units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from onefold.layout import Hop, ShardSpec
from onefold.plan.states import UnitPlan


@dataclass(frozen=True)
class Moment:
    """The engine's bytes at their largest while one unit runs: `phase` "forward", "backward" or
    "step"; by category.
    """

    micro_batch: int
    phase: str
    unit: str
    held: dict[str, int]

    @cached_property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass
class Reduction:
    unit: int
    flat: ShardSpec
    buffer: torch.Tensor
    at: int = 0
    sent: torch.Tensor | None = None
    received: torch.Tensor | None = None
    into: int = 0  # bytes of a received part that becomes the sum
    rows: int = 0  # of `received` that are added up at once
    whole: bool = False  # the backend sums it for everybody

    @property
    def hop(self) -> Hop:
        return self.flat.hops[self.at]

    @property
    def encodes(self) -> bool:
        return self.flat.encodes(self.hop)

    @property
    def is_last(self) -> bool:
        return self.at + 1 == len(self.flat.hops)


@dataclass
class Unit:
    plan: UnitPlan
    index: int
    held: dict[int, torch.Tensor] = field(default_factory=dict)  # by number of the flat buffer
    coded: list[torch.Tensor] = field(default_factory=list)  # what is on its way to them encoded
    gathered: bool = False
    claimed: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes that it is gathered into."""
        return sum(
            flat.numel * flat.dtypes.compute.itemsize
            for flat in self.plan.flats
            if not flat.resident
        )


def outer(units: Sequence[UnitPlan]) -> frozenset[str]:
    """The names of the units around others."""
    around = {u.name for u in units if u.path == ""} if len(units) > 1 else set()
    names = {u.path: u.name for u in units}
    for unit in units:
        parts = unit.path.split(".")
        around.update(names[p] for i in range(1, len(parts)) if (p := ".".join(parts[:i])) in names)
    return frozenset(around)


def backwards(units: list[Unit]) -> list[Unit]:
    """The order in which a backward pass first comes to the units: one around others before them,
    the others from last to first.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].plan.encloses(unit.plan):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [u for head, *rest in reversed(groups) for u in (head, *backwards(rest))]
