"""How much of copies and communication had computing beside it, in a profile of some steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers import adapters
from benchmarks.peers.settings import Setting
from onefold.observe.trace import covered

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
