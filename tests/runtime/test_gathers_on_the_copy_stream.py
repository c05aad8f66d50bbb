"""Gathers begin on the stream of the copies up, whatever they are made of, and end with the pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.runtime.unit import State
from ranks import run_ranks
from zoo import TinyMLP


def begun_inside(options: dict[str, Any]) -> list[tuple[str, bool]]:
    """(kind of gather, whether masters were copied inside of the context of that stream)."""
    recipe = onefold.Recipe.zero(3, precision="bf16", **options)
    model = onefold.shard(TinyMLP(), recipe)
    gatherer = onefold.engine_of(model).gather
    inside: list[int] = []
    found = []

    @contextlib.contextmanager
    def on_copy_stream() -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    put = gatherer.put

    def noted(flat: Any, full: Any) -> None:
        found.append((type(flat.gather).__name__, bool(inside)))
        put(flat, full)

    gatherer.on_copy_stream, gatherer.put = on_copy_stream, noted  # type: ignore[method-assign]
    for unit in gatherer.units:
        if not unit.resident:
            gatherer.launch(unit)
            gatherer.release(unit)
    return found


@pytest.mark.parametrize(
    ("ranks", "options", "kind"),
    [
        (1, {}, "LocalGather"),
        (2, {}, "FlatGather"),
        (4, {"group": 2, "second_copy": True}, "SecondaryGather"),
        (2, {"gather_codec": "int8"}, "EncodedGather"),
        (
            4,
            {"group": 2, "second_copy": True, "gather_codec": "int8"},
            "EncodedSecondaryGather",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masters_are_copied_on_the_stream_of_the_copies_up(
    ranks: int, options: dict[str, Any], kind: str
) -> None:
    for found in run_ranks(ranks, begun_inside, options):
        assert found and set(found) == {(kind, True)}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return self.other(out) if both else out


def under_way_after_a_pass(stage: int, grad: bool) -> list[str]:
    """The units whose gathers are under way when a forward pass that leaves one out has ended."""
    recipe = onefold.Recipe.zero(stage, overlap=not grad)  # else it is gathered ahead
    model = onefold.shard(Branches(), recipe, units=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4), True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.set_grad_enabled(grad):
        out = model(torch.ones(2, 4), grad and dist.get_rank() == 0)
    units = onefold.engine_of(model).units
    found = [unit.name for unit in units if unit.state is State.GATHERING]
    if grad:
        out.sum().backward()
    return found


@pytest.mark.parametrize(("stage", "grad"), [(1, False), (3, False), (3, True)])
def test_no_gather_is_under_way_when_a_forward_pass_has_ended(stage: int, grad: bool) -> None:
    assert run_ranks(2, under_way_after_a_pass, stage, grad) == [[], []]


def under_way_where_units_stay(stage: int) -> list[str]:
    """The units whose gathers are under way when a context in which they stay has begun."""
    model = onefold.shard(Branches(), onefold.Recipe.zero(stage), units=(nn.Linear,))
    with onefold.keep_gathered(model):
        return [
            unit.name
            for unit in onefold.engine_of(model).units
            if unit.state is not State.GATHERED and unit.flats
        ]


def test_units_are_gathered_when_the_context_in_which_they_stay_begins() -> None:
    assert run_ranks(2, under_way_where_units_stay, 3) == [[], []]
