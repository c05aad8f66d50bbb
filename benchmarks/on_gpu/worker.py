"""One rank of a side, started by `launch.run_ranks`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import launch, probes
from benchmarks.offload import sides
from benchmarks.offload.traced import profile
from benchmarks.offload.worker import Ledgers
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from benchmarks.wires import sides as in_groups


def prepare(job: dict[str, Any]) -> None:
    adapters.prepare(job["peer"], job["setting"]["device"])


def join(job: dict[str, Any]) -> None:
    """Plain PyTorch meets nobody; `ranks_a_node` says where nodes end, as a launcher would."""
    if "ranks_a_node" in job:
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_a_node"])
    if job["peer"] != "plain":
        launch.join_on_devices(job, job["setting"]["device"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and time or profile; memory in MiB allocated on the GPU (resident on a CPU), peak over
    the timed steps.
    """
    peer, setting, rank = job["peer"], Setting(**job["setting"]), job["rank"]
    whole_batch, cuda = job.get("whole_batch_of", 0), setting.device == "cuda"

    def build(given: Setting, whole: torch.nn.Module) -> Any:
        if "ranks_a_node" in job:
            changes = job.get("changes", {})
            return in_groups.build(peer, given, whole, job["ranks_a_node"], **changes)
        return sides.build(peer, given, whole, job.get("disk"), job.get("own_adam", False))

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    if "ranks_a_node" not in job:  # there memory is not what is asked
        model.touch(build, setting)
    synchronize()
    on_host = probes.resident_mib()
    baseline = torch.cuda.memory_allocated() / 2**20 if cuda else on_host
    whole = model.build(setting.model, device=setting.device)
    numel = sum(p.numel() for p in whole.parameters())
    trainer = build(setting, whole)
    ledgers = Ledgers(trainer)

    def batches(step: int) -> list[adapters.Batch]:
        if not whole_batch:
            return model.batches(setting, step, rank)
        # A single process takes every rank's part, one after another
        made = [
            model.micro_batch(setting.model, setting.tokens, step, m, r, whole_batch)
            for m in range(setting.accumulation)
            for r in range(whole_batch)
        ]
        return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]

    losses = [trainer.step(batches(step)) for step in range(setting.warmup)]
    data = [batches(setting.warmup + step) for step in range(setting.steps)]
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    probes.reset_peak()
    ledgers.start()
    seconds = []
    for taken in data:
        start = time.perf_counter()
        losses.append(trainer.step(taken))
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else probes.peak_resident_mib()
    result = {
        "rank": rank,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "losses": losses,
        "step_s": seconds,
        "peak_mib": probes.difference(peak, baseline),
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20 if cuda else None,
        "host_mib": probes.difference(probes.peak_resident_mib(), on_host),
        "held": ledgers.held(),
        "moved": ledgers.moved(),
        "numel": numel,
    }
    if "ranks_a_node" in job:
        result["between_bytes"] = trainer.engine.traffic.by_link()["between"]
    if peer.startswith("onefold"):
        result["observed"] = observed(trainer, data[-1])
    if job.get("trace"):
        kept = Path(job["trace"]) if rank == 0 else None
        result["trace"] = profile(trainer, data[-2:], setting, kept)
    return result


def observed(trainer: Any, taken: Sequence[adapters.Batch]) -> dict[str, Any]:
    """One more step of Onefold as its ledgers saw it, beside the allocator's books; and a row of
    metrics.
    """
    from onefold.observe import Meter, measured, reconciled, record

    meter = Meter(trainer.model, trainer.optimizer)
    with record(trainer.model, trainer.optimizer, activations=True) as seen:
        loss = trainer.step(taken)
    row = meter.step(loss=torch.tensor(loss, device=taken[0][0].device))
    account = measured(trainer.model, trainer.optimizer, seen)
    machine = reconciled(trainer.model, account)
    return {"account": account.to_json(), "machine": machine.to_json(), "row": row}
