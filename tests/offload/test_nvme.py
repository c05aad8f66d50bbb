"""Regions on disk: what is written is read, in whatever pieces, past the page cache, with no memory
but the caller's.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvme_tools import blank, data_files, lives_in_memory, on_pages, pages_in_cache

from examples import examples
from onefold.offload.nvme import PAGE, Nvme, TierError, page_buffer
from onefold.offload.nvme.io import Io, Piece
from onefold.offload.nvme.region import cut, lane_lengths

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path):
    with Nvme([tmp_path], name="test") as store:
        yield store


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def numbered(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(numel).remainder(251).to(dtype)


@given(
    capacity=st.integers(0, 400).map(lambda pages: pages * PAGE),
    lanes=st.integers(1, 4),
    stripe=st.sampled_from([PAGE, 3 * PAGE, 16 * PAGE]),
    block=st.sampled_from([PAGE, 2 * PAGE, 7 * PAGE, 64 * PAGE]),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_pieces_cover_each_byte_once_and_stay_on_their_lanes(capacity, lanes, stripe, block, ends):
    lengths = lane_lengths(capacity, lanes, stripe)
    assert sum(lengths) == capacity
    assert max(lengths) - min(lengths) <= stripe, (
        f"{lengths}: lanes differ by more than one stripe of {stripe}"
    )
    lo, hi = (int(end * capacity) // PAGE * PAGE for end in sorted(ends))
    used: Counter[tuple[int, int]] = Counter()
    at = lo
    for lane, offset, byte, length in cut(lo, hi, lanes, stripe, block):
        assert byte == at
        assert 0 < length <= block
        assert offset + length <= lengths[lane]
        used.update((lane, page) for page in range(offset // PAGE, (offset + length) // PAGE))
        at += length
    assert at == hi
    assert sum(used.values()) == (hi - lo) // PAGE
    assert max(used.values(), default=1) == 1, "two pieces share a page"
    whole = {(lane, offset // PAGE) for lane, offset, _, _ in cut(0, capacity, lanes, stripe, PAGE)}
    assert used.keys() <= whole, "a page lies elsewhere when it is moved in another piece"


@examples(60)
@given(data=st.data())
def test_what_is_written_is_read_in_any_pieces_over_any_number_of_folders(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    step = PAGE // dtype.itemsize
    sizes = data.draw(st.lists(st.integers(1, 40 * step), min_size=1, max_size=3))
    folders = data.draw(st.integers(1, 3))
    stripe, block = (data.draw(st.sampled_from([PAGE, 2 * PAGE, 5 * PAGE, MIB])) for _ in range(2))
    with tempfile.TemporaryDirectory() as parent:
        paths = [Path(parent) / str(i) for i in range(folders)]
        for path in paths:
            path.mkdir()
        with Nvme(
            paths, name="drawn", threads=data.draw(st.integers(1, 4)), stripe=stripe, block=block
        ) as store:
            regions = [store.region(f"region {i}", numel, dtype) for i, numel in enumerate(sizes)]
            values = [torch.randint(0, 100, (numel,)).to(dtype) for numel in sizes]
            for region, expected in zip(regions, values, strict=True):
                for transfer in [
                    region.write(start, on_pages(expected[start:end]))
                    for start, end in chunks(data, region.numel, step)
                ]:
                    transfer.wait()
            for region, expected in zip(regions, values, strict=True):
                found = []
                for start, end in chunks(data, region.numel, step):
                    found.append(
                        (start, into := blank(end - start, dtype), region.read(start, into))
                    )
                for start, into, transfer in found:
                    transfer.wait()
                    assert torch.equal(into, expected[start : start + len(into)]), (
                        f"{region!r} from element {start} on"
                    )
            assert store.nbytes == sum(region.capacity for region in regions)
        assert not any(any(path.iterdir()) for path in paths)


def chunks(data: st.DataObject, numel: int, step: int) -> list[tuple[int, int]]:
    """[0, numel) cut at pages, in any order."""
    pages = -(-numel // step)
    inner = sorted(data.draw(st.sets(st.integers(1, pages - 1), max_size=4))) if pages > 1 else []
    ends = [0, *(page * step for page in inner), numel]
    return data.draw(st.permutations(list(itertools.pairwise(ends))))


def test_a_new_region_holds_zeros(store: Nvme):
    region, into = store.region("new", 5000, torch.float32), blank(5000, torch.float32).fill_(7)
    region.read(0, into).wait()
    assert not into.any()


def test_an_empty_region_takes_nothing_and_its_transfers_are_over_at_once(store: Nvme):
    region = store.region("empty", 0, torch.float32)
    assert (region.nbytes, region.capacity, store.nbytes) == (0, 0, 0)
    for transfer in (region.read(0, torch.empty(0)), region.write(0, torch.empty(0))):
        assert transfer.done()
        transfer.wait()


def test_a_region_of_odd_size_takes_whole_pages_that_are_really_allocated(store: Nvme):
    region = store.region("odd", 1_000_001, torch.bfloat16)
    assert (region.nbytes, region.capacity) == (2_000_002, 489 * PAGE)
    [file] = data_files(store)
    assert file.stat().st_size == store.nbytes == 489 * PAGE
    assert file.stat().st_blocks * 512 >= 489 * PAGE, (
        "the file is a hole: a full disk would show in the middle of a step"
    )


def test_several_folders_share_a_large_region_to_a_stripe_and_take_turns_with_small_ones(
    tmp_path: Path,
):
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    with Nvme(paths, name="striped", stripe=PAGE) as store:
        store.region("large", 31 * PAGE, torch.uint8)
        sizes = [file.stat().st_size // PAGE for file in data_files(store)]
        assert sorted(sizes) == [10, 10, 11]
        for i in range(4):
            store.region(f"small {i}", 100, torch.uint8)
        sizes = [file.stat().st_size // PAGE for file in data_files(store)]
        assert sum(sizes) == 35
        assert max(sizes) - min(sizes) <= 2, sizes


BUFFER = page_buffer(4 * PAGE)
FLOATS = BUFFER.view(torch.float32)
REFUSED = {
    "the region torch.float32": (0, BUFFER[:PAGE]),
    "side by side": (0, FLOATS[::2][:1024]),
    "it has 0 to 2,500": (2048, FLOATS[:1024]),
    "0 to 2,500": (-1024, FLOATS[:1024]),
    "multiple of 1,024 elements": (1, FLOATS[:1024]),
    "begins on a page": (0, FLOATS[1:1025]),
    "or with the region": (0, FLOATS[:1000]),
    "on the host": (0, torch.empty(1024, device="meta")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_breaks_the_contract_is_refused_in_a_sentence_and_never_copied(
    store: Nvme, words: str
):
    start, tensor = REFUSED[words]
    region = store.region("small", 2500, torch.float32)
    for transfer in (region.read, region.write):
        with pytest.raises(ValueError, match=words):
            transfer(start, tensor)
    assert (store.read_bytes, store.written_bytes) == (0, 0)


def test_a_tensor_whose_memory_ends_within_its_last_page_is_refused(store: Nvme):
    # The C library's addresses are multiples of 16, so that it never ends on a page
    storage = torch.UntypedStorage(2 * PAGE + 1808)
    skipped = -storage.data_ptr() % PAGE // 4
    numel = storage.nbytes() // 4 - skipped
    tensor = torch.empty(0).set_(storage, skipped, (numel,))
    assert tensor.data_ptr() % PAGE == 0
    region = store.region("ends within a page", numel, torch.float32)
    for transfer in (region.read, region.write):
        with pytest.raises(ValueError, match="holds whole pages"):
            transfer(0, tensor)


def test_a_read_at_the_regions_end_moves_the_last_page_whole(store: Nvme):
    region = store.region("odd", 1500, torch.float32)
    memory = store.buffer(2 * PAGE).view(torch.float32)
    memory[:1500], memory[1500:] = numbered(1500), 5.0
    region.write(0, memory[:1500]).wait()
    memory.zero_()
    region.read(0, memory[:1500]).wait()
    assert torch.equal(memory[:1500], numbered(1500))
    assert memory[1500:].eq(5.0).all(), "documented: the page behind the end is moved with it"


def test_a_buffer_begins_on_a_page_and_holds_whole_pages():
    for asked, expected in (
        (0, 0),
        (1, PAGE),
        (PAGE, PAGE),
        (PAGE + 1, 2 * PAGE),
        (5 * MIB + 1, 5 * MIB + PAGE),
    ):
        buffer = page_buffer(asked)
        assert (buffer.numel(), buffer.dtype, buffer.data_ptr() % PAGE) == (
            expected,
            torch.uint8,
            0,
        ), asked
    with pytest.raises(ValueError, match="0 or more"):
        page_buffer(-1)


def test_a_buffer_goes_with_its_last_view():
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * PAGE

    before = mapped()
    buffer = page_buffer(64 * MIB)
    view = buffer.view(torch.float32)[-2:]
    del buffer
    assert mapped() - before >= 64 * MIB
    view[0] = 3.0
    assert view[0] == 3.0
    del view
    assert mapped() - before < 32 * MIB


def test_a_forked_child_shares_no_page_of_a_buffer(store: Nvme):
    """Pages that a child shares are copied at the parent's next write: the buffers would exist
    twice.
    """

    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(
            int(line.split()[1]) * 1024
            for line in lines
            if line.startswith(("RssAnon", "RssShmem"))
        )

    buffer = store.buffer(64 * MIB).fill_(7)
    before = held()
    child = os.fork()
    if not child:
        os._exit(0 if held() < before - 48 * MIB else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.eq(7).all()


def test_reads_that_are_under_way_during_a_fork_arrive(store: Nvme):
    region, buffer = store.region("forked", 32 * MIB, torch.uint8), store.buffer(32 * MIB).fill_(7)
    region.write(0, buffer).wait()
    for _ in range(5):
        buffer.zero_()
        transfer = region.read(0, buffer)
        child = os.fork()
        if not child:
            os._exit(0)
        transfer.wait()
        os.waitpid(child, 0)
        assert buffer.eq(7).all()


def test_when_a_transfer_is_over_nobody_holds_its_tensor(store: Nvme):
    region, buffer = store.region("held", 4 * MIB, torch.uint8), store.buffer(4 * MIB)
    storage = buffer.untyped_storage()._cdata
    before = torch._C._storage_Use_Count(storage)
    for _ in range(20):
        for move in (region.write, region.read):
            transfer = move(0, buffer)
            assert transfer.done() or torch._C._storage_Use_Count(storage) > before
            transfer.wait()
            owners = torch._C._storage_Use_Count(storage)
            assert owners == before


def test_a_tensor_that_its_caller_forgets_lives_until_its_transfer_is_over(store: Nvme):
    region = store.region("forgotten", 8 * MIB, torch.uint8)
    transfers = [region.write(i * MIB, store.buffer(MIB).fill_(i)) for i in range(0, 8, 2)]
    gc.collect()
    for transfer in transfers:
        transfer.wait()
    into = store.buffer(8 * MIB)
    region.read(0, into).wait()
    assert [int(v) for v in into[::MIB]] == [0, 0, 2, 0, 4, 0, 6, 0]


def blocked(store: Nvme, op: str) -> threading.Event:
    """Transfers of this kind wait until the event is set."""
    go = threading.Event()

    def fault(doing: str, region: str, offset: int, nbytes: int) -> None:
        if doing == op:
            assert go.wait(300.0)

    store.fault = fault
    return go


def test_a_read_of_what_is_being_written_waits_for_it(store: Nvme):
    region, values, into = (
        store.region("shared", 4096, torch.float32),
        on_pages(numbered(4096)),
        blank(4096, torch.float32),
    )
    go = blocked(store, "write")
    region.write(0, values)
    reader = threading.Thread(target=lambda: region.read(0, into).wait())
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    assert store.read_bytes == 0
    go.set()
    reader.join(300.0)
    assert torch.equal(into, numbered(4096))


def test_a_write_over_what_is_being_read_waits_for_it(store: Nvme):
    region, into = store.region("shared", 4096, torch.float32), blank(4096, torch.float32)
    region.write(0, on_pages(numbered(4096))).wait()
    go = blocked(store, "read")
    reading = region.read(0, into)
    writer = threading.Thread(target=lambda: region.write(1024, on_pages(torch.zeros(1024))).wait())
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    go.set()
    writer.join(300.0)
    reading.wait()
    assert torch.equal(into, numbered(4096))


def test_transfers_that_share_nothing_do_not_wait_for_each_other(store: Nvme):
    region, into = store.region("shared", 4096, torch.float32), blank(1024, torch.float32)
    go = blocked(store, "write")
    writing = region.write(0, on_pages(numbered(2048)))
    region.read(2048, into).wait()
    assert not writing.done()
    go.set()
    writing.wait()
    assert writing.done()


def test_freed_space_serves_a_later_region_of_the_same_size(store: Nvme):
    first, other = (
        store.region("first", 3000, torch.float32),
        store.region("other", 3000, torch.float32),
    )
    other.write(0, on_pages(numbered(3000))).wait()
    held = store.nbytes
    store.free(first)
    store.free(first)
    second, third = (
        store.region("second", 6000, torch.bfloat16),
        store.region("third", 3000, torch.float32),
    )
    assert second.capacity == first.capacity
    assert store.nbytes == held + third.capacity, "freed twice is spare once"
    for region in (second, third):
        region.write(0, on_pages(torch.ones(region.numel, dtype=region.dtype))).wait()
    into = blank(3000, torch.float32)
    other.read(0, into).wait()
    assert torch.equal(into, numbered(3000))
    with pytest.raises(ValueError, match="it was freed"):
        first.read(0, into)


def test_free_waits_for_what_is_under_way(store: Nvme):
    region = store.region("busy", 1024, torch.float32)
    go = blocked(store, "write")
    writing = region.write(0, on_pages(numbered(1024)))
    freeing = threading.Thread(target=store.free, args=(region,))
    freeing.start()
    freeing.join(0.2)
    assert freeing.is_alive()
    go.set()
    freeing.join(300.0)
    assert writing.done()


def test_the_counters_say_what_the_disk_saw(store: Nvme):
    region = store.region("counted", 1500, torch.float32)
    assert (store.read_bytes, store.written_bytes, store.busy_seconds) == (0, 0, 0.0)
    begin = time.perf_counter()
    region.write(0, on_pages(numbered(1500))).wait()
    region.write(0, on_pages(numbered(1024))).wait()
    region.read(1024, blank(476, torch.float32)).wait()
    assert (store.read_bytes, store.written_bytes) == (PAGE, 3 * PAGE)
    assert 0 < store.busy_seconds <= time.perf_counter() - begin


def test_the_page_cache_does_not_grow(store: Nvme, tmp_path: Path):
    if lives_in_memory(tmp_path):
        pytest.skip("this file system has no other place than the page cache")
    region, buffer = store.region("large", 16 * MIB, torch.uint8), store.buffer(4 * MIB).fill_(3)
    for start in range(0, 16 * MIB, 4 * MIB):
        region.write(start, buffer).wait()
        region.read(start, buffer).wait()
    [file] = data_files(store)
    assert pages_in_cache(file) == 0
    with open(file, "rb") as plain:
        plain.read(MIB)
    assert pages_in_cache(file) >= MIB // PAGE, "an ordinary read is seen by this count"


def test_the_hosts_memory_is_the_callers_buffer_whatever_is_moved(store: Nvme):
    region, buffer = store.region("large", 64 * MIB, torch.uint8), store.buffer(2 * MIB).fill_(1)
    region.write(0, buffer).wait()
    region.read(0, buffer).wait()
    before = resident()
    for start in range(0, 64 * MIB, 2 * MIB):
        region.write(start, buffer).wait()
        region.read(start, buffer).wait()
    assert resident() - before < 2 * MIB, (
        f"{resident() - before:,} bytes more after moving {2 * region.nbytes:,}"
    )


def test_close_waits_ends_the_threads_and_refuses_everything_after(tmp_path: Path):
    before = set(threading.enumerate())
    store = Nvme(tmp_path, name="closed")
    assert set(threading.enumerate()) == before, "no thread before there is work"
    region, values = store.region("last", 4 * MIB, torch.float32), on_pages(numbered(4 * MIB))
    transfers = [
        region.write(start, values[start : start + MIB]) for start in range(0, 4 * MIB, MIB)
    ]
    store.close()
    assert all(transfer.done() for transfer in transfers)
    for transfer in transfers:
        transfer.wait()
    assert set(threading.enumerate()) == before
    assert not any(tmp_path.iterdir())
    store.close()
    for late in (
        lambda: region.read(0, values),
        lambda: region.write(0, values),
        lambda: store.region("late", 1, torch.float32),
    ):
        with pytest.raises(TierError, match="'closed' is closed"):
            late()


def test_a_transfer_refused_halfway_is_an_error_when_its_first_pieces_have_ended():
    """As when another thread closes the store meanwhile: the caller may use the memory again."""
    io, over = Io("closing", 1), []
    submit = io._executor.submit

    def slowly(op: str, region: str, piece: Piece) -> None:
        time.sleep(0.3)
        over.append(piece)

    def refusing(*arguments):
        io._executor.submit = closed
        return submit(*arguments)

    def closed(*arguments):
        raise RuntimeError("cannot schedule new futures after shutdown")

    io._move, io._executor.submit = slowly, refusing
    with pytest.raises(TierError, match="is closed"):
        io.start("read", "region", [Piece(None, 0, at, memoryview(bytearray(8))) for at in (0, 8)])
    assert len(over) == 1
    io.close()


def test_two_stores_in_one_process_do_not_meet(tmp_path: Path):
    with Nvme(tmp_path, name="same") as a, Nvme(tmp_path, name="same") as b:
        for store, value in ((a, 1.0), (b, 2.0)):
            store.region("weights", 1024, torch.float32).write(
                0, on_pages(torch.full((1024,), value))
            ).wait()
        assert a.folders != b.folders
        a.close()
        assert len(os.listdir(tmp_path)) == 1
        b.region("more", 1024, torch.float32).write(0, on_pages(torch.zeros(1024))).wait()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "0 threads"),
        ({"stripe": 1000}, "stripe=1,000"),
        ({"block": 0}, "block=0"),
        ({"name": "a/b"}, "'a/b'"),
        ({"paths": []}, "name at least one"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path, options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        Nvme(**{"paths": [tmp_path], "name": "refused", **options})
    assert not any(tmp_path.iterdir())
