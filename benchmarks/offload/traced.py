"""What a profile of some steps shows of copies and communication: how much of them had computing
beside it.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting

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
        plain = path.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    communicating: list[Interval] = []
    computing: list[Interval] = []
    through = {"pinned": 0.0, "pageable": 0.0}
    for event in profiler.events() or ():
        # What somebody has named (an optimizer's step) stands on the GPU's time line too, from its
        # first piece of work to its last.
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        name = event.name.lower()
        for kind_of_memory in through:
            if kind_of_memory in name:
                through[kind_of_memory] += (event.time_range.end - event.time_range.start) / 1e6
        across = "nccl" in name or name.startswith(("memcpy dtoh", "memcpy htod", "memcpy ptop"))
        kind = communicating if across else computing
        kind.append((event.time_range.start, event.time_range.end))
    return overlap(communicating, computing) | {
        f"{name}_s": seconds for name, seconds in through.items()
    }


def overlap(communicating: Sequence[Interval], computing: Sequence[Interval]) -> dict[str, float]:
    """Seconds spent communicating, computing, doing both, and idle between first and last. Input:
    microseconds.
    """
    a, b = _union(communicating), _union(computing)
    both = sum(
        max(0.0, min(end, stop) - max(start, begin)) for start, end in a for begin, stop in b
    )
    total_a, total_b = (sum(end - start for start, end in part) for part in (a, b))
    everything = a + b
    span = max((end for _, end in everything), default=0.0) - min(
        (start for start, _ in everything), default=0.0
    )
    idle = span - (total_a + total_b - both)
    return {
        name: value / 1e6
        for name, value in (
            ("comm_s", total_a),
            ("compute_s", total_b),
            ("both_s", both),
            ("idle_s", idle),
        )
    }


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
