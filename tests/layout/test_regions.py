"""Intervals of boxes: what they have in common, against a table of all elements."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.layout.holders import AxisCut, TensorBox, region_of
from onefold.layout.regions import BoxInterval, common, runs, stretches, tile, whole_region

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn, shape: tuple[int, ...]) -> BoxInterval:
    """An interval of a box of a tensor of `shape`."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    region = TensorBox(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    a, b = sorted((draw(st.integers(0, region.numel)), draw(st.integers(0, region.numel))))
    return BoxInterval(region, a, b)


def elements(shape: tuple[int, ...], interval: BoxInterval) -> np.ndarray:
    """The numbers of the interval's elements in the flattened global tensor, in its own order."""
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers[interval.region.slices].reshape(-1)[interval.start : interval.stop]


@settings(max_examples=300)
@given(st.data(), SHAPES)
def test_common_blocks_are_the_elements_that_both_intervals_have(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    one, other = data.draw(intervals(shape)), data.draw(intervals(shape))
    mine, theirs = elements(shape, one), elements(shape, other)
    copied = np.full(one.numel, -1)
    blocks = common(one, other)
    assert len(blocks) <= max(1, 2 * len(shape) - 1) ** 2
    for block in blocks:
        assert block.there >= 0 and block.ends_there <= other.numel
        for index in np.ndindex(*block.shape):
            to = block.at + sum(i * s for i, s in zip(index, block.strides, strict=True))
            there = block.there + sum(
                i * s for i, s in zip(index, block.strides_there, strict=True)
            )
            assert copied[to] == -1, f"element {to} is in two blocks: {one}, {other}"
            copied[to] = theirs[there]
    shared = np.isin(mine, theirs)
    assert (copied == np.where(shared, mine, -1)).all(), (shape, one, other)


@settings(max_examples=300)
@given(st.data(), SHAPES)
def test_runs_are_consecutive_in_the_tensor_and_as_few_as_can_be(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    interval = data.draw(intervals(shape))
    numbers, found = elements(shape, interval), list(runs(interval, shape))
    spelled = [(r.at + i, r.start + i) for r in found for i in range(r.length)]
    assert [at for at, _ in spelled] == numbers.tolist()
    assert [start for _, start in spelled] == list(range(interval.start, interval.stop))
    breaks = int((numbers[1:] != numbers[:-1] + 1).sum()) if len(numbers) else -1
    assert len(found) == breaks + 1, (shape, interval, found)


@given(st.data(), SHAPES)
def test_stretches_tile_an_interval_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = sorted(data.draw(st.integers(0, prod(shape))) for _ in range(2))
    found = stretches(shape, a, b)
    numbers = np.arange(prod(shape)).reshape(shape)
    assert [n for r in found for n in numbers[r.slices].reshape(-1)] == list(range(a, b))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert len({r.offset for r in found}) == len(found)  # a box is known by where it begins


@given(st.data(), SHAPES)
def test_the_parts_of_a_mesh_tile_the_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    parts = [data.draw(st.integers(1, 3)) for _ in shape]
    boxes = tuple(
        region_of(shape, [AxisCut(d, parts[d], i) for d, i in enumerate(index)])
        for index in np.ndindex(*parts)
    )
    assert tile(shape, boxes) == ""
    some = tuple(box for box in boxes if box.numel)
    if some:
        assert tile(shape, some[1:]).startswith("boxes cover")
        assert tile(shape, (*some, some[0])).startswith("two boxes overlap")


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ((TensorBox((0, 0), (2, 4)), TensorBox((2, 0), (2, 3))), "cover 14 of 16"),
        ((TensorBox((0, 0), (4, 4)), TensorBox((2, 0), (1, 1))), "two boxes overlap, at (0, 0)"),
        ((TensorBox((2, 0), (3, 4)),), "a box at (2, 0) of (3, 4) is not inside"),
        ((TensorBox((0,), (16,)),), "is not inside a tensor of (4, 4)"),
    ],
)
def test_what_does_not_tile_is_told(boxes: tuple[TensorBox, ...], message: str) -> None:
    assert message in tile((4, 4), boxes)
    assert tile((4, 4), (whole_region((4, 4)),)) == ""
