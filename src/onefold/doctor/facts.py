"""What this machine has, without measuring: processors, memory, GPUs, packages."""

from __future__ import annotations

import platform
from importlib.metadata import distributions
from typing import Any

from onefold.cores import physical_cores
from onefold.machine.calibration import cpu_name
from onefold.memory import free_host_memory, total_host_memory

PACKAGES = ("onefold", "torch", "numpy", "safetensors", "transformers", "triton")


def facts(device: str, ranks: int, why: str) -> dict[str, Any]:
    """Return the facts about this machine as plain values; sizes in bytes.

    Args:
        device: where ranks would compute, "auto", "cpu" or "cuda".
        ranks: how many ranks `onefold train` would start. why: the reason for that number.
    """
    import torch
    import torch.distributed as dist

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        sort = {"name": about.name, "capability": f"{about.major}.{about.minor}"}
        gpus.append({**sort, "total": total, "free": free})
    use_cuda = device != "cpu" and bool(gpus)
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
        "backend": "nccl" if use_cuda else "gloo",
        "device": "cuda" if use_cuda else "cpu",
        "ranks": ranks,
        "ranks_why": why,
    }
