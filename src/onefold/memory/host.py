"""The memory of this host: how much is free, and how much there is."""

from __future__ import annotations

import os
import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Return the bytes of memory that can be allocated without swapping: the kernel's figure or the
    cgroup's, whichever is lower.
    """
    candidates = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
        if found:
            candidates.append(int(found.group(1)) * 1024)
    except OSError:
        pass
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            cache = re.search(
                r"^inactive_file (\d+)", (_CGROUP / "memory.stat").read_text(), re.MULTILINE
            )
            candidates.append(int(limit) - used + (int(cache.group(1)) if cache else 0))
    except (OSError, ValueError):
        pass
    if not candidates and hasattr(os, "sysconf"):
        candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(candidates))


def total_host_memory() -> int:
    """Return the bytes of host memory that this process may use at most: the machine's or the
    cgroup's limit, whichever is lower; 0 if neither is known.
    """
    found = (
        [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    )
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        found += [] if limit == "max" else [int(limit)]
    except (OSError, ValueError):
        pass
    return min(found, default=0)
