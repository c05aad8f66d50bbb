"""Measure what one rank of this machine reaches while all ranks do the same: large matrix products,
copies, gathers, and training steps of the engine. A rank is `main`; rank 0 writes the figures into a
folder.

[Note: the group's seconds] A step ends when its last rank does. With more ranks than cores, the
system may run some ranks to their end before others begin, and each rank's own clock then shows the
time of an undisturbed processor (4 ranks on 2 cores: 0.5 to 0.9 of the group's time). The ranks are
on one machine and read one clock, so the first begin and the last end can be compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onefold
from onefold.comm import CollectiveContext, Group
from onefold.device import has_streams, synchronize
from onefold.plan.hardware import PRECISIONS
from onefold.processes.ranks import Ranks, join, leave
from onefold.recipe import COMPUTE_DTYPES, Recipe
from onefold.recipe.options import Precision
from onefold.recipe.rows import FLAT

RESULT = "result.json"
#: Seconds a rank waits for another; the fewest seconds of one timing, so that the cost of the clock
#: and of waking ranks up is small; timings of which the median counts.
TIMEOUT, SHORTEST, REPEATS = 120.0, 0.02, 5
#: Blocks of the model that is trained.
BLOCKS = 4


@dataclass(frozen=True)
class Sizes:
    """Side of the products; bytes of a copy (far more than the caches), of the largest and of the
    smallest gather; width and tokens of the trained blocks.
    """

    side: int
    copy: int
    gather: int
    small: int
    width: int
    tokens: int


SIZES = {
    "cpu": Sizes(1024, 64 << 20, 16 << 20, 64 << 10, 256, 256),
    "cuda": Sizes(8192, 512 << 20, 256 << 20, 64 << 10, 2048, 2048),
}


def measure(ranks: Ranks, sizes: Sizes) -> dict[str, Any]:
    """Return the row of a GPU or of a rank's share of the CPU, and figures of
    `onefold.machine.calibration.Calibration`. Collective: all ranks do the same at the same time.
    """
    device, world_size = ranks.device, ranks.world_size

    def once(call: Callable[[], object], count: int) -> float:
        synchronize(device)
        ranks.gather(None)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        synchronize(device)
        begins, ends = zip(*ranks.gather((begin, time.perf_counter())), strict=True)
        return float(max(ends) - min(begins))

    def seconds(call: Callable[[], object]) -> float:
        """Return the median seconds of a call; see [Note: the group's seconds]. The first does not
        count.
        """
        call()
        count = max(1, round(SHORTEST / max(once(call, 1), 1e-7)))
        return statistics.median(once(call, count) for _ in range(REPEATS)) / count

    # FLOP/s of a large product by precision
    rates, n = dict[str, float](), sizes.side
    lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(False)
    for precision in PRECISIONS:
        slow = precision == "fp16" and device.type == "cpu"
        if precision == "tf32" or slow or (precision == "bf16" and lacks_bf16):
            continue
        a, b = torch.randn(2, n, n, device=device).to(COMPUTE_DTYPES[precision])
        rates[precision] = 2 * n**3 / seconds(partial(F.linear, a, b))

    # Bytes/s of copies within memory, read and written, and over the host link
    source, target = torch.zeros(2, sizes.copy, dtype=torch.uint8, device=device)
    memory = 2 * sizes.copy / seconds(partial(target.copy_, source))
    copies = {"memory_bandwidth": memory}
    if has_streams(device):
        host = torch.zeros(sizes.copy, dtype=torch.uint8, device="cpu", pin_memory=True)
        down = seconds(partial(target.copy_, host, non_blocking=True))
        up = seconds(partial(host.copy_, target, non_blocking=True))
        copies["host_link"] = sizes.copy / max(up, down)
    del source, target

    # Bytes/s that a rank sends in large gathers, and seconds of one hop
    link, hop = memory, 0.0  # one rank moves nothing: any rate would do
    if world_size > 1:
        group = Group.over(None, device, TIMEOUT, FLAT)
        context = CollectiveContext("all-gather", "calibration", 0, "doctor")
        sent, took = [], []
        for nbytes in (sizes.small, sizes.gather):
            full = torch.zeros(max(1, nbytes // 4 // world_size) * world_size, device=device)
            sent.append(4 * full.numel() // world_size * (world_size - 1))
            took.append(seconds(lambda full=full: group.all_gather(full, context, 0).wait()))  # type: ignore[misc]
        group.close()
        link = (sent[1] - sent[0]) / max(took[1] - took[0], 1e-9)
        # A ring of N ranks takes N - 1 hops; gloo's ranks send to all at once
        hop = max(0.0, took[0] - sent[0] / link) / (1 if device.type == "cpu" else world_size - 1)

    # What passes through blocks of torch's own reach of the rate of large products. In other precisions
    # they reach another share: their rates become those with which it is the same
    w, t = sizes.width, sizes.tokens
    first: Precision = "bf16" if device.type == "cuda" and "bf16" in rates else "fp32"
    x = torch.randn(1, t, w, device=device)
    # PaLM (2022), appendix B: 6 for each of the 12·h² parameters of a layer and token, 12·h·s for attention
    flops = BLOCKS * (6 * 12 * w * w * t + 12 * w * t * t)

    def training(stage: int, precision: Any) -> tuple[Any, torch.optim.Optimizer]:
        layers = [
            nn.TransformerEncoderLayer(w, max(1, w // 64), 4 * w, 0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        ]  # fmt: skip
        recipe = Recipe.zero(stage, precision=precision, stall_timeout=TIMEOUT)
        model = onefold.shard(nn.Sequential(*layers), recipe, device=device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    computing = {}
    for precision in rates:
        model, _ = training(0, precision)
        with onefold.no_sync(model):
            computing[precision] = seconds(lambda m=model: m(x).float().sum().backward())  # type: ignore[misc]
    reached = flops / computing[first] / rates[first]
    rates = {precision: flops / took / reached for precision, took in computing.items()}

    # What a step at stage 3 takes longer than its parts, for each second of its moves at the rate of
    # large gathers: above 1 on a CPU, where moves beside computing reach a third of that rate
    model, optimizer = training(3, first)

    def step() -> None:
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    engine = onefold.engine_of(model)
    before = engine.traffic.sent().nbytes
    step()
    moving = (engine.traffic.sent().nbytes - before) / link
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient
    update = 28 * BLOCKS * 12 * w * w / world_size / memory
    beyond = seconds(step) - computing[first] - update
    contention = max(0.0, beyond / moving) if moving else 0.0
    gpu = {"attainable": 1.0, **rates, **copies, "link": link}
    return {"gpu": gpu, "kernel_share": reached, "hop_seconds": hop, "contention": contention}


def main(folder: str, device: str) -> None:
    """Measure as one rank."""
    ranks = join(device, TIMEOUT)
    found = measure(ranks, SIZES[device])
    if ranks.is_first:
        Path(folder, RESULT).write_text(json.dumps(found), encoding="utf-8")
    leave()
