"""The chapter "largest": the largest model of each side that takes two steps, a wide GPT that grows
by blocks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import essence
from benchmarks.offload.largest import parameters_of
from benchmarks.on_gpu.run import available, side_of
from benchmarks.peers import launch
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


def chapter(options: argparse.Namespace) -> tuple[harness.Table, list[dict[str, Any]]]:
    """A row a side."""
    columns = ("side", "largest", "blocks", "step s", "device MiB", "host MiB", "too large", "why")
    title = (
        f"The largest model, one GPU: blocks of width {options.width:,},"
        f" {options.largest_tokens:,} tokens, recomputed"
    )
    table = harness.Table(title, columns)
    sides, absent = available(ON_ONE_GPU, options)
    outcomes = []
    for side in sides:
        tried: dict[int, dict[str, Any]] = {}

        def fits(layers: int, side: str = side, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[layers] = _attempt(side, layers, options)
            return bool(tried[layers]["status"] == "ok")

        best, above = search(fits, options.blocks)
        outcomes += tried.values()
        table.rows.append(_row(side, best, above, tried, options.width))
    table.rows += [[side, "not installed", *["–"] * (len(columns) - 2)] for side in absent]
    return table, outcomes


def search(fits: Callable[[int], bool], first: int) -> tuple[int, int]:
    """(the largest number seen to fit, the smallest seen not to): half as many again until one does
    not, then between, to an eighth.

    (0, first) where `first` does not fit.
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
    """One attempt; one that the host cannot hold is not begun, since the system would end whatever
    process it likes.
    """
    setting = Setting(
        model=f"{layers} blocks of {options.width}", tokens=options.largest_tokens, precision="bf16", ranks=1, threads=options.threads,
        device=options.device,
    )  # fmt: skip
    about = {"peer": side, "setting": setting.to_json(), "layers": layers}
    need, free = 16 * parameters_of(layers, options.width), int(HOST_SHARE * free_host_memory())
    if side_of(side).optimizer == "cpu" and need > free:
        return {
            **about,
            "status": "refused",
            "error": f"{need:,} bytes of state, {free:,} of host memory may be taken",
            "ranks": [],
        }
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.disk) as place:
        job = {
            "side": side, "setting": setting.to_json(), "layers": layers, "width": options.width, "disk": str(Path(place).resolve()),
            "own_adam": options.deepspeed_adam,
        }  # fmt: skip
        python = options.deepspeed_python if side_of(side).family == "deepspeed" else sys.executable
        outcome = launch.run_ranks(
            "benchmarks.offload.largest",
            job,
            1,
            threads=setting.threads,
            python=python,
            timeout=options.timeout,
        )
    print(
        f"# {side}, {layers} blocks: {outcome['status']} in {outcome['wall_s']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return {"error": "", **about, **outcome}


def _row(
    side: str, best: int, above: int, tried: dict[int, dict[str, Any]], width: int
) -> list[str]:
    too_large = [f"{parameters_of(above, width) / 1e9:.2f}B", essence(tried[above]["error"])[:80]]
    if not best:
        return [side, "none", *["–"] * 4, *too_large]
    rank = tried[best]["ranks"][0]
    memory = [
        "–" if rank[name] is None else f"{rank[name]:,.0f}"
        for name in ("device_mib", "resident_mib")
    ]
    return [
        side,
        f"{parameters_of(best, width) / 1e9:.2f}B",
        str(best),
        f"{rank['step_s']:.2f}",
        *memory,
        *too_large,
    ]
