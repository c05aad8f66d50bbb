"""The identity of a measured machine."""

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
    """The properties that speeds depend on. The host name is not among them: a container gets a new
    one at each start.

    Attributes:
        cpu: the processor's name.
        cores: CPUs this process may run on, limited by affinity and cgroup quota.
        gpus: names of the GPUs that torch sees.
        torch: torch's version. Another version makes a measurement stale, but does not make it
            another machine's.
    """

    cpu: str
    cores: int
    gpus: tuple[str, ...]
    torch: str

    def differences(self, other: Identity) -> list[str]:
        """Return the differences that make `other` another machine, as phrases; [] for none."""
        out = []
        if self.cpu != other.cpu:
            out.append(f"a processor {self.cpu!r} where {other.cpu!r} is")
        if self.cores != other.cores:
            out.append(f"{self.cores} cores where {other.cores} may be used")
        if self.gpus != other.gpus:
            out.append(f"{_gpus(self.gpus)} where {_gpus(other.gpus)} there")
        return out


def this_machine() -> Identity:
    """Return the identity of the machine that this process runs on."""
    return Identity(cpu_name(), usable_cpus(), device_names(), torch.__version__)


def cpu_name() -> str:
    """Return the processor's name from the kernel, else its architecture."""
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
    """Return how many CPUs this process may use: the affinity mask, limited by the cgroup quota."""
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
