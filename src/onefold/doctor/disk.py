"""Measure the speed of a folder's disk, with one temporary file of bounded size and no name."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

#: Bytes of one write or read, and of all.
CHUNK, MOST = 4 << 20, 256 << 20
#: Seconds after which writing stops, whatever is left: a slow disk shows its rate with fewer bytes.
LONGEST = 8.0


def measure_disk(folder: Path) -> dict[str, float]:
    """Write at most `MOST` bytes (and at most a tenth of the free ones), flush them to the disk, and
    read them past the page cache, where the system can drop it. Returns bytes per second.
    Raises ValueError: the folder does not exist, cannot be written, or is full.
    """
    if not folder.is_dir():
        raise ValueError(f"--disk {folder}: there is no such folder.")
    free = shutil.disk_usage(folder).free
    most = min(MOST, free // 10)
    if most < CHUNK:
        raise ValueError(
            f"--disk {folder}: {free:,} bytes are free, too few to measure; free some space or name"
            " another folder."
        )
    # Random bytes, because some file systems compress, and write zeros as holes in no time
    chunk, buffer, written = os.urandom(CHUNK), bytearray(CHUNK), 0
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            while written < most and time.perf_counter() - begin < LONGEST:
                written += file.write(chunk)
            os.fsync(file.fileno())
            flushed = time.perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            middle = time.perf_counter()
            while file.readinto(buffer):
                pass
            end = time.perf_counter()
    except OSError as error:
        raise ValueError(
            f"--disk {folder}: {error.strerror}. Name a folder that can be written."
        ) from None
    return {"nvme_write": written / (flushed - begin), "nvme_bandwidth": written / (end - middle)}
