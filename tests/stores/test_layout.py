"""Where every element lives: each is owned once, at an address that every rank computes alike."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import examples
from onefold.layout import ALIGNMENT, Dtypes, FlatLayout, ShardSpec, Topology, overlap
from onefold.layout.holders import (
    AxisCut,
    BoxInterval,
    Mesh,
    TensorBox,
    common,
    region_of,
    stretches,
    tile,
    whole_region,
)
from onefold.quant.codecs import CODECS
from onefold.recipe import Recipe

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)


def named(sizes: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}", size if isinstance(size, tuple) else (size,)) for i, size in enumerate(sizes)]


def overlapping(intervals: list[tuple[int, int]]) -> bool:
    ordered = sorted(i for i in intervals if i[0] < i[1])
    return any(a[1] > b[0] for a, b in zip(ordered, ordered[1:], strict=False))


# -- a flat buffer ---------------------------------------------------------------------------------


@given(
    shapes,
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([{}, {"sector": 4096}, {"block": 256}, {"sector": 4096, "block": 256}]),
)
def test_every_element_has_one_place_and_one_owner(
    shapes: list[tuple[int, ...]], parts: int, groups: int, options: dict[str, int]
) -> None:
    ranks = parts * groups
    layout = FlatLayout.of(named(shapes), ranks, **options)
    intervals = [layout.interval(rank) for rank in range(ranks)]
    assert [a for a, _ in intervals] == [r * layout.shard_numel for r in range(ranks)]
    assert intervals[-1][1] == layout.numel == ranks * layout.shard_numel
    assert sorted((s.name, s.shape) for s in layout.slots) == sorted(named(shapes))
    assert not overlapping([(s.start, s.end) for s in layout.slots])
    unit = max(ALIGNMENT, options.get("block", 0))
    assert layout.shard_numel % unit == 0
    for slot in layout.slots:
        assert slot.start % unit == 0 and slot.end - slot.start == prod(slot.shape)
        place = slot.start, slot.end
        every = (overlap(place, layout.interval(r)) for r in range(ranks))
        local = [p for p in every if p[0] < p[1]]
        assert [i for a, b in local for i in range(a, b)] == list(range(slot.start, slot.end))
        for a, b in local if options.get("block") else ():
            assert (a - slot.start) % 256 == 0 and ((b - slot.start) % 256 == 0 or b == slot.end)


# -- ranks -----------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6))
def test_groups_are_neighbours_and_a_chain_across_them_holds_one_shard(
    groups: int, each: int
) -> None:
    topology = Topology(groups * each, each)
    order = topology.order
    assert sorted(order) == list(range(groups * each))
    for rank, position in ((r, topology.position_of(r)) for r in range(groups * each)):
        assert order[position] == rank
        inside = {order[p] for p in topology.intra_group(position)}
        first = rank // each * each
        assert inside == set(range(first, first + each)), "a group crosses a node's border"
        across = topology.inter_group(position)
        assert position in across and {order[p] % each for p in across} == {rank % each}
        assert across == list(range(across[0], across[0] + groups)), "intervals are not adjacent"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 255))
def test_holders_divide_the_ranks_and_their_sum_is_the_mean_over_data(
    sizes: list[int], chosen: int
) -> None:
    """Along a data axis that is divided, a rank holds the sum of those that sent to it."""
    names = tuple(f"axis {i}" for i in range(len(sizes)))
    data = tuple(n for i, n in enumerate(names) if chosen >> i & 1) or names[:1]
    divided = [n for i, n in enumerate(names) if chosen >> (i + 4) & 1]
    axes = Mesh(names, tuple(sizes), data)
    holders = axes.holders(divided)
    assert sorted(r for group in holders.groups for r in group) == list(range(axes.size))
    assert all(rank in holders.group_of(rank) for rank in range(axes.size))
    of = dict(zip(names, sizes, strict=True))
    assert len(holders.groups) == prod(of[name] for name in divided)
    sent_from = prod(of[name] for name in divided if name in data)
    assert holders.size * sent_from * holders.scale == pytest.approx(1.0)


# -- boxes of tensors ------------------------------------------------------------------------------

boxed = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn, shape: tuple[int, ...]) -> BoxInterval:
    """An interval of a box of a tensor of `shape`."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    region = TensorBox(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    a, b = sorted((draw(st.integers(0, region.numel)), draw(st.integers(0, region.numel))))
    return BoxInterval(region, a, b)


def elements(shape: tuple[int, ...], interval: BoxInterval) -> Any:
    """The numbers of the interval's elements in the whole tensor, in its own order."""
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers[interval.region.slices].reshape(-1)[interval.start : interval.stop]


@examples(300)
@given(st.data(), boxed)
def test_common_blocks_are_the_elements_that_both_intervals_have(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, other = data.draw(intervals(shape)), data.draw(intervals(shape))
    mine, theirs = elements(shape, one), elements(shape, other)
    copied = np.full(one.numel, -1)
    for block in common(one, other):
        for index in np.ndindex(*block.shape):
            at = (np.array(index, dtype=int) * np.array(block.strides, dtype=int)).sum()
            there = (np.array(index, dtype=int) * np.array(block.strides_there, dtype=int)).sum()
            assert copied[block.at + at] == -1, f"an element is in two blocks: {one}, {other}"
            copied[block.at + at] = theirs[block.there + there]
    assert (copied == np.where(np.isin(mine, theirs), mine, -1)).all(), (shape, one, other)


@examples(300)
@given(st.data(), boxed)
def test_stretches_spell_an_interval_in_its_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    a, b = sorted(data.draw(st.integers(0, prod(shape))) for _ in range(2))
    every = np.arange(prod(shape)).reshape(shape)
    boxes = stretches(shape, a, b)
    assert [n for box in boxes for n in every[box.slices].reshape(-1)] == list(range(a, b))


@given(st.data(), boxed)
def test_the_parts_of_a_mesh_tile_the_tensor_and_a_gap_is_told(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    parts = [data.draw(st.integers(1, 3)) for _ in shape]
    boxes = tuple(
        region_of(shape, [AxisCut(d, parts[d], i) for d, i in enumerate(index)])
        for index in np.ndindex(*parts)
    )
    assert tile(shape, boxes) == tile(shape, (whole_region(shape),)) == ""
    some = tuple(box for box in boxes if box.numel)
    if some:
        assert "cover" in tile(shape, some[1:]) and "overlap" in tile(shape, (*some, some[0]))
        outside = TensorBox(tuple(n + 1 for n in shape), shape)
        assert not shape or "not inside" in tile(shape, (outside,))


# -- what a rank holds and sends -------------------------------------------------------------------

SCHEMES: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce_codec": "int8"},
    {"stage": 3},
    {"stage": 3, "precision": "bf16"},
    {"stage": 3, "shard_group": 2},
    {"stage": 3, "shard_group": 2, "optimizer_over": "all"},
    {"stage": 3, "group": 2, "second_copy": True},
    {"stage": 3, "group": 2, "second_copy": True, "gather_codec": "int8", "reduce_codec": "int4"},
    {"stage": 3, "offload_optimizer": "cpu"},
)
specified = (
    st.lists(st.lists(st.integers(1, 60), max_size=3).map(tuple), min_size=1, max_size=8),
    st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (6, 2), (4, 1), (8, 4)]),
    st.sampled_from(SCHEMES),
)


def specs(
    shapes: list[tuple[int, ...]], ranks: tuple[int, int], scheme: dict[str, Any], **options: Any
) -> list[ShardSpec]:
    """Those of all ranks."""
    recipe = Recipe.zero(**{"precision": "fp32"} | scheme)
    dtypes, topology = Dtypes.of(torch.float32, True, recipe), Topology(*ranks)
    return [
        ShardSpec(
            tuple(named(shapes)), dtypes, recipe, topology, position, CODECS.__getitem__, **options
        )
        for position in range(topology.size)
    ]


@given(*specified)
def test_the_hops_of_a_reduction_leave_a_rank_its_interval(
    shapes: list[tuple[int, ...]], ranks: tuple[int, int], scheme: dict[str, Any]
) -> None:
    for spec in specs(shapes, ranks, scheme):
        left = (0, spec.numel)
        for at, hop in enumerate(spec.hops):
            assert (hop.start, hop.start + hop.span) == left, (hop, left)
            left = hop.start + hop.index * hop.own, hop.start + (hop.index + 1) * hop.own
            room = spec.exchange(at, spec.dtypes.wire)
            own_too = 1 if spec.encodes(hop) else 0
            assert room.rows + bool(room.apart) == hop.size - 1 + own_too, (room, hop)
        assert left == spec.interval
