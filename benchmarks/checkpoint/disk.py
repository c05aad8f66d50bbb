"""The disk's own rate, the page cache, and what the kernel counted for this process.

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

CHUNK = 4 << 20
# Bytes that differ, so that a disk which compresses or finds doubles gains nothing
_VARIED = 64 << 20


def write(path: Path, nbytes: int) -> float:
    """Seconds to write a new file of that many random bytes from first to last and have the disk
    know it (fsync).
    """
    content = memoryview(os.urandom(min(nbytes, _VARIED)))
    begun = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        at = 0
        while at < nbytes:
            place = at % max(1, len(content))
            at += os.write(file, content[place : place + min(CHUNK, nbytes - at)])
        os.fsync(file)
    finally:
        os.close(file)
    return time.perf_counter() - begun


def write_direct(path: Path, nbytes: int) -> float | None:
    """The same without the page cache (O_DIRECT), to whole pages; None where the file system does
    not let us.
    """
    content = mmap.mmap(-1, 2 * CHUNK)  # begins on a page, as O_DIRECT asks
    content.write(os.urandom(2 * CHUNK))
    whole, page = memoryview(content), mmap.PAGESIZE
    begun = time.perf_counter()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    except (OSError, AttributeError):
        return None
    try:
        at, end = 0, nbytes // page * page
        while at < end:
            at += os.write(file, whole[: min(len(whole), end - at)])
        os.fsync(file)
    except OSError:
        return None
    finally:
        os.close(file)
    return time.perf_counter() - begun


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
    """Seconds until the disk knows every file below the folder: nothing where the library has
    flushed them.
    """
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


def settle() -> None:
    """Wait until the disk has all that was written or removed so far, so that what follows does not
    pay for it.
    """
    os.sync()


def counters() -> dict[str, int]:
    """Bytes of this process so far: `read_calls` and `write_calls` through system calls,
    `read_disk` and `write_disk` of the disk.

    Empty where the kernel does not say.
    """
    names = {
        "rchar": "read_calls",
        "wchar": "write_calls",
        "read_bytes": "read_disk",
        "write_bytes": "write_disk",
    }
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(": ") for line in lines)
    return {ours: int(found[theirs]) for theirs, ours in names.items()}


def since(before: dict[str, int]) -> dict[str, int]:
    """The counters less those of `before`."""
    return {name: value - before[name] for name, value in counters().items() if name in before}


def file_system(folder: Path) -> str:
    """The type of the file system that the folder lies on, as the kernel calls it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    here = folder.resolve()
    around = [m for m in mounts if here.is_relative_to(m[1])]
    return max(around, key=lambda m: len(m[1]))[2] if around else "unknown"
