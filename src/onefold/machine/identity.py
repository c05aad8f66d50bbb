"""The identity of a measured machine."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch

from onefold.cores import physical_cores
from onefold.device import device_names


def this_machine() -> dict[str, Any]:
    """Return the properties of this machine that speeds depend on. The host name is not among them: a
    container gets a new one at each start. Another version of torch makes a measurement stale, but not
    another machine's.
    """
    gpus = list(device_names())
    return {"cpu": cpu_name(), "cores": physical_cores(), "gpus": gpus, "torch": torch.__version__}


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
