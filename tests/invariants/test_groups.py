"""Invariant 1 over groups: dividing state inside them, across them or both gives the same bits,
those of all ranks within rounding.
"""

from __future__ import annotations

from typing import Any

import pytest

from invariants.test_same_numbers import MICRO_BATCHES, Bits, Run, assert_same


def over_groups(size: int) -> Bits:
    """Every recipe that sums inside groups of `size` ranks first, then across."""
    return [
        ("stage 3 in groups", 3, {"group": size}),
        ("stage 2 in groups", 2, {"group": size}),
        ("stage 1 in groups", 1, {"group": size}),
        ("stage 0 in groups", 0, {"group": size}),
        ("HSDP", 3, {"shard_group": size}),
        ("stage 2 inside groups", 2, {"shard_group": size}),
        ("stage 1 inside groups", 1, {"shard_group": size}),
        ("optimizer over all", 3, {"shard_group": size, "optimizer_over": "all"}),
        ("second copy", 3, {"group": size, "second_copy": True}),
    ]


ALL_RANKS: Bits = [("stage 3 over all ranks", 3, {})]


@pytest.mark.parametrize(("world_size", "size"), [(4, 2), (6, 3), (6, 2), (4, 1), (4, 4)])
def test_recipes_over_groups_are_bit_equal(world_size: int, size: int, sample: Any) -> None:
    first, *others = over_groups(size)
    same = [first, *sample(others, 2)]
    assert_same(world_size, Run(kind="fused adamw", max_norm=0.5, steps=3), same, ALL_RANKS)


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"prefetch": 3, "in_flight": 5}, {"reshard_after_forward": False}],
    ids=str,
)
def test_the_schedule_changes_no_bit_over_groups(options: dict[str, object], sample: Any) -> None:
    recipes: Bits = [
        (f"{name} {options}", stage, {**given, **options})
        for name, stage, given in over_groups(2)
        if stage == 3
    ]
    assert_same(4, Run(kind="sgd"), [*over_groups(2)[:1], *sample(recipes, 2)])


def test_accumulation_inside_groups_is_bit_equal_where_sums_are_held() -> None:
    held: Bits = [
        (name, 3, {"shard_group": 2, **more})
        for name, more in (("HSDP", {}), ("optimizer over all", {"optimizer_over": "all"}))
    ]
    assert_same(
        4,
        Run(micro_batches=MICRO_BATCHES, max_norm=0.5, steps=3),
        held,
        [*over_groups(2)[:1], *ALL_RANKS],
    )


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_no_bit_over_groups(
    checkpointing: Any, sample: Any
) -> None:
    same = [over_groups(2)[i] for i in (0, *sample((3, 4, 7, 8), 2))]
    assert_same(4, Run(checkpointing=checkpointing), same)
