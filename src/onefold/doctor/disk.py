"""Measure the speed of a folder's disk, with one temporary file of bounded size and no name."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from onefold.machine.measured import Disk

#: Bytes of one write or read of a disk.
CHUNK = 4 << 20
#: Seconds after which writing stops, whatever is left: a slow disk shows its rate with fewer bytes.
LONGEST = 8.0


def measure_disk(folder: str | Path, nbytes: int) -> Disk:
    """Write at most `nbytes` (and at most a tenth of the free bytes), flush them to the disk, and
    read them past the page cache.

    Raises:
        ValueError: the folder does not exist, cannot be written, or is full.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"--disk {folder}: there is no such folder.")
    free = shutil.disk_usage(path).free
    nbytes = min(nbytes, free // 10)
    if nbytes < CHUNK:
        raise ValueError(
            f"--disk {folder}: {free:,} bytes are free, too few to measure; free some space or name"
            " another folder."
        )
    try:
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            written, write_s = _write(file.fileno(), nbytes)
            cached = not _forget(file.fileno())
            read_s = _read(file.fileno(), written)
    except OSError as error:
        raise ValueError(
            f"--disk {folder}: {error.strerror}. Name a folder that can be written."
        ) from None
    return Disk(str(path.resolve()), write=written / write_s, read=written / read_s, cached=cached)


def _write(file: int, nbytes: int) -> tuple[int, float]:
    # Random bytes, because some file systems compress, and write zeros as holes in no time
    chunk = memoryview(os.urandom(CHUNK))
    written = 0
    begin = time.perf_counter()
    while written < nbytes and time.perf_counter() - begin < LONGEST:
        written += os.write(file, chunk[: nbytes - written])
    os.fsync(file)
    return written, time.perf_counter() - begin


def _read(file: int, nbytes: int) -> float:
    os.lseek(file, 0, os.SEEK_SET)
    chunk = bytearray(CHUNK)
    begin = time.perf_counter()
    while nbytes > 0 and (got := os.readv(file, [chunk])):
        nbytes -= got
    return time.perf_counter() - begin


def _forget(file: int) -> bool:
    """Drop the file's pages from the page cache. False if the system cannot do that."""
    if not hasattr(os, "posix_fadvise"):
        return False
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
