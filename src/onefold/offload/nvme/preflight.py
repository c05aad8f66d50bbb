"""What the disks give, and whether what is meant to rest on them will fit: known before a run
begins.
"""

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

from onefold.memory.tier_error import TierError, failure
from onefold.offload.nvme.buffer import bytes_of, page_buffer, rounded
from onefold.offload.nvme.datafile import READ, WRITE, DataFile
from onefold.offload.nvme.files import as_paths, check_folder, reclaim
from onefold.offload.nvme.io import Io, Piece, Transfer

_BLOCK = 4 << 20
#: Bytes that must be free for a disk to be measured.
ROOM_TO_MEASURE = 10 * _BLOCK


@dataclass(frozen=True)
class DiskRate:
    """What a folder's disk gives.

    Attributes:
        read, write: bytes a second, several blocks under way at a time; writing includes that the
            disk has really got them.
        free: bytes that this user may still write.
        direct: whether transfers go past the page cache by themselves.
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
    """Write `nbytes` at most to each path, one after another, and read them again; each of the two
    ends after `seconds`.

    What is written has no name and is gone afterwards, however this ends.

    Raises:
        TierError: a path is not there, cannot be written or has no room to measure in.
    """
    return [_measure(path, nbytes, threads, seconds) for path in as_paths(paths)]


def refuse_unless_fits(paths: Sequence[str | Path] | str | Path, need: int, what: str) -> None:
    """Say before the run that `what`, `need` bytes of all ranks of this host together, striped over
    `paths`, finds no room.

    What killed processes have left there is removed first. Folders on one file system share what is
    free in it.

    Raises:
        TierError: it does not fit, or a path is not there.
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
                " disks in nvme=, or store more on the host or the device."
            )


def _measure(path: Path, nbytes: int, threads: int, seconds: float) -> DiskRate:
    check_folder(path)
    free = shutil.disk_usage(path).free
    if free < ROOM_TO_MEASURE:
        raise TierError(
            f"{path} has {free:,} bytes free, too few to measure the disk; free some space or name"
            " another folder in nvme=."
        )
    nbytes = rounded(min(nbytes, free // 10))
    staging = page_buffer(threads * _BLOCK)
    # Some disks compress or look for repetitions. A generator of its own: the run's random numbers
    # are not ours to use up.
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
    """Bytes moved and the seconds that took: `nbytes`, or what was begun within `seconds`. Raises:
    OSError, TierError.
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
