"""What this machine has for a run: cores and memory that this process may really use (affinity and cgroups counted in)."""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU = Path("/sys/devices/system/cpu")


def allowed_cpus() -> set[int]:
    """CPU numbers this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores this process may use, at least 1: hyper-threads of one core count once, a cgroup quota is a limit."""
    cores = set()
    for cpu in allowed_cpus():
        siblings = _CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    quota = _cpu_quota()
    return max(1, len(cores) if math.isinf(quota) else min(len(cores), math.ceil(quota)))


def _cpu_quota() -> float:
    """CPUs that the cgroup allows, inf if it does not say."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return math.inf if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        return math.inf


def free_host_memory() -> int:
    """Bytes of memory that can be taken without swapping: the least of what the kernel and the cgroup say."""
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
            cache = re.search(r"^inactive_file (\d+)", (_CGROUP / "memory.stat").read_text(), re.MULTILINE)
            candidates.append(int(limit) - used + (int(cache.group(1)) if cache else 0))
    except (OSError, ValueError):
        pass
    if not candidates and hasattr(os, "sysconf"):
        candidates.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(candidates))


def process_memory() -> tuple[int, int]:
    """(resident bytes now, highest ever) of this process."""
    try:
        status = Path("/proc/self/status").read_text()
        now, peak = (re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
        if now and peak:
            return int(now.group(1)) * 1024, int(peak.group(1)) * 1024
    except OSError:
        pass
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return highest, highest


def readable(amount: float) -> str:
    """Bytes in binary units with three digits or so: "513 MiB", "1.24 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"
