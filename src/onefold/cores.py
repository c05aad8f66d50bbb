"""The host's cores. Needs no torch: a launcher asks."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Return the physical cores that this process may use, within the cgroup's quota."""
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    cores = set()
    for cpu in allowed:
        siblings = _CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    count = len(cores)
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or a quota of "max"
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        count = min(count, math.ceil(float(quota) / float(period)))
    return max(1, count)
