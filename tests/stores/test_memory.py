"""Buffers that are used again: never while somebody reads them, and all of them are counted."""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from onefold.memory import GATHERED, IDLE, MemoryLedger, Pool, empty

CPU = torch.device("cpu")
MIB = 1 << 20


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "give", "view"]), st.sampled_from([16, 32]), st.integers(0, 99)
        ),
        max_size=40,
    )
)
@example([("take", 16, 0), ("give", 16, 0), ("take", 16, 0), ("take", 16, 0)])
@example([("take", 16, 0), ("view", 16, 0), ("give", 16, 0), ("take", 16, 0)])
def test_no_buffer_is_handed_out_while_somebody_reads_it(moves: list[tuple[str, int, int]]) -> None:
    pool = Pool(CPU, ledger := MemoryLedger())
    held: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffers, and what was written to them
    readers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (move, numel, which) in enumerate(moves):
        if move == "take":
            buffer = pool.take(numel, torch.float32, GATHERED).fill_(float(number))
            held.append((buffer, buffer.clone()))
            del buffer
        elif held and move == "view":
            buffer, _ = held[which % len(held)]
            readers.append((buffer[3:9], buffer[3:9].clone()))
            del buffer
        elif held:
            buffer, _ = held.pop(which % len(held))
            pool.give(buffer)
            del buffer
        assert all(torch.equal(now, wrote) for now, wrote in held + readers)
        assert ledger.now().get(GATHERED, 0) == sum(b.nbytes for b, _ in held)
    while held:
        pool.give(held.pop()[0])
    pool.drain()
    assert ledger.now() == {}


def test_a_step_takes_the_memory_of_the_step_before() -> None:
    pool = Pool(CPU, ledger := MemoryLedger())
    places = []
    for numel in (1000, 1000, 2000):
        buffer = pool.take(numel, torch.float32, GATHERED)
        places.append(buffer.data_ptr())
        assert ledger.now() == {GATHERED: 4 * numel}
        pool.give(buffer)
        del buffer
    assert places[0] == places[1]
    # Memory of another size is asked for only when idle memory has gone back
    assert ledger.now() == {IDLE: 8000} and sum(ledger.peak().values()) == 8000


def test_a_large_buffer_goes_back_to_the_system_with_its_last_reader() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    gc.collect()
    before = mapped()
    buffer = empty(16 * MIB, torch.float32, CPU)
    buffer[-1] = 7.0
    view: Any = buffer[-2:]
    del buffer
    assert view[1] == 7.0 and mapped() - before >= 64 * MIB
    del view
    assert mapped() - before < 32 * MIB
