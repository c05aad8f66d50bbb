"""The chapter "offload": what does state off the device cost beside one GPU?

Onefold with its state on the host and on NVMe, plain PyTorch, FSDP2's CPUOffloadPolicy and
DeepSpeed's ZeRO-Offload on one model: tokens/s, TFLOP/s, memory; and, from a trace of two steps,
which part of the copies between host and device had a compute kernel beside it, how long the copies
alone kept the device, and how much of them went through pinned memory. Goals: 1.5 × DeepSpeed's rate
with the same state off the device, and 90 % of the copies hidden where the batch gives enough
compute.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness import Options, middle, relative
from benchmarks.on_gpu.run import available, run, state
from benchmarks.pages import DASH, Table
from benchmarks.peers.model import SHAPES, count_parameters
from benchmarks.peers.settings import Setting

ON_ONE_GPU: tuple[str, ...] = (
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
"""Sides, in the order of a round. On one rank a stage is a name: parameters leave the device at stage 3 only."""

BASELINE = "deepspeed-2-cpu"
"""ZeRO-Offload as its paper has it: gradients and states on the host, 16-bit parameters on the device."""


def flops(name: str, tokens: int) -> float:
    """Floating-point operations of forward and backward: 6 a parameter and token, and half of what
    attention computes, since the rest is masked (Chowdhery et al. 2022, PaLM, appendix B).
    """
    shape = SHAPES[name]
    return tokens * (6.0 * count_parameters(name) + 6.0 * shape.layers * shape.width * shape.seq)


def chapter(options: Options) -> tuple[Table, list[dict[str, Any]]]:
    """Rounds alternate over the sides; the last round of each has its trace."""
    columns = (
        "side", "tokens a step", "step ms", "tokens/s", "TFLOP/s", "× plain", f"× {BASELINE}'s rate", "device MiB", "host MiB",
        "copies ms", "of it hidden", "exposed ms", "pinned", "idle ms", "loss difference",
    )  # fmt: skip
    table = Table(f"State off the device, one GPU: {options.model}, bf16", columns)
    sides, absent = available(ON_ONE_GPU, options)
    outcomes = []
    for accumulation in options.accumulations:
        setting = Setting(
            model=options.model,
            tokens=options.tokens,
            precision="bf16",
            ranks=1,
            accumulation=accumulation,
            warmup=3,
            steps=max(3, options.steps // accumulation),
            threads=options.threads,
            device=options.device,
        )
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in sides:
                trace = f"gpu-trace-{side}-{accumulation}.json.gz"
                kept = (
                    str(options.output.resolve() / trace) if number + 1 == options.rounds else None
                )
                with state(options) as where:
                    outcome = run(side, setting, options, trace=kept, **where)
                outcomes.append(outcome)
                if outcome["status"] == "ok":
                    found[side].append(outcome["ranks"][0])
        for side in sides:
            table.add(side, f"{setting.tokens_a_step:,}", *_row(side, setting, found))
        for side in absent:
            table.add(side, f"{setting.tokens_a_step:,}", "not installed")
    return table, outcomes


def _row(side: str, setting: Setting, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The cells of a side behind its name and its tokens."""
    tokens, mine = setting.tokens_a_step, found[side]
    if not mine:
        return ["failed"]
    step = _step(mine)
    plain, baseline = (_step(found[s]) if found.get(s) else None for s in ("plain", BASELINE))
    reference = found.get("plain") or mine
    seen = next((rank["trace"] for rank in reversed(mine) if rank.get("trace")), None)
    host = middle(rank.get("host_mib") for rank in mine)
    return [
        f"{1000 * step:.1f}",
        f"{tokens / step:,.0f}",
        f"{flops(setting.model, tokens) / step / 1e12:.1f}",
        f"{step / plain:.3f}" if plain else DASH,
        f"{baseline / step:.2f}" if baseline else DASH,
        f"{median(rank['peak_mib'] for rank in mine):,.0f}",
        f"{host:,.0f}" if host is not None else DASH,
        *_traced(seen),
        f"{relative(mine[0]['losses'][:6], reference[0]['losses'][:6]):.1e}",
    ]


def _step(ranks: list[dict[str, Any]]) -> float:
    return median(second for rank in ranks for second in rank["step_s"])


def _traced(seen: dict[str, float] | None) -> list[str]:
    """Copies of a step (the mean of two), their hidden, exposed and pinned part, idle time."""
    if seen is None or not seen["comm_s"]:
        return [DASH] * 4 + ([f"{500 * seen['idle_s']:.1f}"] if seen is not None else [DASH])
    copies = seen["pinned_s"] + seen["pageable_s"]
    return [
        f"{500 * seen['comm_s']:.1f}",
        f"{seen['both_s'] / seen['comm_s']:.0%}",
        f"{500 * (seen['comm_s'] - seen['both_s']):.1f}",
        f"{seen['pinned_s'] / copies:.0%}" if copies else DASH,
        f"{500 * seen['idle_s']:.1f}",
    ]
