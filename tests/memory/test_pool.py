"""Buffers with a lifetime: reused only when nobody reads them."""

import torch

import onefold.memory.pool
from onefold.memory import GATHERED, GRADIENTS, IDLE, MemoryLedger, Pool, empty
from onefold.memory.pool import LARGE

CPU = torch.device("cpu")


def pool() -> Pool:
    return Pool(torch.device("cpu"), MemoryLedger())


def test_a_buffer_given_back_is_reused():
    p = pool()
    a = p.take(1000, torch.float32, GATHERED)
    where = a.data_ptr()
    p.give(a)
    del a
    assert p.take(1000, torch.float32, GATHERED).data_ptr() == where


def test_a_buffer_that_somebody_reads_is_never_reused():
    p = pool()
    a = p.take(1000, torch.float32, GATHERED)
    a.fill_(7.0)
    reader = a[10:20].view(2, 5)
    p.give(a)
    del a
    b = p.take(1000, torch.float32, GATHERED)
    b.fill_(0.0)
    assert torch.equal(reader, torch.full((2, 5), 7.0)), reader


def test_the_ledger_holds_what_is_taken_and_what_is_idle():
    p = pool()
    a, b = p.take(100, torch.float32, GATHERED), p.take(50, torch.bfloat16, GRADIENTS)
    assert p.ledger.now() == {GATHERED: 400, GRADIENTS: 100}
    p.give(a)
    del a
    assert p.ledger.now() == {IDLE: 400, GRADIENTS: 100}
    p.give(b)
    p.drain()
    assert p.ledger.now() == {}
    assert p.ledger.peak() == {GATHERED: 400, GRADIENTS: 100}


def test_new_memory_is_asked_for_only_when_idle_memory_is_gone():
    p = pool()
    a = p.take(100, torch.float32, GATHERED)
    p.give(a)
    del a
    p.take(200, torch.float32, GATHERED)
    assert p.ledger.now() == {GATHERED: 800}


def test_a_large_buffer_frees_its_mapping_with_its_last_reader():
    def mapped() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[0]) * 4096

    before = mapped()
    buffer = empty(LARGE // 4, torch.float32, CPU)
    assert buffer.numel() * 4 == LARGE
    buffer[-1] = 7.0
    assert mapped() - before >= LARGE
    view = buffer[-2:]
    del buffer
    assert view[1] == 7.0
    assert mapped() - before >= LARGE
    del view
    assert mapped() - before < LARGE // 2


def test_a_pinned_pool_keeps_its_buffers_when_another_size_is_asked_for(monkeypatch):
    made = []

    def plain(numel, dtype, device, paged=False):
        made.append(numel)
        return torch.empty(numel, dtype=dtype)

    monkeypatch.setattr(onefold.memory.pool, "host_empty", plain)
    p = Pool(CPU, MemoryLedger(), pinned=torch.device("cuda"))
    for _ in range(5):  # five steps
        for numel in (100, 200, 100):
            a, b = (p.take(numel, torch.float32, GATHERED) for _ in range(2))
            p.give(a)
            p.give(b)
            del a, b
        p.drain()
    assert sorted(made) == [100, 100, 200, 200]
    assert p.ledger.now() == {IDLE: 4 * 600}
    p.close()
    assert p.ledger.now() == {}


def test_a_pinned_pool_frees_what_no_step_takes_any_more(monkeypatch):
    monkeypatch.setattr(
        onefold.memory.pool,
        "host_empty",
        lambda numel, dtype, device, paged=False: torch.empty(numel, dtype=dtype),
    )
    p = Pool(CPU, MemoryLedger(), pinned=torch.device("cuda"))
    once = p.take(1000, torch.float32, GATHERED)
    p.give(once)
    del once
    seen = []
    for _ in range(4):
        often = p.take(10, torch.float32, GATHERED)
        p.give(often)
        del often
        p.drain()
        seen.append(p.ledger.now()[IDLE])
    assert seen == [4040, 4040, 40, 40]
