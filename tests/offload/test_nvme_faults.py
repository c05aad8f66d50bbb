"""When a disk does not do what it was asked: an error in words on every wait, no hang, and the rest
goes on.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvme_tools import blank, data_files, lives_in_memory, on_pages, pages_in_cache

from examples import examples
from onefold.offload.nvme import PAGE, Nvme, TierError

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path):
    with Nvme([tmp_path], name="test", block=4 * PAGE) as store:
        yield store


def values(numel: int = 16 * PAGE) -> torch.Tensor:
    return on_pages(torch.arange(numel).remainder(251).to(torch.uint8))


def failing(
    op: str, error: OSError | int, times: int = 1 << 30
) -> Callable[[str, str, int, int], OSError | int | None]:
    left, lock = [times], threading.Lock()

    def fault(doing: str, region: str, offset: int, nbytes: int) -> OSError | int | None:
        with lock:
            if doing != op or not left[0]:
                return None
            left[0] -= 1
            return error

    return fault


@examples(40)
@given(data=st.data())
def test_short_reads_and_writes_are_continued_until_all_is_moved(data):
    lengths = st.integers(1, 9).map(lambda pages: pages * PAGE) | st.none()
    shortened, lock = data.draw(st.lists(lengths, max_size=30)), threading.Lock()

    def fault(op: str, region: str, offset: int, nbytes: int) -> int | None:
        with lock:
            given = shortened.pop() if shortened else None
        return None if given is None else min(given, nbytes)

    numel = data.draw(st.integers(1, 40 * PAGE))
    expected = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    with (
        tempfile.TemporaryDirectory() as a,
        tempfile.TemporaryDirectory() as b,
        Nvme([a, b], name="short", stripe=4 * PAGE, block=3 * PAGE) as store,
    ):
        region = store.region("short", numel, torch.uint8)
        store.fault = fault
        region.write(0, on_pages(expected)).wait()
        found = blank(numel, torch.uint8)
        region.read(0, found).wait()
        assert torch.equal(found, expected)
        assert store.read_bytes == store.written_bytes == region.capacity, (
            "what was moved is counted once"
        )


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_error_says_which_file_and_region_and_what_to_do_on_every_wait(store: Nvme, op: str):
    region, other = (
        store.region("moments", 16 * PAGE, torch.uint8),
        store.region("masters", 16 * PAGE, torch.uint8),
    )
    other.write(0, values()).wait()
    region.write(0, values()).wait()
    store.fault = failing(op, OSError(errno.EIO, os.strerror(errno.EIO)), times=1)
    transfer = getattr(region, op)(0, values())
    for _ in range(2):
        with pytest.raises(TierError) as caught:
            transfer.wait()
    for part in (
        str(data_files(store)[0]),
        "'moments'",
        "Input/output error",
        "name another disk in nvme=",
        op.removesuffix("e"),
    ):
        assert part in str(caught.value)
    assert transfer.done()
    found = blank(16 * PAGE, torch.uint8)
    other.read(0, found).wait()
    assert torch.equal(found, values()), "other transfers are none the worse"


def test_after_one_piece_has_failed_the_rest_of_the_transfer_is_left_out(tmp_path: Path):
    with Nvme([tmp_path], name="one", threads=1, block=PAGE) as store:
        region = store.region("many pieces", 64 * PAGE, torch.uint8)
        store.fault = failing("write", OSError(errno.EIO, "dead"), times=1)
        with pytest.raises(TierError, match="dead"):
            region.write(0, values(64 * PAGE)).wait()
        assert store.written_bytes == 0


@pytest.mark.parametrize("given", [0, 100])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_transfer_that_moves_nothing_is_an_error_and_no_endless_loop(
    store: Nvme, op: str, given: int
):
    region = store.region("stuck", 16 * PAGE, torch.uint8)
    store.fault = failing(op, given)
    with pytest.raises(TierError, match=r"ended after 0 of .* the file was cut short"):
        getattr(region, op)(0, values()).wait()


@pytest.mark.parametrize("size", [0, PAGE, 5 * PAGE + 100])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_file_that_somebody_cuts_short_is_an_error_for_reads_and_writes(
    store: Nvme, op: str, size: int
):
    region = store.region("cut", 16 * PAGE, torch.uint8)
    region.write(0, values()).wait()
    [file] = data_files(store)
    os.truncate(file, size)
    with pytest.raises(
        TierError,
        match=rf"was cut short to {size:,} bytes by somebody else while 65,536 are in use",
    ):
        getattr(region, op)(0, values()).wait()
    assert file.stat().st_size == size, (
        "a write must not make it grow again: what is missing would read as zeros"
    )


def test_a_file_that_somebody_removes_still_serves_and_is_mentioned_once(
    store: Nvme, caplog: pytest.LogCaptureFixture
):
    region, found = store.region("removed", 16 * PAGE, torch.uint8), blank(16 * PAGE, torch.uint8)
    [file] = data_files(store)
    file.unlink()
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(3):
            region.write(0, values()).wait()
            region.read(0, found).wait()
    assert torch.equal(found, values())
    more = store.region("made later", 16 * PAGE, torch.uint8)
    more.write(0, values()).wait()
    said = [record.getMessage() for record in caplog.records if str(file) in record.getMessage()]
    assert len(said) == 1
    assert "nothing is lost" in said[0]


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_file_system_without_direct_transfers_is_served_through_an_empty_cache(
    store: Nvme, op: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    if not store.direct:
        pytest.skip("this file system takes no direct transfers")
    region, found = store.region("refused", MIB, torch.uint8), blank(MIB, torch.uint8)
    store.fault = failing(op, OSError(errno.EINVAL, os.strerror(errno.EINVAL)), times=1)
    with caplog.at_level(logging.WARNING, "onefold"):
        for _ in range(2):
            region.write(0, values(MIB)).wait()
            region.read(0, found).wait()
    assert torch.equal(found, values(MIB))
    assert not store.direct
    assert sum("takes no direct transfers" in record.getMessage() for record in caplog.records) == 1
    assert lives_in_memory(tmp_path) or pages_in_cache(data_files(store)[0]) == 0


def test_an_invalid_argument_that_direct_transfers_do_not_explain_is_an_error(store: Nvme):
    region = store.region("invalid", 16 * PAGE, torch.uint8)
    store.fault = failing("read", OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
    with pytest.raises(TierError, match="Invalid argument"):
        region.read(0, values()).wait()


def test_anything_else_that_goes_wrong_on_a_thread_reaches_who_waits(store: Nvme):
    def fault(*_: object) -> None:
        raise ZeroDivisionError("a mistake in here")

    region = store.region("mistake", 16 * PAGE, torch.uint8)
    store.fault = fault
    with pytest.raises(TierError, match="ZeroDivisionError: a mistake in here"):
        region.write(0, values()).wait()


def test_a_full_disk_shows_when_space_is_asked_for_and_all_of_it_is_given_back(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with Nvme(paths, name="full", stripe=PAGE) as store:
        store.region("fits", 4 * PAGE, torch.uint8)
        calls = []

        def fault(op: str, region: str, offset: int, nbytes: int) -> OSError | None:
            calls.append((op, region))
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if len(calls) == 2 else None

        store.fault = fault
        with pytest.raises(
            TierError,
            match=(
                r"allocating 8,192 bytes for region 'does not' in .* No space left on device; free"
                r" space"
            ),
        ):
            store.region("does not", 4 * PAGE, torch.uint8)
        assert calls == [("allocate", "does not")] * 2, "the second folder's disk was the full one"
        assert store.nbytes == 4 * PAGE
        assert [file.stat().st_size for file in data_files(store)] == [2 * PAGE, 2 * PAGE]
        region, found = (
            store.region("fits too", 4 * PAGE, torch.uint8),
            blank(4 * PAGE, torch.uint8),
        )
        region.write(0, values(4 * PAGE)).wait()
        region.read(0, found).wait()
        assert torch.equal(found, values(4 * PAGE))


def test_the_systems_own_limit_on_files_is_a_full_disk_in_words(store: Nvme):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * MIB, hard))
    try:
        with pytest.raises(TierError, match="File too large; files may not grow that large here"):
            store.region("too large", 128 * MIB, torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.nbytes == 0
    assert data_files(store)[0].stat().st_blocks == 0, "nothing stays allocated"


def test_a_really_full_disk_refuses_a_region_and_serves_those_it_has(tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        with Nvme([small], name="full") as store:
            region, found = store.region("fits", 4 * MIB, torch.uint8), blank(4 * MIB, torch.uint8)
            with pytest.raises(TierError, match="No space left on device"):
                store.region("does not", 8 * MIB, torch.uint8)
            assert store.nbytes == 4 * MIB
            region.write(0, values(4 * MIB)).wait()
            region.read(0, found).wait()
            assert torch.equal(found, values(4 * MIB))
            store.region("smaller", 2 * MIB, torch.uint8)
        assert not any(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
