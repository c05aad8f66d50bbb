"""Where every element lives: properties over random parameter lists and world sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.layout import ALIGNMENT, FlatLayout, Slot, overlap

shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=12)
worlds = st.integers(1, 16)


def layout(shapes: list[tuple[int, ...]], ranks: int) -> FlatLayout:
    return FlatLayout.of([(f"p{i}", s) for i, s in enumerate(shapes)], ranks)


@given(shapes, worlds)
def test_every_element_is_owned_by_exactly_one_rank(shapes, ranks):
    space = layout(shapes, ranks)
    owners = [0] * space.numel
    for rank in range(ranks):
        a, b = space.interval(rank)
        for i in range(a, b):
            owners[i] += 1
    assert owners == [1] * space.numel, (space, owners)


@given(shapes, worlds)
def test_the_local_parts_of_a_slot_tile_it_in_rank_order(shapes, ranks):
    space = layout(shapes, ranks)
    for slot in space.slots:
        parts = [p for p in (space.local(slot, r) for r in range(ranks)) if p[0] < p[1]]
        flat = [i for a, b in parts for i in range(a, b)]
        assert flat == list(range(slot.start, slot.end)), (slot, parts)


@given(shapes, worlds)
def test_slots_start_and_ranks_are_cut_at_multiples_of_the_alignment(shapes, ranks):
    space = layout(shapes, ranks)
    assert all(slot.start % ALIGNMENT == 0 for slot in space.slots), space
    assert space.shard_numel % ALIGNMENT == 0 and space.shard_numel * ranks == space.numel, space


@given(shapes, worlds, st.randoms(use_true_random=False))
def test_runs_cover_the_active_slots_and_no_frozen_one(shapes, ranks, random):
    space = layout(shapes, ranks)
    active = [random.random() < 0.6 for _ in space.slots]
    runs = space.runs(active)
    assert all(a[1] <= b[0] for a, b in zip(runs, runs[1:], strict=False)), runs
    for slot, on in zip(space.slots, active, strict=True):
        inside = any(a <= slot.start and slot.end <= b for a, b in runs)
        touched = any(
            overlap((slot.start, slot.end), run)[0] < overlap((slot.start, slot.end), run)[1]
            for run in runs
        )
        assert inside if on else not touched, (slot, on, runs)


@given(shapes, worlds, st.sampled_from([0, 4096]))
def test_blocks_counted_from_a_parameters_beginning_lie_on_one_rank_each(shapes, ranks, sector):
    space = FlatLayout.of([(f"p{i}", s) for i, s in enumerate(shapes)], ranks, sector, 256)
    for slot in space.slots:
        assert slot.start % 256 == 0, space
        for a, b in (space.local(slot, rank) for rank in range(ranks)):
            assert a == b or (
                (a - slot.start) % 256 == 0 and ((b - slot.start) % 256 == 0 or b == slot.end)
            ), (slot, a, b)


@given(shapes, worlds)
def test_a_layout_without_blocks_is_what_it_was(shapes, ranks):
    assert FlatLayout.of([(f"p{i}", s) for i, s in enumerate(shapes)], ranks, 0, 0) == layout(
        shapes, ranks
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_padding_of_a_block_of_gpt_2_stays_under_one_percent_with_blocks(ranks):
    w = 768
    shapes = [
        (w,),
        (w,),
        (w, 3 * w),
        (3 * w,),
        (w, w),
        (w,),
        (w,),
        (w,),
        (w, 4 * w),
        (4 * w,),
        (4 * w, w),
        (w,),
    ]
    space = FlatLayout.of([(f"p{i}", s) for i, s in enumerate(shapes)], ranks, block=256)
    assert 0 <= space.numel - space.content < 0.01 * space.content, (space.numel, space.content)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(64, 4096).map(lambda n: n * 16), worlds)
def test_padding_of_real_blocks_stays_under_one_percent(layers, width, ranks):
    """A block of a transformer: four matrices of width² and more, a few vectors."""
    space = FlatLayout.of(
        [("w", (width, 4)), ("b", (width,)), ("v", (width, 32)), ("u", (width, 8)), ("n", (width,))]
        * 4,
        ranks,
    )
    # Every slot may waste 63 elements and the end of every rank 63: half a percent each where a
    # block has 200 times that.
    if space.content >= 200 * max(ranks, len(space.slots)) * ALIGNMENT:
        waste = (space.numel - space.content) / space.content
        assert waste < 0.01, f"{space.numel} elements for {space.content}: {waste:.2%} padding"


def test_a_space_with_a_misplaced_slot_is_refused():
    with pytest.raises(ValueError, match="starts at 3"):
        FlatLayout((Slot("w", (4,), 3),), 64, 1, 64)
    with pytest.raises(ValueError, match="expected a multiple of 64 at or after 100"):
        FlatLayout((Slot("w", (100,), 0), Slot("v", (4,), 64)), 256, 1, 64)
    with pytest.raises(ValueError, match="past the space"):
        FlatLayout((Slot("w", (100,), 0),), 64, 1, 64)
    with pytest.raises(ValueError, match="expected a multiple of 256"):
        FlatLayout((Slot("w", (4,), 64),), 256, 1, 256, 256)
    with pytest.raises(ValueError, match="would divide blocks of 256"):
        FlatLayout((Slot("w", (4,), 0),), 256, 1, 64, 256)
    with pytest.raises(ValueError, match="do not cut"):
        FlatLayout((), 100, 3, 64)


def test_the_picture_shows_slots_and_the_interval_of_each_rank():
    space = FlatLayout.of([("weight", (320,)), ("bias", (256,))], 4)
    picture = space.picture()
    assert picture.count("\n") == 4 and "w" in picture and "b" in picture, picture
    for rank in range(4):
        a, b = space.interval(rank)
        assert f"[{a}, {b})" in picture, picture
