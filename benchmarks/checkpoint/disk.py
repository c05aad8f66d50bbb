"""The disk's own rate, and the page cache.

A checkpoint's files are taken out of the page cache with posix_fadvise(DONTNEED), which needs no
privilege and leaves the rest of the machine's cache alone; that the bytes then came from the disk
shows in `read_bytes` of /proc/self/io. What a virtual disk's host keeps in its memory cannot be
seen from here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from pathlib import Path

CHUNK, PAGE = 4 << 20, mmap.PAGESIZE
#: Bytes that differ, so that a disk which compresses or finds doubles gains nothing.
VARIED = 64 << 20


def write(path: Path, nbytes: int, direct: int = 0, chunk: int = CHUNK) -> float:
    """Seconds to write and flush a new file of random bytes. `direct`: a further open flag."""
    content = mmap.mmap(-1, min(-(-nbytes // PAGE) * PAGE or PAGE, VARIED))  # begins on a page
    content.write(os.urandom(len(content)))
    whole = memoryview(content)
    begun = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct, 0o644)
    try:
        at = 0
        while at < nbytes:
            place = at % len(whole)
            at += os.write(file, whole[place : place + min(chunk, nbytes - at)])
        os.fsync(file)
    finally:
        os.close(file)
    return time.perf_counter() - begun


def write_direct(path: Path, nbytes: int) -> float | None:
    """The same past the page cache (O_DIRECT), in whole pages; None where that is not allowed."""
    try:
        return write(path, nbytes // PAGE * PAGE, os.O_DIRECT, 2 * CHUNK)
    except (OSError, AttributeError):
        return None


def read(path: Path) -> float:
    """Seconds to read a file from first to last into a small buffer."""
    buffer = bytearray(CHUNK)
    begun = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begun


def files(folder: Path) -> list[Path]:
    """Every file below the folder; or the file itself."""
    return [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())


def nbytes_of(folder: Path) -> int:
    """Bytes of every file below the folder."""
    return sum(path.stat().st_size for path in files(folder))


def flush(folder: Path) -> float:
    """Seconds to flush every file below the folder: none where the library has done it."""
    begun = time.perf_counter()
    for path in files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    return time.perf_counter() - begun


def evict(folder: Path) -> None:
    """Take every file below the folder out of this machine's page cache."""
    flush(folder)
    for path in files(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def remove(folder: Path) -> None:
    """Remove the folder or file, if it is there."""
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
