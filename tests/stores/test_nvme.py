"""State on NVMe: what is written is read, whatever the disk does; errors are told on every rank; and
nothing is left of a run that ended, or was killed.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.probes import cached_bytes
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import looks
import onefold
from examples import examples
from on_ranks import on_ranks
from onefold.offload.nvme import (
    PAGE,
    Nvme,
    TierError,
    page_buffer,
    reclaim,
    refuse_unless_fits,
)
from onefold.offload.nvme.files import DATA, LOCK, MARK, YOUNG
from zoo import TinyGPT, tokens_of

MIB = 1 << 20
SOURCE = str(Path(onefold.__file__).parents[1])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Nvme]:
    with Nvme([tmp_path], name="test", block=4 * PAGE) as store:
        yield store


def folders(parent: Path, *names: str) -> list[Path]:
    for name in names:
        (parent / name).mkdir()
    return [parent / name for name in names]


def on_pages(values: Tensor) -> Tensor:
    """The same values in memory that the disk can work on."""
    out = page_buffer(max(1, values.nbytes)).view(values.dtype)[: values.numel()]
    return out.copy_(values)


def blank(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return page_buffer(max(1, numel * dtype.itemsize)).view(dtype)[:numel]


def numbered(numel: int = 16 * PAGE, dtype: torch.dtype = torch.uint8) -> Tensor:
    return on_pages(torch.arange(numel).remainder(251).to(dtype))


def data_files(store: Nvme) -> list[Path]:
    return [folder / DATA for folder in store.folders]


# -- what is written is read -----------------------------------------------------------------------


def chunks(data: st.DataObject, numel: int, step: int) -> list[tuple[int, int]]:
    """[0, numel) cut at pages, in any order."""
    pages = -(-numel // step)
    inner = sorted(data.draw(st.sets(st.integers(1, pages - 1), max_size=4))) if pages > 1 else []
    return data.draw(
        st.permutations(list(itertools.pairwise([0, *(p * step for p in inner), numel])))
    )


@examples(60)
@given(data=st.data())
def test_what_is_written_is_read_in_any_pieces_also_where_transfers_are_short(
    data: st.DataObject,
) -> None:
    """Over any number of folders, of which each gets its share to a stripe."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    step = PAGE // dtype.itemsize
    sizes = data.draw(st.lists(st.integers(1, 40 * step), min_size=1, max_size=3))
    stripe, block = (data.draw(st.sampled_from([PAGE, 2 * PAGE, 5 * PAGE, MIB])) for _ in range(2))
    chance, lock = random.Random(data.draw(st.integers(0, 99))), threading.Lock()

    def fault(op: str, region: str, offset: int, nbytes: int) -> int | None:
        with lock:
            given = chance.choice([None, PAGE, 3 * PAGE])
        return None if given is None else min(given, nbytes)

    with tempfile.TemporaryDirectory() as parent:
        paths = folders(Path(parent), *map(str, range(data.draw(st.integers(1, 3)))))
        options = {"threads": data.draw(st.integers(1, 4)), "stripe": stripe, "block": block}
        with Nvme(paths, name="drawn", **options) as store:
            regions = [store.region(f"region {i}", numel, dtype) for i, numel in enumerate(sizes)]
            values = [torch.randint(0, 100, (numel,)).to(dtype) for numel in sizes]
            new = blank(sizes[0], dtype).fill_(7)
            regions[0].read(0, new).wait()
            assert not new.any(), "a new region holds zeros"
            store.fault = fault
            moved = store.read_bytes
            for region, expected in zip(regions, values, strict=True):
                pieces = chunks(data, region.numel, step)
                begun = [region.write(a, on_pages(expected[a:b])) for a, b in pieces]
                for transfer in begun:
                    transfer.wait()
            for region, expected in zip(regions, values, strict=True):
                for a, b in chunks(data, region.numel, step):
                    into = blank(b - a, dtype)
                    region.read(a, into).wait()
                    assert torch.equal(into, expected[a:b]), f"{region!r} from element {a} on"
            total = sum(region.capacity for region in regions)
            assert store.nbytes == store.written_bytes == store.read_bytes - moved == total
            held = [file.stat().st_size for file in data_files(store)]
            assert sum(held) == total and max(held) - min(held) <= len(sizes) * stripe
            assert sum(file.stat().st_blocks for file in data_files(store)) * 512 >= total, (
                "the files have holes: a full disk would show in the middle of a step"
            )
        assert not any(any(path.iterdir()) for path in paths)


FLOATS = page_buffer(4 * PAGE).view(torch.float32)
REFUSED = {
    "the region torch.float32": (0, FLOATS.view(torch.uint8)[:PAGE]),
    "side by side": (0, FLOATS[::2][:1024]),
    "it has 0 to 2,500": (2048, FLOATS[:1024]),
    "multiple of 1,024 elements": (1, FLOATS[:1024]),
    "begins on a page": (0, FLOATS[1:1025]),
    "or with the region": (0, FLOATS[:1000]),
    "on the host": (0, torch.empty(1024, device="meta")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_memory_that_the_disk_cannot_work_on_is_refused_and_never_copied(
    store: Nvme, words: str
) -> None:
    region = store.region("small", 2500, torch.float32)
    for transfer in (region.read, region.write):
        with pytest.raises(ValueError, match=words):
            transfer(*REFUSED[words])
    assert (store.read_bytes, store.written_bytes) == (0, 0)


def blocked(store: Nvme, op: str) -> threading.Event:
    """Transfers of this kind wait until the event is set."""
    go = threading.Event()

    def fault(doing: str, region: str, offset: int, nbytes: int) -> None:
        if doing == op:
            go.wait(60.0)

    store.fault = fault
    return go


@pytest.mark.parametrize("first", ["write", "read"])
def test_transfers_of_the_same_bytes_keep_their_order_and_others_do_not_wait(
    store: Nvme, first: str
) -> None:
    region, into = store.region("shared", 8192, torch.float32), blank(4096, torch.float32)
    old, new = numbered(4096, torch.float32), on_pages(torch.zeros(4096))
    region.write(0, old).wait()
    go = blocked(store, first)
    begun = region.write(0, new) if first == "write" else region.read(0, into)
    then = region.read if first == "write" else region.write
    then(4096, blank(1024, torch.float32)).wait()
    second = threading.Thread(target=lambda: then(0, into if first == "write" else new).wait())
    second.start()
    free = threading.Thread(target=store.free, args=(region,))
    assert not begun.done() and second.is_alive()
    go.set()
    second.join(300.0)
    begun.wait()
    assert torch.equal(into, new if first == "write" else old)
    go.clear()
    writing = region.write(0, old) if first == "write" else region.read(0, into)
    free.start()
    go.set()
    free.join(300.0)
    assert writing.done(), "its space was given to others under it"


def resident(kinds: tuple[str, ...] = ("RssAnon", "RssShmem")) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


def lives_in_memory(folder: Path) -> bool:
    """Whether files here have no other place than the page cache, as on tmpfs."""
    path = folder / "probe"
    path.write_bytes(bytes(PAGE))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    held = cached_bytes([path])
    path.unlink()
    return held > 0


def test_neither_the_page_cache_nor_the_hosts_memory_grows(store: Nvme, tmp_path: Path) -> None:
    region, buffer = store.region("large", 32 * MIB, torch.uint8), store.buffer(2 * MIB).fill_(1)
    owners = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    region.write(0, buffer).wait()
    before = resident()
    for start in range(0, 32 * MIB, 2 * MIB):
        region.write(start, buffer).wait()
        region.read(start, buffer).wait()
    assert resident() - before < 2 * MIB
    assert torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == owners
    if not lives_in_memory(tmp_path):
        assert cached_bytes(data_files(store)) == 0


def test_close_waits_ends_the_threads_and_refuses_everything_after(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Nvme(tmp_path, name="closed") as store, Nvme(tmp_path, name="closed") as other:
        region, values = store.region("last", 4 * MIB, torch.uint8), numbered(4 * MIB)
        transfers = [region.write(at, values[at : at + MIB]) for at in range(0, 4 * MIB, MIB)]
        store.close()
        assert all(transfer.done() for transfer in transfers)
        for late in (lambda: region.read(0, values), lambda: store.region("late", 1, torch.uint8)):
            with pytest.raises(TierError, match="'closed' is closed"):
                late()
        other.region("of another store", 1024, torch.uint8).write(0, blank(1024)).wait()
    assert set(threading.enumerate()) == before and not any(tmp_path.iterdir())


# -- disks that do not do what they are asked ------------------------------------------------------


def failing(op: str, error: OSError | int, times: int = 1 << 30) -> Callable[..., Any]:
    left, lock = [times], threading.Lock()

    def fault(doing: str, region: str, offset: int, nbytes: int) -> OSError | int | None:
        with lock:
            if doing != op or not left[0]:
                return None
            left[0] -= 1
            return error

    return fault


def broken(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_says_which_file_and_region_and_what_to_do_on_every_wait(
    store: Nvme, op: str
) -> None:
    region, other = (store.region(name, 16 * PAGE, torch.uint8) for name in ("moments", "masters"))
    for each in (region, other):
        each.write(0, numbered()).wait()
    store.fault = failing(op, broken(errno.EIO), times=1)
    transfer = getattr(region, op)(0, numbered())
    for _ in range(2):
        with pytest.raises(TierError) as caught:
            transfer.wait()
    words = [str(data_files(store)[0]), "'moments'", "Input/output error", "name another disk"]
    assert all(word in str(caught.value) for word in words) and transfer.done()
    found = blank(16 * PAGE)
    other.read(0, found).wait()
    assert torch.equal(found, numbered()), "other transfers are none the worse"

    def mistaken(*_: object) -> None:
        raise ZeroDivisionError("a mistake in here")

    store.fault = mistaken
    with pytest.raises(TierError, match="ZeroDivisionError: a mistake in here"):
        getattr(region, op)(0, numbered()).wait()


@pytest.mark.parametrize("given", [0, 100])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_moves_nothing_is_an_error_and_no_endless_loop(
    store: Nvme, op: str, given: int
) -> None:
    region = store.region("stuck", 16 * PAGE, torch.uint8)
    store.fault = failing(op, given)
    with pytest.raises(TierError, match=r"ended after 0 of .* the file was cut short"):
        getattr(region, op)(0, numbered()).wait()


@pytest.mark.parametrize("size", [0, 5 * PAGE + 100])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_file_that_somebody_cuts_short_is_an_error_and_does_not_grow_again(
    store: Nvme, op: str, size: int
) -> None:
    """What is missing would read as zeros."""
    region = store.region("cut", 16 * PAGE, torch.uint8)
    region.write(0, numbered()).wait()
    [file] = data_files(store)
    os.truncate(file, size)
    with pytest.raises(TierError, match=rf"was cut short to {size:,} bytes by somebody else"):
        getattr(region, op)(0, numbered()).wait()
    assert file.stat().st_size == size


@pytest.mark.parametrize("what", ["removed", "read", "write"])
def test_a_removed_file_or_one_without_direct_transfers_still_serves_and_is_mentioned_once(
    store: Nvme, what: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    region, found = store.region("odd", MIB, torch.uint8), blank(MIB)
    [file] = data_files(store)
    if what == "removed":
        file.unlink()
    elif not store.direct:
        pytest.skip("this file system takes no direct transfers")
    else:
        store.fault = failing(what, broken(errno.EINVAL), times=1)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            region.write(0, numbered(MIB)).wait()
            region.read(0, found).wait()
    assert torch.equal(found, numbered(MIB))
    said = "nothing is lost" if what == "removed" else "takes no direct transfers"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    assert what == "removed" or lives_in_memory(tmp_path) or cached_bytes([file]) == 0


def test_a_full_disk_shows_when_space_is_asked_for_and_all_of_it_is_given_back(
    tmp_path: Path,
) -> None:
    with Nvme(folders(tmp_path, "a", "b"), name="full", stripe=PAGE) as store:
        store.region("fits", 4 * PAGE, torch.uint8)
        calls: list[str] = []

        def second_is_full(op: str, region: str, offset: int, nbytes: int) -> OSError | None:
            calls.append(op)
            return broken(errno.ENOSPC) if len(calls) == 2 else None

        store.fault = second_is_full
        with pytest.raises(TierError, match=r"'does not' in .* No space left on device; free"):
            store.region("does not", 4 * PAGE, torch.uint8)
        store.fault = None
        assert store.nbytes == 4 * PAGE
        assert [file.stat().st_size for file in data_files(store)] == [2 * PAGE, 2 * PAGE]
        region, found = store.region("fits too", 4 * PAGE, torch.uint8), blank(4 * PAGE)
        region.write(0, numbered(4 * PAGE)).wait()
        region.read(0, found).wait()
        assert torch.equal(found, numbered(4 * PAGE))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, hard))
        try:
            with pytest.raises(TierError, match="File too large; files may not grow that large"):
                store.region("too large", 256 * MIB, torch.uint8)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.nbytes == 8 * PAGE


# -- before a run ----------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_also_by_folders_that_share_a_disk(tmp_path: Path) -> None:
    free, paths = shutil.disk_usage(tmp_path).free, folders(tmp_path, "a", "b")
    dead = left_behind(tmp_path)
    refuse_unless_fits([tmp_path], free // 2, "the states")
    assert not dead.exists(), "what the dead have left does not count as full"
    for where, need, said in (
        ([tmp_path], 4 * free, rf"the states: {4 * free:,} bytes are needed at {tmp_path}"),
        (paths, int(1.5 * free), f"{paths[0]} and {paths[1]}"),  # each half would fit
        ([tmp_path / "missing"], 1, "is not there"),
    ):
        with pytest.raises(TierError, match=said):
            refuse_unless_fits(where, need, "the states")
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "missing", "is not there. Create it"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(TierError, match=said):
            Nvme([paths[0], path], name="refused")
    assert not any(paths[0].iterdir())


# -- folders of runs -------------------------------------------------------------------------------

#: Opens a store on sys.argv[1], says so and does what the last line says.
OPEN = """
import os, sys, time, torch
from onefold.offload.nvme import Nvme
store = Nvme([sys.argv[1]], name="other", threads=2)
region = store.region("weights", 16 << 20, torch.uint8)
buffer = store.buffer(16 << 20)
transfers = [region.write(0, buffer), region.read(0, buffer)]
print("open", flush=True)
"""


def started(path: Path, then: str) -> subprocess.Popen[str]:
    """A program of its own that has opened a store."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN + textwrap.dedent(then), str(path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def left_behind(parent: Path, mark: bytes = MARK + b"\n", age: float = 0.0) -> Path:
    """A folder as a killed process leaves it."""
    folder = parent / f"onefold-dead-4711-{secrets.token_hex(4)}"
    folder.mkdir()
    (folder / LOCK).write_bytes(mark)
    (folder / DATA).write_bytes(bytes(PAGE))
    for path in (folder / LOCK, folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


def test_after_a_kill_or_an_error_the_next_start_removes_what_was_left_and_only_that(
    tmp_path: Path,
) -> None:
    killed, living, raises = (
        started(tmp_path, then)
        for then in ("time.sleep(600)", "sys.stdin.read()", "raise ValueError('of the program')")
    )
    try:
        _, errors = raises.communicate(timeout=300)
        assert raises.returncode == 1 and "Exception ignored" not in errors, errors
        killed.kill()
        killed.communicate(timeout=300)
        assert len(os.listdir(tmp_path)) == 2, "a killed process leaves its folder"
        with Nvme([tmp_path], name="next"):
            left = {path.name.split("-")[2] for path in tmp_path.iterdir()}
            assert left == {str(os.getpid()), str(living.pid)}
        _, errors = living.communicate("go on", timeout=300)
        assert living.returncode == 0 and not any(tmp_path.iterdir()), errors
    finally:
        for process in (killed, living, raises):
            process.kill()
            process.communicate()


def test_nothing_is_removed_that_is_not_ours_or_is_being_made(tmp_path: Path) -> None:
    [elsewhere] = folders(tmp_path, "elsewhere")
    other_mark = left_behind(tmp_path, mark=b"somebody else's lock", age=2 * YOUNG)
    no_lock, unmarked = left_behind(tmp_path), left_behind(tmp_path, mark=b"")
    (no_lock / LOCK).unlink()
    other_name = left_behind(tmp_path).rename(tmp_path / "onefold-checkpoints")
    link = tmp_path / "onefold-link-1-00000000"
    link.symlink_to(left_behind(elsewhere), target_is_directory=True)
    with_more = left_behind(tmp_path)
    (with_more / "thesis.txt").write_text("the only copy")
    assert reclaim(tmp_path) == []
    for path in (other_mark, no_lock, unmarked, other_name, link):
        assert (path / DATA).exists(), path
    assert (with_more / "thesis.txt").read_text() == "the only copy"


# -- on ranks --------------------------------------------------------------------------------------


class Run:
    """A model whose state is on the disk in `folder`, and its steps."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        tiers = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": str(folder)}
        recipe = onefold.Recipe.zero(3, stall_timeout=20.0, **tiers, **options)
        self.model: Any = onefold.shard(TinyGPT(), recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        loss = self.model(tokens_of(10 * number + dist.get_rank()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def break_disk(self, op: str, kind: str, code: int = errno.EIO) -> None:
        """Of rank 1, for states of this kind."""
        if dist.get_rank() == 1:
            looks.disk(self.model).fault = lambda o, region, offset, nbytes: (
                broken(code) if o == op and kind in region else None
            )


@on_ranks(2)
@pytest.mark.parametrize(
    ("op", "kind", "code"),
    [
        ("write", "exp_avg", errno.ENOSPC),
        ("read", "exp_avg", errno.EIO),
        ("write", "master", errno.EIO),
    ],
)
def test_a_disk_that_fails_in_the_middle_of_a_step_stops_every_rank_for_good(
    op: str, kind: str, code: int, folder: Path
) -> None:
    run = Run(folder)
    run.step(0)
    run.break_disk(op, kind, code)
    said = f"rank 1, in the middle of the step.*{os.strerror(code)}"
    with pytest.raises(onefold.TierError, match=f"(?s){said}"):
        run.step(1)
    with pytest.raises(onefold.TierError, match="last checkpoint"):
        run.step(2)
    with pytest.raises((onefold.CheckpointError, onefold.TierError)):
        onefold.save(folder / "checkpoint", model=run.model, optimizer=run.optimizer)
    assert not (folder / "checkpoint").exists()


@on_ranks(2)
@pytest.mark.parametrize(("op", "kind"), [("read", "master"), ("write", "gradient")])
def test_a_disk_that_fails_before_the_step_leaves_every_rank_as_it_was(
    op: str, kind: str, folder: Path
) -> None:
    plain, run = Run(folder), Run(folder)
    assert plain.step(0) == run.step(0)
    run.break_disk(op, kind)
    with pytest.raises(
        onefold.TierError, match=r"(?s)rank 1, before the step.*nothing has been ste"
    ):
        run.step(1)
    looks.disk(run.model).fault = None
    run.optimizer.zero_grad()
    assert [run.step(2), run.step(3)] == [plain.step(2), plain.step(3)]


@on_ranks(2, fresh=True)
@pytest.mark.parametrize("free", [1000, 20 * MIB])
def test_a_run_that_will_not_fit_is_refused_on_every_rank_before_it_begins(
    free: int, folder: Path
) -> None:
    """A state that fits is taken, though there is no room to measure the disk."""
    if dist.get_rank() == 1:  # the disk of one host only
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 30, (1 << 30) - free, free)
    if free > 1000:
        Run(folder).step(0)
        return
    with pytest.raises(onefold.TierError, match=r"(?s)^rank 1, before the run: .* 1,000 are free"):
        Run(folder)
    dist.barrier()
    assert list(folder.iterdir()) == []


@on_ranks(2)
def test_code_that_computes_with_a_parameter_on_nvme_is_told_so(folder: Path) -> None:
    run = Run(folder)
    run.model(tokens_of(0)).backward()
    p: Any = next(p for p in run.model.parameters() if p.numel())
    for compute in (
        lambda: p.sum(),
        lambda: p.data.mul_(2),
        lambda: p.grad.norm(),
        lambda: p.grad.zero_(),
        lambda: torch.add(p, 1),
    ):
        with pytest.raises(RuntimeError, match="stored on NVMe"):
            compute()
    assert p.shape == p.grad.shape and "NVMe" in repr(p) and "NVMe" in repr(p.grad)
    with onefold.full_params(run.model):
        assert all(bool(p.isfinite().all()) for p in run.model.parameters())
