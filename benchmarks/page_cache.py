"""What of files lies in memory."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from pathlib import Path


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping,
        ):
            # A copy-on-write mapping, since this wants one that can be written to
            first = ctypes.c_char.from_buffer(mapping)
            failed = libc.mincore(ctypes.addressof(first), size, found)
            del first  # the mapping cannot be closed while anybody points into it
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore does not say what of {path} lies in memory")
        total += mmap.PAGESIZE * sum(byte & 1 for byte in found.raw)
    return total


def page_cache_bytes() -> int:
    """Bytes of all files that this machine holds in its page cache; shared memory, which is counted
    among them, is not.
    """
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return 1024 * (int(found["Cached"]) - int(found["Shmem"]))
