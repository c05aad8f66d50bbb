"""What this machine has for a run: cores that this process may really use (affinity and cgroups
counted in).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU = Path("/sys/devices/system/cpu")


def allowed_cpus() -> set[int]:
    """CPU numbers this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores this process may use, at least 1: hyper-threads of one core count once, a
    cgroup quota is a limit.
    """
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


def readable(amount: float) -> str:
    """Bytes in binary units with three digits or so: "513 MiB", "1.24 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return (
                f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.3g} {unit}"
            )
        amount /= 1024
    return f"{amount:.3g} TiB"
