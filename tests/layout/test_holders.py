"""Which ranks hold the same elements, and what their sums are divided by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.layout.holders import Axes, Holders

MESH = Axes(("ep", "dp", "tp"), (2, 2, 2), ("ep", "dp"))


def test_the_picture_of_eight_ranks_holds() -> None:
    assert MESH.holders(["tp"]).groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert MESH.holders([]).groups == (tuple(range(8)),)
    assert MESH.holders(["ep"]).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert MESH.holders(["ep", "tp"]).groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert [MESH.holders(d).copies for d in (["tp"], [], ["ep"], ["ep", "tp"])] == [1, 2, 2, 1]


@pytest.mark.parametrize("divided", [[], ["tp"], ["ep"], ["ep", "tp"], ["ep", "dp"]], ids=str)
def test_the_sum_over_holders_is_the_mean_over_data(divided: list[str]) -> None:
    """Each data rank contributes 1 to every element. Along `tp` the copies hold the same; along
    a divided data axis a rank holds the sum of those that sent to it.
    """
    holders = MESH.holders(divided)
    sent_from = 1  # data ranks whose tokens one holder has computed with
    for axis in divided:
        sent_from *= 2 if MESH.carries(axis) else 1
    assert holders.size * sent_from * holders.scale == 1.0


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    chosen=st.integers(0, 255),
)
def test_every_rank_is_in_one_group_and_every_element_has_one_owner(
    sizes: list[int], chosen: int
) -> None:
    names = tuple(f"axis_{i}" for i in range(len(sizes)))
    data = tuple(n for i, n in enumerate(names) if chosen >> i & 1) or names[:1]
    divided = [n for i, n in enumerate(names) if chosen >> (i + 4) & 1]
    axes = Axes(names, tuple(sizes), data)
    holders = axes.holders(divided)
    assert sorted(r for group in holders.groups for r in group) == list(range(axes.size))
    boxes = 1
    for name, size in zip(names, sizes, strict=True):
        boxes *= size if name in divided else 1
    assert len(holders.groups) == boxes and holders.size * boxes == axes.size
    assert holders.data == axes.data_size
    assert all(rank in holders.group_of(rank) for rank in range(axes.size))


def test_uneven_holders_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="different numbers of ranks"):
        Holders.of({0: "a", 1: "a", 2: "b"}, {0: 0, 1: 1, 2: 2})
    with pytest.raises(ValueError, match="unevenly over the data axes"):
        Holders.of({0: "a", 1: "a", 2: "a"}, {0: 0, 1: 0, 2: 1})


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (("dp", "dp"), ("dp",), "the mesh has the axis 'dp' twice"),
        (("dp", "tp"), ("dp", "dp"), "data names the axis 'dp' twice"),
        (("dp", "tp"), ("cp",), "the mesh has the axes 'dp', 'tp'"),
        (("dp", "tp"), (), "data names no axis"),
    ],
)
def test_a_mistake_in_the_axes_is_told_in_a_sentence(
    names: tuple[str, ...], data: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Axes(names, (2, 2), data)
