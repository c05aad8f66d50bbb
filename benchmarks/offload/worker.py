"""One rank of one side in one round, started by `launch.run_ranks`.

As in `benchmarks.peers.worker` libraries are imported and exercised on a toy first, the memory
baseline is taken, and only then is the model built. Between timed steps the ranks wait while rank 0
has the disk measured.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import probes
from benchmarks.offload import disk, sides
from benchmarks.offload.planned import planned
from benchmarks.peers import adapters, model
from benchmarks.peers.settings import Setting
from onefold.runtime.parameters.interval import disable_torch_function


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def engine_of(trainer: Any) -> Any:
    """Onefold's engine; None for other sides."""
    return trainer.engine if isinstance(trainer, adapters.Onefold) else None


def moments_by_tier(trainer: Any, engine: Any) -> dict[str, int]:
    """Bytes of the optimizer's states in memory: on "device" or "host". What is on NVMe stands in
    the engine's ledger.
    """
    away = {id(entry.param) for flat in engine.offloaded_flats for entry in flat.entries}
    out = {"device": 0, "host": 0}
    with disable_torch_function():  # what lies here, not what it is a part of
        for param, state in trainer.optimizer.state.items():
            held = sum(
                t.numel() * t.element_size()
                for t in state.values()
                if isinstance(t, torch.Tensor) and t.dim() and not t.is_meta
            )
            out["host" if id(param) in away else "device"] += held
    return out


class Ledgers:
    """What the engine says that it holds and moves."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.engine = trainer, engine_of(trainer)

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
        moments = moments_by_tier(self.trainer, self.engine)
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
        """Bytes since `start`: "up", "down", "read", "written"; "waited_s": seconds for which this
        rank waited for the disk.
        """
        if self.engine is None:
            return None
        return {
            **self.engine.transfers.moved.by_move(),
            "waited_s": self.engine.transfers.moved.exposed,
        }

    def counters(self) -> dict[str, float]:
        """Of the disk, since ever: bytes, and the seconds in which a read or write was under
        way.
        """
        store = self.engine.transfers.open_store if self.engine is not None else None
        if store is None:
            return {}
        return {
            "read": store.read_bytes,
            "written": store.written_bytes,
            "busy_s": store.busy_seconds,
        }

    def cached(self) -> int | None:
        """Bytes of this rank's files on the disk that lie in the page cache; None without any."""
        store = self.engine.transfers.open_store if self.engine is not None else None
        if store is None:
            return None
        folders = [path for folder in store.folders for path in sorted(folder.iterdir())]
        return probes.cached_bytes(path for path in folders if path.is_file())


def prepare(job: dict[str, Any]) -> None:
    adapters.prepare(job["side"], job["setting"]["device"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up, time. Memory in MiB beyond the baseline, seconds and bytes as lists of steps;
    see `__main__` for the names.
    """
    name, setting, rank = job["side"], Setting(**job["setting"]), dist.get_rank()
    on_disk, how = sides.SIDES[name].on_disk, {"disk": job["disk"], "own_adam": job["own_adam"]}
    model.touch(lambda toy, whole: sides.build(name, toy, whole, **how), setting)
    copier = None
    if on_disk and rank == 0 and job["copy_mib"]:
        copier = disk.Copier(Path(job["disk"]), job["copy_mib"], job["chunk_mib"])
    meet()
    probes.give_back_free_heap()
    resettable = probes.reset_peak()
    baseline = probes.resident_mib()

    def copied() -> None:
        meet()
        if copier is not None:
            rates.append(copier.copy())
        meet()

    begun = time.perf_counter()
    trainer = sides.build(name, setting, model.build(setting.model), **how)
    built = time.perf_counter() - begun
    ledgers = Ledgers(trainer)
    watch = sides.Watch(trainer, ledgers.counters)
    losses = [trainer.step(model.batches(setting, step, rank)) for step in range(setting.warmup)]
    set_up_peak = probes.difference(probes.peak_resident_mib(), baseline)
    gc.collect()
    probes.give_back_free_heap()
    data = [model.batches(setting, setting.warmup + step, rank) for step in range(setting.steps)]
    rates: list[dict[str, float]] = []
    steps: dict[str, list[Any]] = {
        name: [] for name in ("step_s", "optimizer_s", "optimizer_disk", "step_disk")
    }
    processor, files = 0.0, probes.page_cache_bytes() if on_disk else 0
    copied()
    if resettable:
        probes.reset_peak()
    ledgers.start()
    for taken in data:
        before, busy, begun = ledgers.counters(), time.process_time(), time.perf_counter()
        losses.append(trainer.step(taken))
        steps["step_s"].append(time.perf_counter() - begun)
        processor += time.process_time() - busy
        after = ledgers.counters()
        steps["step_disk"].append({key: value - before[key] for key, value in after.items()})
        steps["optimizer_s"].append(watch.seconds)
        steps["optimizer_disk"].append(watch.counted)
        copied()
    peak = probes.difference(probes.peak_resident_mib(), baseline)
    held, moved = ledgers.held(), ledgers.moved()
    gc.collect()
    probes.give_back_free_heap()
    rest = probes.difference(probes.resident_mib(), baseline)
    result = {
        "rank": rank,
        "losses": losses,
        **steps,
        "cpu_s": processor,
        "build_s": built,
        "baseline_mib": baseline,
        "set_up_peak_mib": set_up_peak,
        "peak_mib": peak,
        "peak_is_of_timed_steps": resettable,
        "rest_mib": rest,
        "held": held,
        "moved": moved,
        "planned": planned(ledgers.engine) if held is not None else None,
        "copies": rates,
        "file_cache_bytes": ledgers.cached(),
        "page_cache_growth": probes.page_cache_bytes() - files if on_disk else None,
    }
    if copier is not None:
        copier.close()
    meet()  # a rank that returned would free what another may still be reading
    return result
