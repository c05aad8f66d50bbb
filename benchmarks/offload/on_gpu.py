"""Two chapters of `benchmarks/gpu.py`: state off the device beside one GPU.

4. What does it cost? Onefold with its state on the host and on NVMe, plain PyTorch, FSDP2's
   CPUOffloadPolicy and DeepSpeed's ZeRO-Offload on one model: tokens/s, TFLOP/s, memory; and, from
   a trace of two steps, which part of the copies between host and device had a compute kernel
   beside it, how long the copies alone kept the device, and how much of them went through pinned
   memory. Goals: 1.5 × DeepSpeed's rate with the same state off the device, and 90 % of the copies
       hidden where the batch gives enough compute.
5. What fits? The largest model that takes two steps, block after block of a wide GPT, for each
side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gpu, harness
from benchmarks.harness import essence
from benchmarks.offload.largest import parameters_of
from benchmarks.offload.settings import PLAIN, SIDES, Side
from benchmarks.peers import adapters, launch
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import Setting

ALONE: tuple[str, ...] = (
    "plain",
    "onefold-3",
    "onefold-2-cpu",
    "onefold-2-cpu-behind",
    "onefold-3-cpu-param",
    "onefold-3-nvme",
    "onefold-3-nvme-behind",
    "onefold-3-nvme-param",
    "fsdp2-cpu",
    "deepspeed-2-cpu",
    "deepspeed-3-cpu-param",
)
"""Sides of chapter 4, in the order of a round. On one rank a stage is a name: parameters leave the device at stage 3 only."""

LARGEST: tuple[str, ...] = (
    "plain",
    "onefold-3-cpu-param",
    "onefold-3-nvme-param",
    "onefold-2-cpu",
    "fsdp2-cpu",
    "deepspeed-2-cpu",
    "deepspeed-3-cpu-param",
)
BASELINE = "deepspeed-2-cpu"
"""ZeRO-Offload as its paper has it: gradients and states on the host, 16-bit parameters on the device."""
GROWTH = 1.5
HOST_SHARE = 0.9
"""Of the free host memory, what an attempt may be expected to take."""


def side_of(name: str) -> Side:
    return {**SIDES, **PLAIN}[name]


def flops(name: str, tokens: int) -> float:
    """Floating-point operations of forward and backward over that many tokens: 6 a parameter and
    token, and of attention 12 × layers × width × sequence a token (Chowdhery et al. 2022, PaLM,
    appendix B), half of that since what is masked need not be computed.
    """
    shape = SHAPES[name]
    return tokens * (6.0 * count_parameters(name) + 6.0 * shape.layers * shape.width * shape.seq)


def available(names: tuple[str, ...], options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(sides that can run here, those whose library is not installed)"""
    pythons = {"deepspeed": options.deepspeed_python, "onefold": sys.executable}
    there = {p: launch.interpreter_has(python, p) for p, python in pythons.items()}
    absent = [
        name for name in names if (package := adapters.requirement(name)) and not there[package]
    ]
    return [name for name in names if name not in absent], absent


def offload(options: argparse.Namespace) -> tuple[harness.Table, list[dict[str, Any]]]:
    """Chapter 4. Rounds alternate over the sides; the last round of each has its trace."""
    columns = (
        "side", "tokens a step", "step ms", "tokens/s", "TFLOP/s", "× plain", f"× {BASELINE}'s rate", "device MiB", "host MiB",
        "copies ms", "of it hidden", "exposed ms", "pinned", "idle ms", "loss difference",
    )  # fmt: skip
    table = harness.Table(f"4. State off the device, one GPU: {options.model}, bf16", columns)
    sides, absent = available(ALONE, options)
    outcomes = []
    for accumulation in options.accumulations:
        setting = Setting(
            model=options.model, tokens=options.tokens, precision="bf16", ranks=1, accumulation=accumulation, warmup=3,
            steps=max(3, options.steps // accumulation), threads=options.threads, device=options.device,
        )  # fmt: skip
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in sides:
                last = number == options.rounds - 1
                trace = (
                    str(options.output.resolve() / f"gpu-trace-{side}-{accumulation}.json.gz")
                    if last
                    else None
                )
                outcome = on_side(side, setting, options, trace=trace)
                outcomes.append(outcome)
                if outcome["status"] == "ok":
                    found[side].append(outcome["ranks"][0])
        table.rows += [_row(side, setting, found) for side in sides]
        table.rows += [
            [side, f"{setting.tokens_a_step:,}", "not installed", *["–"] * (len(columns) - 3)]
            for side in absent
        ]
    return table, outcomes


def on_side(
    side: str, setting: Setting, options: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """A turn of chapter 4, with a folder on the disk of its own while it lasts."""
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.disk) as place:
        disk = str(Path(place).resolve()) if side_of(side).on_disk else None
        python = options.deepspeed_python if side_of(side).family == "deepspeed" else sys.executable
        return gpu.run(
            side,
            setting,
            options,
            python=python,
            disk=disk,
            own_adam=options.deepspeed_adam,
            **more,
        )


def _row(side: str, setting: Setting, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    tokens = setting.tokens_a_step
    mine = found[side]
    if not mine:
        return [side, f"{tokens:,}", "failed", *["–"] * 12]
    step = _step(mine)
    plain, baseline = (
        _step(found[other]) if found.get(other) else None for other in ("plain", BASELINE)
    )
    reference = found.get("plain") or mine
    seen = next((rank["trace"] for rank in reversed(mine) if rank.get("trace")), None)
    host = [rank["host_mib"] for rank in mine if rank.get("host_mib") is not None]
    return [
        side,
        f"{tokens:,}",
        f"{1000 * step:.1f}",
        f"{tokens / step:,.0f}",
        f"{flops(setting.model, tokens) / step / 1e12:.1f}",
        f"{step / plain:.3f}" if plain else "–",
        f"{baseline / step:.2f}" if baseline else "–",
        f"{median(rank['peak_mib'] for rank in mine):,.0f}",
        f"{median(host):,.0f}" if host else "–",
        *_traced(seen),
        f"{gpu.relative(mine[0]['losses'][:6], reference[0]['losses'][:6]):.1e}",
    ]


def _step(ranks: list[dict[str, Any]]) -> float:
    return median(second for rank in ranks for second in rank["step_s"])


def _traced(seen: dict[str, float] | None) -> list[str]:
    """Copies of a step, their hidden and exposed part, the pinned part of them, idle time; of the
    two steps that were traced, the mean.
    """
    if seen is None or not seen["comm_s"]:
        return ["–"] * 4 + ([f"{500 * seen['idle_s']:.1f}"] if seen is not None else ["–"])
    copies = seen["pinned_s"] + seen["pageable_s"]
    return [
        f"{500 * seen['comm_s']:.1f}",
        f"{seen['both_s'] / seen['comm_s']:.0%}",
        f"{500 * (seen['comm_s'] - seen['both_s']):.1f}",
        f"{seen['pinned_s'] / copies:.0%}" if copies else "–",
        f"{500 * seen['idle_s']:.1f}",
    ]


def largest(options: argparse.Namespace) -> tuple[harness.Table, list[dict[str, Any]]]:
    """Chapter 5."""
    columns = ("side", "largest", "blocks", "step s", "device MiB", "host MiB", "too large", "why")
    title = (
        f"5. The largest model, one GPU: blocks of width {options.width:,},"
        f" {options.largest_tokens:,} tokens, recomputed"
    )
    table = harness.Table(title, columns)
    sides, absent = available(LARGEST, options)
    outcomes = []
    for side in sides:
        tried: dict[int, dict[str, Any]] = {}

        def fits(layers: int, side: str = side, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[layers] = _attempt(side, layers, options)
            return bool(tried[layers]["status"] == "ok")

        best, above = search(fits, options.blocks)
        outcomes += tried.values()
        table.rows.append(_largest_row(side, best, above, tried, options.width))
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
    from onefold.memory.host import free_host_memory

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


def _largest_row(
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
