"""What this machine has, without measuring anything: what `onefold doctor` prints at once."""

from __future__ import annotations

import platform
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onefold.memory.host import free_host_memory
from onefold.plan.calibrate import default_path
from onefold.plan.measured import cpu_name, total_host_memory, usable_cpus
from onefold.train.config import resolve
from onefold.train.launch import physical_cores, ranks_to_start

PACKAGES = ("onefold", "torch", "numpy", "safetensors", "transformers", "triton")


def facts(device: str) -> dict[str, Any]:
    """Everything as plain values; sizes in bytes.

    Args:
        device: "auto", "cpu" or "cuda": what ranks would compute on.

    Raises:
        TrainError: cuda was asked for and torch finds no GPU.
    """
    import torch

    ranks, why = ranks_to_start(resolve({"device": device}))
    use_cuda = device != "cpu" and torch.cuda.is_available()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "cpu": {
            "name": cpu_name(),
            "usable": usable_cpus(),
            "physical_cores": physical_cores(),
            "simd": _simd(),
        },
        "memory": {"total": total_host_memory(), "free": free_host_memory()},
        "cuda": torch.version.cuda,
        "gpus": (
            [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        ),
        "backends": _backends(),
        "backend": "nccl" if use_cuda else "gloo",
        "device": "cuda" if use_cuda else "cpu",
        "ranks": ranks,
        "ranks_why": why,
        "disks": _disks(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _simd() -> str:
    """The vector instructions that torch uses."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "total": total,
        "free": free,
        "capability": f"{major}.{minor}",
    }


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if getattr(dist, f"is_{name}_available", lambda: False)()
    ]


def _disks() -> list[dict[str, Any]]:
    """Free space where a run writes, at the nearest folder that is there."""
    out = []
    for use, folder in (
        ("working folder", Path.cwd()),
        ("temporary files", Path(tempfile.gettempdir())),
        ("cache", default_path().parent),
    ):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        out.append({"use": use, "folder": str(folder), "free": shutil.disk_usage(there).free})
    return out
