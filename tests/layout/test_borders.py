"""The order of parameters in a flat buffer, and gaps, so that few matrices are cut between ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.layout.borders import PADDING, Bordered, bordered
from onefold.layout.flat import FlatLayout, Topology
from onefold.layout.spec import Dtypes, ShardSpec
from onefold.plan.shapes import architecture
from onefold.plan.states import units_of
from onefold.recipe import Recipe


def cut_of(layout: FlatLayout, parts: int) -> dict[str, int]:
    """{parameter: its elements that are not where most of it is}, of those that a cut divides."""
    room, out = layout.numel // parts, {}
    for slot in layout.slots:
        held = [
            max(0, min(slot.end, (p + 1) * room) - max(slot.start, p * room)) for p in range(parts)
        ]
        if max(held) < slot.numel:
            out[slot.name] = slot.numel - max(held)
    return out


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=14),
    parts=st.integers(2, 6),
    groups=st.integers(1, 3),
)
def test_no_more_travels_than_in_the_order_of_the_model(
    sizes: list[int], parts: int, groups: int
) -> None:
    parameters = [(f"p{i}", (n,)) for i, n in enumerate(sizes)]
    ranks = parts * groups
    plain = FlatLayout.of(parameters, ranks)
    found = FlatLayout.of(parameters, ranks, borders=parts)
    assert sorted((s.name, s.shape) for s in found.slots) == sorted(
        (s.name, s.shape) for s in plain.slots
    )
    aligned = sum(-(-n // 64) * 64 for n in sizes)
    assert found.numel <= max(plain.numel, aligned * (1 + PADDING), aligned + ranks * 64)
    assert sum(cut_of(found, parts).values()) <= sum(cut_of(plain, parts).values())
    # It says of itself what is seen from outside
    told = bordered(tuple(sizes), parts, 64, groups * found.quantum)
    assert told.travels == sum(cut_of(found, parts).values())


def test_what_is_longer_than_an_interval_fills_the_ends() -> None:
    sizes = {"q": 256, "k": 192, "v": 192, "o": 256, "g": 1152}
    parameters = [(name, (n,)) for name, n in sizes.items()]
    assert set(cut_of(FlatLayout.of(parameters, 4), 4)) == {"v", "g"}
    found = FlatLayout.of(parameters, 4, borders=4)
    assert set(cut_of(found, 4)) == {"g"} and found.numel == 2048


def test_a_gap_keeps_a_matrix_whole_where_it_costs_less_than_its_way() -> None:
    # Three of 100 blocks of 64 elements and one of 99 on two ranks: a gap of one, or one more cut
    sizes = (6400, 6400, 6400, 6336)
    assert bordered(sizes, 2, 64, 64) == Bordered(
        (0, 1, 2, 3), (0, 6400, 12800, 19200), 12800, 0, 0
    )
    # Of three equal ones on two ranks one is cut: half of it is more than 1 %
    assert bordered((6400,) * 3, 2, 64, 64).travels == 3200


@pytest.mark.parametrize(
    ("name", "ranks", "in_order", "now"),
    [
        ("llama-3-8b", 8, 4, 3),
        ("llama-3-8b", 4, 3, 3),
        ("gpt2", 2, 1, 1),
        ("llama-3-70b", 64, 6, 5),
    ],
)
def test_matrices_of_a_block_that_are_cut(name: str, ranks: int, in_order: int, now: int) -> None:
    def cut(borders: bool) -> list[str]:
        units = units_of(architecture(name), Recipe.zero(3, borders=borders), ranks)
        layout = units[2].flats[0].layout
        shapes = {s.name: s.shape for s in layout.slots}
        return [n for n in cut_of(layout, ranks) if len(shapes[n]) == 2]

    assert (len(cut(False)), len(cut(True))) == (in_order, now)


def test_groups_of_owners_are_what_is_divided() -> None:
    """Owners of a group hold a part of it: of eight ranks in groups of four, four parts."""
    model = architecture("gpt2")
    over = {
        where: units_of(model, Recipe.zero(3, borders=True, **options), 8)[2].flats[0].layout
        for where, options in (
            ("group", {"shard_group": 4}),
            ("all", {"shard_group": 4, "optimizer_over": "all"}),
            ("no groups", {}),
        )
    }
    plain = units_of(model, Recipe.zero(3), 8)[2].flats[0].layout

    def travels(layout: FlatLayout, parts: int) -> int:
        return sum(cut_of(layout, parts).values())

    assert travels(over["group"], 4) < travels(plain, 4)
    assert over["all"] == over["no groups"] != plain
    assert travels(over["all"], 8) < travels(plain, 8)


def test_frozen_parameters_and_stage_0_stay_in_order() -> None:
    def order(stage: int, trainable: bool) -> list[str]:
        recipe = Recipe.zero(stage, borders=stage > 0)
        spec = ShardSpec.of(
            [(f"{i}", (64 * n, 64)) for i, n in enumerate((1, 3, 3, 5))],
            Dtypes.of(torch.float32, trainable, recipe),
            recipe,
            Topology(2, 2),
            0,
            lambda _: pytest.fail("there is no codec"),
            trainable=trainable,
        )
        assert sum(prod(s.shape) for s in spec.layout.slots) == 12 * 64 * 64
        return [s.name for s in spec.layout.slots]

    assert order(0, True) == order(3, False) == ["0", "1", "2", "3"] != order(3, True)


def test_borders_are_said_to_do_nothing_at_stage_0() -> None:
    assert any("borders" in note for note in Recipe.zero(0, borders=True).notes)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0, 0), (0, 96, 0)])
def test_parameters_without_elements_have_a_place(sizes: tuple[int, ...]) -> None:
    named = [(f"{i}", (n, 64)) for i, n in enumerate(sizes)]
    layout = FlatLayout.of(named, ranks=2, borders=2)
    assert sorted(s.name for s in layout.slots) == [name for name, _ in named]
    assert layout.content == 64 * sum(sizes) <= layout.numel
