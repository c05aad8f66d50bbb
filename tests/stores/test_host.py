"""Memory of the host for activations: blocks never overlap, never exceed the budget, and come back
whole.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onefold.memory import MemoryLedger
from onefold.offload import arena as room

LINE = room.ALIGNMENT
SLAB = 8 * LINE


def arena_of(budget: int) -> room.Arena:
    return room.Arena(budget, "blocks", MemoryLedger())


def now(arena: room.Arena) -> tuple[int, int]:
    """(bytes of blocks, bytes that are reserved for none) by its ledger."""
    found = arena.ledger.now()
    return found.get("blocks", 0), found.get("idle slabs", 0)


@given(
    st.integers(0, 40 * LINE),
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 12 * LINE), st.integers(0, 1 << 16)), max_size=60
    ),
)
def test_blocks_hold_what_was_written_and_never_exceed_the_budget(
    budget: int, moves: list[tuple[bool, int, int]]
) -> None:
    room.SLAB = SLAB
    arena = arena_of(budget)
    held: list[tuple[room.Block, Tensor]] = []
    for taking, nbytes, which in moves:
        if taking:
            block = arena.take(nbytes)
            if block is not None:
                block.bytes.fill_(which % 251)
                assert block.bytes.numel() == nbytes and block.bytes.data_ptr() % 64 == 0
                held.append((block, block.bytes.clone()))
        elif held:
            arena.give(held.pop(which % len(held))[0])
        assert all(torch.equal(block.bytes, wrote) for block, wrote in held), "blocks overlap"
        used, idle = now(arena)
        assert used == sum(-(-block.nbytes // LINE) * LINE for block, _ in held)
        assert used + idle <= budget
    for block, _ in held:
        arena.give(block)
    arena.trim()
    assert arena.ledger.now() == {} and sum(arena.ledger.peak().values()) <= budget
