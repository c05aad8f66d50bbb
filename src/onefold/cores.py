"""The host's cores, and how many threads work on state that is stored on the host.

torchrun sets OMP_NUM_THREADS=1 if it starts several ranks and the user has not set it. That suits
ranks whose host only launches kernels. With the optimizer on the host, one thread steps some 300
million elements a second, and the other cores of this rank are idle.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU = Path("/sys/devices/system/cpu")
_THREADS = "OMP_NUM_THREADS"


def physical_cores() -> int:
    """Return the number of physical cores that this process may use, at least 1, within the
    cgroup's quota.
    """
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


def threads_for(
    cores: int,
    ranks: int,
    now: int,
    environment: Mapping[str, str],
    launcher: Mapping[str, str] | None,
) -> int:
    """Return the number of threads for work on the host's state, at least 1.

    Args:
        cores: physical cores that this rank may use, together with the other ranks of its machine.
        ranks: ranks of this machine.
        now: torch's number of threads in this process.
        environment: that of this process. launcher: that of the process which has started this one,
            as its own user set it; None if that is not known.
    """
    share = max(1, cores // max(1, ranks))
    if _THREADS not in environment:
        return min(now, share)
    by_torchrun = (
        "TORCHELASTIC_RUN_ID" in environment
        and environment[_THREADS] == "1"
        and _THREADS not in (launcher or {})
    )
    # Another number than 1 comes from the script
    return share if by_torchrun and now == 1 else now


def launcher_environment() -> Mapping[str, str] | None:
    """Return the environment with which the parent process was started; None if unknown."""
    try:
        data = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return None
    entries = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in entries}
