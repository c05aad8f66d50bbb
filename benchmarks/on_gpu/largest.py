"""The chapter "largest": the largest model of each side that takes two steps, a wide GPT that grows
by blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.offload.largest import parameters_of
from benchmarks.on_gpu.run import available, run, side_of, state
from benchmarks.pages import DASH, Table, essence
from benchmarks.peers.settings import Setting
from onefold.memory.pool import free_host_memory

ON_ONE_GPU: tuple[str, ...] = (
    "plain",
    "onefold-3-cpu-param",
    "onefold-3-nvme-param",
    "onefold-2-cpu",
    "fsdp2-cpu",
    "deepspeed-2-cpu",
    "deepspeed-3-cpu-param",
)
GROWTH = 1.5
HOST_SHARE = 0.9
"""Of the free host memory, what an attempt may be expected to take."""


def chapter(options: argparse.Namespace) -> tuple[Table, list[dict[str, Any]]]:
    """A row a side."""
    title = (
        f"The largest model, one GPU: blocks of width {options.width:,},"
        f" {options.largest_tokens:,} tokens, recomputed"
    )
    memory = ("step s", "device MiB", "host MiB")
    table = Table(title, ("side", "largest", "blocks", *memory, "too large", "why"))
    sides, absent = available(ON_ONE_GPU, options)
    outcomes = []
    for side in sides:
        tried: dict[int, dict[str, Any]] = {}

        def fits(layers: int, side: str = side, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[layers] = _attempt(side, layers, options)
            return bool(tried[layers]["status"] == "ok")

        best, above = search(fits, options.blocks)
        outcomes += tried.values()
        size, why = parameters_of(above, options.width), essence(tried[above]["error"])[:80]
        found = ["none", *[DASH] * 4]
        if best:
            rank = tried[best]["ranks"][0]
            found = [f"{parameters_of(best, options.width) / 1e9:.2f}B", str(best)]
            found.append(f"{rank['step_s']:.2f}")
            for name in ("device_mib", "resident_mib"):
                found.append(DASH if rank[name] is None else f"{rank[name]:,.0f}")
        table.add(side, *found, f"{size / 1e9:.2f}B", why)
    for side in absent:
        table.add(side, "not installed")
    return table, outcomes


def search(fits: Callable[[int], bool], first: int) -> tuple[int, int]:
    """(the largest number seen to fit, the smallest seen not to): half as many again until one does
    not, then between, to an eighth. (0, first) where `first` does not fit.
    """
    best, above, tried = 0, 0, first
    while True:
        if fits(tried):
            best = tried
        else:
            above = tried
        if above and (not best or above - best <= max(1, best // 8)):
            return best, above
        tried = (best + above) // 2 if above else int(GROWTH * tried) + 1


def _attempt(side: str, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """One attempt, unless the host cannot hold it: the system would end any process."""
    setting = Setting(
        model=f"{layers} blocks of {options.width}",
        tokens=options.largest_tokens,
        precision="bf16",
        ranks=1,
        threads=options.threads,
        device=options.device,
    )
    need, free = 16 * parameters_of(layers, options.width), int(HOST_SHARE * free_host_memory())
    if side_of(side).optimizer == "cpu" and need > free:
        about = {"peer": side, "setting": asdict(setting), "layers": layers, "ranks": []}
        error = f"{need:,} bytes of state, {free:,} of host memory may be taken"
        return {**about, "status": "refused", "error": error}
    with state(options) as where:
        size = {"layers": layers, "width": options.width}
        found = run(side, setting, options, "benchmarks.offload.largest", **size, **where)
        return {**found, "layers": layers}
