"""What this machine has, without measuring: processors, memory, GPUs, packages."""

from __future__ import annotations

import platform
from importlib.metadata import distributions
from typing import Any

from onefold.cores import physical_cores
from onefold.machine.calibration import cpu_name
from onefold.memory import free_host_memory, total_host_memory

PACKAGES = ("onefold", "torch", "numpy", "safetensors", "transformers", "triton")


def place(device: str) -> tuple[str, int]:
    """Return (where ranks compute, "cuda" or "cpu"; the GPUs here), without a byte of any of them."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cuda" if device != "cpu" and gpus else "cpu", gpus


def facts(device: str, ranks: int, why: str) -> dict[str, Any]:
    """Return the facts about this machine as plain values; sizes in bytes. On each GPU this process
    takes what CUDA needs there, until it ends.

    Args:
        device: where ranks would compute, "auto", "cpu" or "cuda".
        ranks: how many ranks `onefold train` would start. why: the reason for that number.
    """
    import torch
    import torch.distributed as dist

    (kind, count), gpus = place(device), []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        sort = {"name": about.name, "capability": f"{about.major}.{about.minor}"}
        gpus.append({**sort, "total": total, "free": free})
    known = ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_available() else ()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in distributions() if d.name in PACKAGES},
        "cpu": {
            "name": cpu_name(),
            "physical_cores": physical_cores(),
            "simd": str(torch.backends.cpu.get_cpu_capability()),
        },
        "memory": {"total": total_host_memory(), "free": free_host_memory()},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "backends": [b for b in known if getattr(dist, f"is_{b}_available", lambda: False)()],
        "backend": "nccl" if kind == "cuda" else "gloo",
        "device": kind,
        "ranks": ranks,
        "ranks_why": why,
    }
