"""Measure the disks, and check before a run that its state will fit on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onefold.memory import TierError, failure
from onefold.offload.nvme.buffer import bytes_of, page_buffer, rounded
from onefold.offload.nvme.datafile import READ, WRITE, DataFile
from onefold.offload.nvme.files import as_paths, check_folder, reclaim
from onefold.offload.nvme.io import Io, Piece, Transfer

_BLOCK = 4 << 20
#: Bytes that must be free for a disk to be measured.
ROOM_TO_MEASURE = 10 * _BLOCK


@dataclass(frozen=True)
class DiskRate:
    """The rates of a folder's disk.

    Attributes:
        read, write: bytes per second, with several blocks under way at a time. Writing includes the
            final fsync.
        free: bytes that this user may still write.
        direct: whether transfers use direct I/O.
    """

    path: str
    read: float
    write: float
    free: int
    direct: bool


def measure(
    paths: Sequence[str | Path] | str | Path,
    nbytes: int = 64 << 20,
    *,
    threads: int = 4,
    seconds: float = 0.5,
) -> list[DiskRate]:
    """Measure each path in turn: write at most `nbytes`, then read them again.

    Writing and reading each end after `seconds`. The file has no name, so it is gone afterwards
    even if this process is killed.

    Raises:
        TierError: a path is missing, is not writable or has no room to measure in.
    """
    return [_measure(path, nbytes, threads, seconds) for path in as_paths(paths)]


def refuse_unless_fits(paths: Sequence[str | Path] | str | Path, need: int, what: str) -> None:
    """Raise if `need` bytes, striped over `paths`, do not fit.

    Stale folders of crashed runs are removed first. Folders on one file system share its free
    space.

    Args:
        need: bytes of all ranks of this host together.
        what: the subject of the message.

    Raises:
        TierError: the bytes do not fit, or a path is missing.
    """
    together: dict[int, list[Path]] = defaultdict(list)
    given = as_paths(paths)
    for path in given:
        check_folder(path)
        reclaim(path)
        together[path.stat().st_dev].append(path)
    for folders in together.values():
        share, free = need * len(folders) // len(given), shutil.disk_usage(folders[0]).free
        if share > free:
            of = "" if share == need else f" of its {need:,} bytes"
            raise TierError(
                f"{what}: {share:,} bytes{of} are needed at {' and '.join(map(str, folders))},"
                f" where {free:,} are free. Free {share - free:,} bytes there, name larger or more"
                f" disks in nvme=, or store more on the host or the device."
            )


def _measure(path: Path, nbytes: int, threads: int, seconds: float) -> DiskRate:
    check_folder(path)
    free = shutil.disk_usage(path).free
    if free < ROOM_TO_MEASURE:
        raise TierError(
            f"{path} has {free:,} bytes free, too few to measure the disk; free some space or name"
            f" another folder in nvme=."
        )
    nbytes = rounded(min(nbytes, free // 10))
    staging = page_buffer(threads * _BLOCK)
    # Random bytes, since some disks compress or deduplicate. The generator is a new one: the run's
    # own must not advance.
    staging.view(torch.int64).random_(
        generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    )
    try:
        # The threads end before their file is closed.
        with (
            contextlib.closing(DataFile.nameless(path)) as file,
            contextlib.closing(Io("preflight", threads)) as io,
        ):
            file.extend(nbytes)
            written, write_s = _move(io, WRITE, file, staging, nbytes, seconds)
            read, read_s = _move(io, READ, file, staging, written, seconds)
            return DiskRate(
                str(path),
                read=read / read_s,
                write=written / write_s,
                free=free,
                direct=file.direct,
            )
    except OSError as error:
        raise failure("measuring the disk at", path, error) from None


def _move(
    io: Io, op: str, file: DataFile, staging: torch.Tensor, nbytes: int, seconds: float
) -> tuple[int, float]:
    """Move `nbytes`, or as many as can be started within `seconds`. Return the bytes moved and the
    seconds it took. Raises: OSError, TierError.
    """
    under_way: deque[Transfer] = deque()
    slots = staging.numel() // _BLOCK
    memory = bytes_of(staging.untyped_storage(), 0, staging.numel())
    moved = turn = 0
    begin = time.perf_counter()
    while moved < nbytes and time.perf_counter() - begin < seconds:
        if len(under_way) == slots:
            under_way.popleft().wait()
        length, at = min(_BLOCK, nbytes - moved), turn % slots * _BLOCK
        under_way.append(
            io.start(op, "preflight", [Piece(file, moved, moved, memory[at : at + length])])
        )
        moved, turn = moved + length, turn + 1
    for transfer in under_way:
        transfer.wait()
    if op == WRITE:
        file.flush()
    return moved, time.perf_counter() - begin
