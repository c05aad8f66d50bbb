"""Memory of the host for activations: blocks never overlap, never exceed the budget, and come back
whole.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onefold.device import CopyStream
from onefold.memory import MemoryLedger
from onefold.offload import activations as room

LINE = room.ALIGNMENT
SLAB = 8 * LINE


def arena_of(budget: int) -> room.Arena:
    return room.Arena(budget, MemoryLedger(), CopyStream(torch.device("cpu")))


def now(arena: room.Arena) -> tuple[int, int]:
    """(bytes of blocks, bytes that are reserved for none) by its ledger."""
    found = arena.ledger.now()
    return found.get("activations", 0), found.get("idle slabs", 0)


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
    held: list[tuple[room.Block, Tensor, Tensor]] = []
    for taking, nbytes, which in moves:
        if taking:
            block = arena.take(nbytes)
            if block is not None:
                memory = arena.bytes(block, nbytes).fill_(which % 251)
                assert memory.numel() == nbytes and memory.data_ptr() % 64 == 0
                held.append((block, memory, memory.clone()))
        elif held:
            arena.give(held.pop(which % len(held))[0])
        assert all(torch.equal(memory, wrote) for _, memory, wrote in held), "blocks overlap"
        used, idle = now(arena)
        assert used == sum(-(-len(memory) // LINE) * LINE for _, memory, _ in held)
        assert used + idle <= budget
    for block, _, _ in held:
        arena.give(block)
    arena.trim()
    assert arena.ledger.now() == {} and sum(arena.ledger.peak().values()) <= budget
