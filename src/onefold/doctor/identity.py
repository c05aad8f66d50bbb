"""Which machine was measured."""

from __future__ import annotations

import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from onefold.device import device_names


@dataclass(frozen=True)
class Identity:
    """What speeds depend on. Host names are left out: a container gets a new one at each start.

    Attributes:
        cpu: the processor's name.
        cores: CPUs this process may run on, affinity and cgroup quota counted in.
        gpus: names of the GPUs that torch sees.
        torch: its version; another one makes a measurement stale, not foreign.
    """

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    torch: str

    def differences(self, other: Identity) -> list[str]:
        """What makes `other` another machine, a phrase each; [] for the same one."""
        out = []
        if self.cpu != other.cpu:
            out.append(f"a processor {self.cpu!r} where {other.cpu!r} is")
        if self.cores != other.cores:
            out.append(f"{self.cores} cores where {other.cores} may be used")
        if self.gpus != other.gpus:
            out.append(f"{_gpus(self.gpus)} where {_gpus(other.gpus)} there")
        return out


def this_machine() -> Identity:
    """The machine this process runs on, as this process may use it."""
    return Identity(cpu_name(), usable_cpus(), device_names(), torch.__version__)


def cpu_name() -> str:
    """The processor's name as the kernel has it, else its architecture."""
    try:
        found = re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        if found:
            return found.group(1).strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def usable_cpus() -> int:
    """CPUs that the scheduler gives this process: the affinity mask, limited by the cgroup's
    quota.
    """
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, math.ceil(float(quota) / float(period))))


def _gpus(names: tuple[str, ...]) -> str:
    if not names:
        return "no GPU was"
    return " and ".join(f"{names.count(n)} × {n}" for n in dict.fromkeys(names)) + " were"
