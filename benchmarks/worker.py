"""One rank of one side in one turn, started by `launch.run_ranks`: of peers, of offload, and of the
chapters of benchmarks/gpu.py that have fresh processes.

Order matters: libraries are imported and exercised on a toy, the memory baseline is taken, and only
then is the model built. What is counted beyond the baseline is the model's, its training state's
and the library's buffers.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import launch, probes
from benchmarks.axes import sides as in_axes
from benchmarks.offload import disk, sides
from benchmarks.offload.planned import planned
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from benchmarks.whole import sides as of_matrices
from benchmarks.wires import sides as in_groups


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


class Memory:
    """MiB of this rank: allocated on its GPU, or resident where there is none."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Give back what was built before and the C library's free heap. What the GPU's allocator
        caches stays, since a timed step would have to ask for it again.
        """
        gc.collect()
        probes.give_back_free_heap()

    def let_go(self) -> None:
        """Give back everything, after the last step of a side."""
        self.settle()
        if self.cuda:
            torch.cuda.empty_cache()

    def now(self) -> float | None:
        self.synchronize()
        return torch.cuda.memory_allocated() / 2**20 if self.cuda else probes.resident_mib()

    def reset_peak(self) -> bool:
        """Peaks are those from here on; False where the kernel does not permit it."""
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        return probes.reset_peak()

    def peak(self) -> float | None:
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        return probes.peak_resident_mib()


class Ledgers:
    """What the engine says that it holds and moves; nothing for other libraries."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.engine = trainer.engine if isinstance(trainer, adapters.Onefold) else None

    def start(self) -> None:
        """Peaks are those from here on."""
        if self.engine is not None:
            self.engine.memory.reset_peak()
            self.engine.transfers.host.reset_peak()
            self.engine.transfers.disk.reset_peak()
            self.engine.transfers.moved.reset()

    def held(self) -> dict[str, Any] | None:
        """Bytes by tier, then "rest" (now) and "peak", then category; moments are in both."""
        if self.engine is None:
            return None
        from onefold.observe.memory import moments_by_tier

        moments = moments_by_tier(self.trainer.optimizer, self.engine)
        out = {}
        for tier, ledger in (
            ("device", self.engine.memory),
            ("host", self.engine.transfers.host),
            ("disk", self.engine.transfers.disk),
        ):
            more = {"moments": moments[tier]} if moments.get(tier) else {}
            out[tier] = {"rest": {**ledger.now(), **more}, "peak": {**ledger.peak(), **more}}
        return out

    def moved(self) -> dict[str, float] | None:
        """Bytes since `start`, by move; "waited_s": seconds waited for the disk."""
        if self.engine is None:
            return None
        moved = self.engine.transfers.moved
        return {**moved.by_move(), "waited_s": moved.exposed}

    @property
    def store(self) -> Any:
        """The store on the disk; None without any."""
        return self.engine.transfers.open_store if self.engine is not None else None

    def counters(self) -> dict[str, float]:
        """Of the disk, since ever: bytes, and seconds in which a transfer was under way."""
        store = self.store
        if store is None:
            return {}
        return {
            "read": store.read_bytes,
            "written": store.written_bytes,
            "busy_s": store.busy_seconds,
        }

    def cached(self) -> int | None:
        """Bytes of this rank's files on the disk that lie in the page cache; None without any."""
        if self.store is None:
            return None
        folders = [path for folder in self.store.folders for path in sorted(folder.iterdir())]
        return probes.cached_bytes(path for path in folders if path.is_file())


def prepare(job: dict[str, Any]) -> None:
    """Import what the side needs, and nothing of Onefold for another library."""
    adapters.prepare(job["side"], job["setting"]["device"])
    if launch.requirement(job["side"]) == "onefold":
        importlib.import_module("onefold.observe")


def join(job: dict[str, Any]) -> None:
    """Plain PyTorch meets nobody; `ranks_a_node` says where nodes end, as a launcher would."""
    if "ranks_a_node" in job:
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_a_node"])
    if job["side"] != "plain":
        launch.join(job, job["setting"]["device"])


def build(job: dict[str, Any], setting: Setting, whole: nn.Module) -> Any:
    """The job's side around `whole`."""
    if "ranks_a_node" in job:
        changes = job.get("changes", {})
        return in_groups.build(job["side"], setting, whole, job["ranks_a_node"], **changes)
    if isinstance(setting, of_matrices.Setting):
        return of_matrices.build(job["side"], setting, whole)
    return sides.build(job["side"], setting, whole, job.get("disk"), job.get("own_adam", False))


def batches(job: dict[str, Any], setting: Setting, step: int) -> list[adapters.Batch]:
    """This rank's micro-batches of a step, or (`whole_batch_of`) those of so many ranks."""
    if isinstance(setting, in_axes.Setting):
        return in_axes.model.batches(setting, step, job["rank"])
    of = job.get("whole_batch_of", 0)
    if not of:
        return model.batches(setting, step, job["rank"])
    made = [
        model.micro_batch(setting.model, setting.tokens, step, micro, rank, of)
        for micro in range(setting.accumulation)
        for rank in range(of)
    ]
    return [(ids.to(setting.device), labels.to(setting.device)) for ids, labels in made]


def setting_of(job: dict[str, Any]) -> Setting:
    given = job["setting"]
    if "axes" in given:
        return in_axes.Setting(**given)
    return (of_matrices.Setting if "iterations" in given else Setting)(**given)


def trainer_of(job: dict[str, Any], setting: Setting) -> tuple[Any, int]:
    """The job's side, from the initial weights; and the elements of its model."""
    if isinstance(setting, in_axes.Setting):
        numel = in_axes.model.count_parameters(setting.model)
        return in_axes.build(job["side"], setting), numel
    whole = model.build(setting.model, device=setting.device)
    return build(job, setting, whole), sum(p.numel() for p in whole.parameters())


def touch(job: dict[str, Any], setting: Setting) -> None:
    """Let the side train a toy for a step."""
    if isinstance(setting, in_axes.Setting):
        in_axes.model.touch(partial(in_axes.build, job["side"]), setting, job["rank"])
    else:
        model.touch(lambda toy, whole: build(job, toy, whole), setting)


def sent_by(trainer: Any) -> dict[str, int | None]:
    """Bytes so far: of this rank's sockets, by the library's count, and on the interface."""
    return {
        "sent_bytes": probes.socket_bytes_sent(),
        "ledger_bytes": trainer.ledger_bytes(),
        "loopback_bytes": probes.interface_bytes_sent("lo"),
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Memory in MiB beyond the baseline, seconds and bytes as lists of steps.

    The job has "side" and "setting", and may have "disk" and "own_adam" (`sides.build`),
    "copy_mib" and "chunk_mib" (a plain copy around every timed step), "ranks_a_node" and "changes"
    (a side of wires), "whole_batch_of", "observed" (a further step, as the ledgers saw it) and
    "trace" (a file for a profile of two more).
    """
    setting, rank = setting_of(job), job["rank"]
    memory, groups = Memory(setting.device), "ranks_a_node" in job
    watched = "copy_mib" in job  # its disk, and what its recipe should take
    on_disk = watched and sides.on_disk(job["side"])
    if not groups:  # there memory is not what is asked
        touch(job, setting)
    copier = None
    if on_disk and rank == 0 and job["copy_mib"]:
        copier = disk.Copier(Path(job["disk"]), job["copy_mib"], job["chunk_mib"])
    meet()
    memory.settle()
    resettable = memory.reset_peak()
    baseline, on_host = memory.now(), probes.resident_mib()

    begun = time.perf_counter()
    trainer, numel = trainer_of(job, setting)
    built = time.perf_counter() - begun
    ledgers = Ledgers(trainer)
    watch = sides.Watch(trainer, ledgers.counters)
    losses = [trainer.step(batches(job, setting, step)) for step in range(setting.warmup)]
    memory.synchronize()
    set_up_peak = probes.difference(memory.peak(), baseline)
    memory.settle()  # what building the model left behind is not part of a step's peak
    data = [batches(job, setting, setting.warmup + step) for step in range(setting.steps)]
    rates: list[dict[str, float]] = []

    def copied() -> None:
        """The ranks wait while the disk is measured; where it is not, nothing parts the steps."""
        if watched:
            meet()
            if copier is not None:
                rates.append(copier.copy())
            meet()

    steps: dict[str, list[Any]] = {
        name: [] for name in ("step_s", "optimizer_s", "optimizer_disk", "step_disk")
    }
    processor, files = 0.0, probes.page_cache_bytes() if on_disk else 0
    meet()
    copied()
    if resettable:
        memory.reset_peak()
    ledgers.start()
    sent = sent_by(trainer)
    for taken in data:
        before, busy, begun = ledgers.counters(), time.process_time(), time.perf_counter()
        losses.append(trainer.step(taken))
        memory.synchronize()
        steps["step_s"].append(time.perf_counter() - begun)
        processor += time.process_time() - busy
        after = ledgers.counters()
        steps["step_disk"].append({key: value - before[key] for key, value in after.items()})
        steps["optimizer_s"].append(watch.seconds)
        steps["optimizer_disk"].append(watch.counted)
        copied()
    meet()
    sent = {name: probes.difference(now, sent[name]) for name, now in sent_by(trainer).items()}
    peak, host_peak = memory.peak(), probes.peak_resident_mib()
    held, moved = ledgers.held(), ledgers.moved()
    result = {
        "rank": rank,
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "losses": losses,
        **steps,
        "cpu_s": processor,
        "build_s": built,
        "baseline_mib": baseline,
        "set_up_peak_mib": set_up_peak,
        "peak_mib": probes.difference(peak, baseline),
        "peak_is_of_timed_steps": resettable,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20 if memory.cuda else None,
        "host_mib": probes.difference(host_peak, on_host),
        "held": held,
        "moved": moved,
        "planned": planned(ledgers.engine) if held is not None and watched else None,
        "copies": rates,
        "file_cache_bytes": ledgers.cached() if watched else None,
        "page_cache_growth": probes.page_cache_bytes() - files if on_disk else None,
        "numel": numel,
        **sent,
        **(trainer.counted() if hasattr(trainer, "counted") else {}),
    }
    memory.settle()
    result["rest_mib"] = probes.difference(memory.now(), baseline)
    if groups:
        result["between_bytes"] = trainer.engine.traffic.by_link()["between"]
    if job.get("observed") and job["side"].startswith("onefold"):
        result["observed"] = observed(trainer, data[-1])
    if job.get("trace"):
        kept = Path(job["trace"]) if rank == 0 else None
        result["trace"] = profile(trainer, data[-2:], setting, kept)
    if copier is not None:
        copier.close()
    meet()  # a rank that returned would free its side, whose sockets another may still be reading
    return result


def observed(trainer: Any, taken: Sequence[adapters.Batch]) -> dict[str, Any]:
    """One more step of Onefold as its ledgers and the allocator saw it; and a row of metrics."""
    from onefold.observe import Meter, measured, reconciled, record

    meter = Meter(trainer.model, trainer.optimizer)
    with record(trainer.model, trainer.optimizer, activations=True) as seen:
        loss = trainer.step(taken)
    row = meter.step(loss=torch.tensor(loss, device=taken[0][0].device))
    account = measured(trainer.model, trainer.optimizer, seen)
    machine = reconciled(trainer.model, account)
    return {"account": account.to_json(), "machine": machine.to_json(), "row": row}


Interval = tuple[float, float]


def profile(
    trainer: adapters.Peer,
    data: Sequence[Sequence[adapters.Batch]],
    setting: Setting,
    path: Path | None,
) -> dict[str, float]:
    """Profile steps over `data`; seconds of GPU work by kind and how much of it overlapped. Rank 0
    keeps the trace.

    "pinned_s" and "pageable_s": of the copies between device and host, those through pinned memory,
    and those that were not.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if setting.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for taken in data:
            trainer.step(taken)
        if setting.device == "cuda":
            torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    communicating: list[Interval] = []
    computing: list[Interval] = []
    through = {"pinned": 0.0, "pageable": 0.0}
    for event in profiler.events() or ():
        # What somebody has named (an optimizer's step) stands on the GPU's time line too, from its
        # first piece of work to its last.
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        for kind_of_memory in through:
            if kind_of_memory in name:
                through[kind_of_memory] += (span[1] - span[0]) / 1e6
        across = "nccl" in name or name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop"))
        (communicating if across else computing).append(span)
    pinned = {f"{name}_s": seconds for name, seconds in through.items()}
    return overlap(communicating, computing) | pinned


def overlap(communicating: Sequence[Interval], computing: Sequence[Interval]) -> dict[str, float]:
    """Seconds spent communicating, computing, on both, and idle, of spans in microseconds."""
    from onefold.observe.trace import covered

    everything = [*communicating, *computing]
    first = min((start for start, _ in everything), default=0.0)
    last = max((end for _, end in everything), default=0.0)
    busy, across, inside = map(covered, (everything, communicating, computing))
    seconds = {
        "comm_s": across,
        "compute_s": inside,
        "both_s": across + inside - busy,
        "idle_s": last - first - busy,
    }
    return {name: microseconds / 1e6 for name, microseconds in seconds.items()}
