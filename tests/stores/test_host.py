"""Memory of the host for activations: blocks never overlap, never exceed the budget, and come back
whole, to the system too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import onefold
from on_ranks import slow
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


def test_memory_that_the_system_refuses_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(room, "empty", refuse)
    with pytest.raises(RuntimeError, match=r"Cannot allocate memory.*smaller budget"):
        arena_of(1 << 20).take(1)


HOLES = """
import sys
import torch
from onefold.offload.heap import give_large_blocks_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

changed = "back" in sys.argv and give_large_blocks_back()
torch.empty(31 << 20, dtype=torch.uint8).fill_(1)  # freed: glibc takes such blocks from its heap now
before = resident()
blocks, small = [], []
for size in [16 << 20] * 16 + [1 << 20] * 128:
    blocks.append(torch.ones(size, dtype=torch.uint8))
    small.append(bytearray(50_000))  # lies behind the block, and stays
del blocks
print(changed, resident() - before)
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_large_blocks_go_back_to_the_system_whatever_lies_behind_them() -> None:
    """Of 384 MiB that were freed."""

    def holes(*arguments: str, **environment: str) -> list[str]:
        path = str(Path(onefold.__file__).parents[1])
        environment |= {"PYTHONPATH": path, "PATH": os.environ["PATH"]}
        command = [sys.executable, "-c", HOLES, *arguments]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout.split()

    changed, left = holes("back")
    if changed == "False":
        pytest.skip("another C library than glibc")
    assert int(left) < 32 << 20 < int(holes()[1])
    # Whoever has set it knows why
    assert holes("back", MALLOC_MMAP_THRESHOLD_="65536")[0] == "False"
