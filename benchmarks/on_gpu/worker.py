"""One rank of a side: `python -m benchmarks.on_gpu.worker JOB.json RANK`, started by
`launch.run_ranks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from benchmarks.offload import sides
from benchmarks.offload.traced import profile
from benchmarks.offload.worker import Ledgers
from benchmarks.peers import adapters, model, probes, worker
from benchmarks.peers.settings import Setting
from benchmarks.wires import sides as in_groups


def join(setting: Setting, path: Path, rank: int) -> str:
    """Take a GPU and join the other ranks; answers the backend: NCCL with a GPU each, else gloo."""
    backend = "gloo"
    if setting.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        backend = "nccl" if setting.ranks <= gpus else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{path.with_name('store')}",
        rank=rank,
        world_size=setting.ranks,
    )
    return backend


def synchronize(setting: Setting) -> None:
    """Wait for the GPU, if there is one."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def measure(job: dict[str, Any], setting: Setting, path: Path, rank: int) -> dict[str, Any]:
    """Train, and time or profile; memory in MiB allocated on the GPU (resident on a CPU), peak over
    the timed steps.
    """
    peer, whole_batch, cuda = job["peer"], job.get("whole_batch_of", 0), setting.device == "cuda"
    how = {"disk": job.get("disk"), "own_adam": job.get("own_adam", False)}
    sides.prepare(peer, setting.device)
    if "ranks_a_node" in job:
        # As a launcher would say where nodes end
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_a_node"])
    backend = "none" if peer == "plain" else join(setting, path, rank)
    if "ranks_a_node" not in job:  # there memory is not what is asked
        sides.touch(peer, setting, **how)
    synchronize(setting)
    on_host = probes.resident_mib()
    baseline = torch.cuda.memory_allocated() / 2**20 if cuda else on_host
    whole = model.build(setting.model, device=setting.device)
    numel = sum(p.numel() for p in whole.parameters())
    if "ranks_a_node" in job:
        trainer = in_groups.build(
            peer, setting, whole, job["ranks_a_node"], **job.get("changes", {})
        )
    else:
        trainer = sides.build(peer, setting, whole, **how)
    ledgers = Ledgers(trainer)

    def batches(step: int) -> list[adapters.Batch]:
        ranks = whole_batch or setting.ranks
        # A single process takes every rank's part, one after another
        taken = range(ranks) if whole_batch else [rank]
        made = [
            model.micro_batch(setting.model, setting.tokens, step, m, r, ranks)
            for m in range(setting.accumulation)
            for r in taken
        ]
        return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]

    losses = [trainer.step(batches(step)) for step in range(setting.warmup)]
    data = [batches(setting.warmup + step) for step in range(setting.steps)]
    synchronize(setting)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    probes.reset_peak()
    ledgers.start()
    seconds = []
    for taken in data:
        start = time.perf_counter()
        losses.append(trainer.step(taken))
        synchronize(setting)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else probes.peak_resident_mib()
    result = {
        "rank": rank,
        "backend": backend,
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
        result["between_bytes"] = trainer.onefold.engine_of(trainer.model).traffic.by_link()[
            "between"
        ]
    if peer.startswith("onefold"):
        result["observed"] = observed(trainer, data[-1])
    if job.get("trace"):
        result["trace"] = profile(
            trainer, data[-2:], setting, Path(job["trace"]) if rank == 0 else None
        )
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
    return {
        "account": account.to_json(),
        "machine": reconciled(trainer.model, account).to_json(),
        "row": row,
    }


def work() -> NoReturn:
    """One rank."""
    job, path, rank = worker.read_job()
    setting = Setting(**job["setting"])
    worker.leave(measure(job, setting, path, rank), path, rank)


if __name__ == "__main__":
    work()
