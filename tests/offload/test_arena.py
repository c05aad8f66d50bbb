"""Blocks of host memory never overlap, never exceed the budget, and come back whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.memory import MemoryLedger
from onefold.offload import arena as module
from onefold.offload.arena import ALIGNMENT, IDLE_SLABS, Arena, Block

SMALL_SLAB = 8 * ALIGNMENT


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB", SMALL_SLAB)


def arena_of(budget: int) -> Arena:
    return Arena(budget, "blocks", MemoryLedger())


def room(block: Block) -> tuple[int, int, int]:
    return id(block.slab), block.start, block.start + block.room


@given(
    st.integers(0, 40 * ALIGNMENT),
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT), st.integers(0, 1 << 16)),
        max_size=60,
    ),
)
def test_blocks_hold_what_was_written_and_never_exceed_the_budget(
    budget: int, moves: list[tuple[bool, int, int]]
) -> None:
    module.SLAB = SMALL_SLAB
    arena = arena_of(budget)
    held: list[tuple[Block, torch.Tensor]] = []
    for taking, nbytes, which in moves:
        if taking:
            block = arena.take(nbytes)
            if block is not None:
                block.bytes.fill_(which % 251)
                held.append((block, block.bytes.clone()))
        elif held:
            arena.give(held.pop(which % len(held))[0])
        rooms = sorted(room(block) for block, _ in held)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(rooms, rooms[1:], strict=False)), (
            f"blocks overlap: {rooms}"
        )
        assert all(torch.equal(block.bytes, wrote) for block, wrote in held)
        used = sum(-(-block.nbytes // ALIGNMENT) * ALIGNMENT for block, _ in held)
        reserved = sum(slab.nbytes for slab in arena.slabs)
        assert (arena.used, arena.reserved) == (used, reserved)
        assert reserved <= budget, f"{reserved} bytes of slabs with a budget of {budget}"
        now = arena.ledger.now()
        assert (now.get("blocks", 0), now.get(IDLE_SLABS, 0)) == (used, reserved - used)
    for block, _ in held:
        arena.give(block)
    assert all(slab.idle for slab in arena.slabs)
    arena.trim()
    assert arena.ledger.now() == {} and sum(arena.ledger.peak().values()) <= budget


def test_a_block_is_as_aligned_as_it_says_and_ends_where_it_was_asked_to() -> None:
    arena = arena_of(SMALL_SLAB)
    first, second = arena.take(3), arena.take(ALIGNMENT + 1)
    assert first is not None and second is not None
    assert (first.start, second.start) == (0, ALIGNMENT)
    assert (first.bytes.numel(), second.bytes.numel()) == (3, ALIGNMENT + 1)


def test_memory_that_came_back_is_taken_again_before_new_memory() -> None:
    arena = arena_of(4 * SMALL_SLAB)
    for _ in range(10):
        blocks = [arena.take(3 * ALIGNMENT) for _ in range(4)]
        assert all(b is not None for b in blocks)
        for block in blocks:
            assert block is not None
            arena.give(block)
    assert arena.reserved == 2 * SMALL_SLAB, (
        f"{arena.reserved} bytes reserved for 12 units in slabs of 8, two blocks of 3 in each"
    )


def test_idle_slabs_make_way_for_a_block_that_is_larger_than_each() -> None:
    arena = arena_of(2 * SMALL_SLAB)
    a, b = arena.take(SMALL_SLAB), arena.take(SMALL_SLAB)
    assert a is not None and b is not None and arena.take(1) is None
    arena.give(a)
    assert arena.take(SMALL_SLAB + 1) is None, "one of the two slabs is in use"
    arena.give(b)
    waited: list[bool] = []
    arena.settle = lambda: waited.append(True)
    assert arena.take(SMALL_SLAB + 1) is not None
    assert waited == [True], "nobody waited for copies before memory went back to the system"
    assert arena.reserved <= 2 * SMALL_SLAB


def test_a_closed_arena_gives_each_slab_back_with_its_last_block() -> None:
    arena = arena_of(4 * SMALL_SLAB)
    a, b, c = arena.take(SMALL_SLAB), arena.take(ALIGNMENT), arena.take(ALIGNMENT)
    assert a is not None and b is not None and c is not None
    arena.close()
    assert arena.take(1) is None
    arena.give(a)
    assert arena.reserved == SMALL_SLAB
    arena.give(b)
    assert arena.reserved == SMALL_SLAB
    arena.give(c)
    assert (arena.reserved, arena.slabs, arena.ledger.now()) == (0, [], {})


def test_memory_that_the_system_refuses_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(module, "empty", refuse)
    arena = arena_of(1 << 20)
    with pytest.raises(RuntimeError, match=r"Cannot allocate memory.*smaller budget"):
        arena.take(1)
    assert (arena.reserved, arena.used) == (0, 0)
