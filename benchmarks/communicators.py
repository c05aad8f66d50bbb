"""What a context and each of the engine's communicators take of a GPU, as the driver counts it: a
chapter of benchmarks/gpu.py beside what the plan assumes (src/onefold/plan/account.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness, launch, pages, probes
from onefold.plan.account import COMMUNICATOR, CONTEXT

MIB = 1 << 20
#: Parameters of a block of Llama 3's 8B: a large move, so that the backend takes all its channels.
NUMEL = 1 << 28


def join(job: dict[str, Any]) -> None:
    """Nothing is made before it is measured."""


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """MiB that are taken beside torch's allocator after each step; a CPU: the resident set."""
    cuda, ranks = job["device"] == "cuda", job["ranks"]
    if cuda:
        torch.cuda.set_device(job["rank"])

    def taken() -> float:
        if not cuda:
            return probes.resident_mib() or 0.0
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        return (whole - free - torch.cuda.memory_reserved()) / MIB

    device = torch.device(job["device"])
    x = torch.ones(1 << 10, 1 << 10, device=device)
    (x @ x).sum().item()
    found = {"the context (and other processes)": taken()}
    if ranks > 1:
        launch.join(job, job["device"])
        whole = torch.zeros(job["numel"] // ranks * ranks, device=device, dtype=torch.bfloat16)
        other = torch.empty_like(whole)
        own = whole.chunk(ranks)[0].clone()
        for name, move in {
            "gathers": lambda g: dist.all_gather_single(whole, own, group=g),
            "ordered sums: all-to-all": lambda g: dist.all_to_all_single(other, whole, group=g),
            "native sums: reduce-scatter": lambda g: dist.reduce_scatter_single(
                own, whole, group=g
            ),
        }.items():
            before = taken()
            move(dist.new_group())
            found[f"a communicator of {name}"] = taken() - before
    return found


def chapter(options: harness.Options) -> tuple[pages.Table, list[dict[str, Any]]]:
    """The chapter of gpu.py: the rank where each takes most."""
    ranks = 2 if options.tiny else torch.cuda.device_count()
    job = {"device": options.device, "numel": 1 << 12 if options.tiny else NUMEL}
    found = launch.run_ranks("benchmarks.communicators", job, ranks, timeout=options.timeout)
    assumed = f"the plan assumes {CONTEXT // MIB} and {COMMUNICATOR // MIB} (all-to-all: more)"
    table = pages.Table(f"MiB of the driver, {ranks} ranks; {assumed}", ("what", "MiB"))
    for name in found["ranks"][0] if found["status"] == "ok" else ():
        table.add(name, f"{max(rank[name] for rank in found['ranks']):,.0f}")
    return table, [{"side": "communicators", **found}]
