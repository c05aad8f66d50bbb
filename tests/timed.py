"""A model of four equal blocks on a machine of round figures, whose timelines are worked out by hand;
and a short Llama 3 8B.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import onefold
from onefold.plan import shapes
from onefold.plan.hardware import Gpu, Host, Machine
from onefold.plan.traffic import Software
from onefold.simulation import prices
from onefold.simulation.result import Simulation
from onefold.simulation.simulate import simulate
from onefold.simulation.timeline import COMPUTE, HOST, Span, Timeline

BLOCKS, HIDDEN, ROWS, RANKS = 4, 1024, 1024, 2
NUMEL = HIDDEN * HIDDEN
#: Elements of a block that one rank steps.
OWN = NUMEL // RANKS
#: Memory traffic on the device and launches take nothing.
EXACT = Software(kernel_share=1, link_share=1, hop_seconds=0, straggler=0, launch_seconds=0)
#: Bytes that Adam moves for an element, and those of a cast to 16 bits.
ADAM, CAST = 28, 6


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Words(Blocks):
    """The blocks behind a small table, so that the first one has a gradient of its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, HIDDEN)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words(words))


def by_hand(
    down: float = 1.0, update: float = 1.0, disk: float = 0.0, latency: float = 0.0
) -> Machine:
    """A product takes 2 s, a gather or a reduction of a block 1 s.

    Args:
        down: seconds in which a rank's fp32 gradient of a block comes down.
        update: seconds in which the host steps a rank's part of a block, with Adam.
        disk: seconds in which that many bytes, in fp32, are read or written on NVMe.
        latency: of a read or write on NVMe.
    """
    gpu = Gpu(
        "by hand", "", 1 << 40, {"bf16": ROWS * NUMEL}, 1.0, float("inf"), NUMEL, 4 * OWN / down
    )
    rate = RANKS * 4 * OWN / disk if disk else float("inf")
    host = Host(1e12, RANKS * ADAM * OWN / update, float("inf"), 1e12, rate, nvme_latency=latency)
    return Machine(gpu, RANKS, RANKS, None, host)


@cache
def simulation(
    stage: int = 3,
    micro_batches: int = 1,
    down: float = 1.0,
    update: float = 1.0,
    disk: float = 0.0,
    latency: float = 0.0,
    optimizer: str = "adamw",
    words: bool = False,
    **options: Any,
) -> Simulation:
    recipe = onefold.Recipe.zero(stage, precision="bf16", units=(nn.Linear,), **options)
    # What is worked out by hand is so for software of round figures
    with patch.object(prices, "measured_software", lambda *_: EXACT):
        found = simulate(
            Words() if words else Blocks(),
            recipe,
            RANKS,
            micro_batches=micro_batches,
            batch=torch.zeros(ROWS, dtype=torch.long) if words else torch.zeros(ROWS, HIDDEN),
            loss=torch.sum,
            machine=by_hand(down, update, disk, latency),
            optimizer=optimizer,
        )
    assert found.exact, f"{found.account} against {found.predicted}"
    return found


def run(**options: Any) -> Timeline:
    """The timeline of a step. Equal steps are simulated once."""
    timeline = simulation(**options).timeline
    assert timeline is not None
    last = max(s.end for s in timeline.spans if s.stream in (COMPUTE, HOST))
    assert timeline.step == pytest.approx(last), "the parts are the whole step"
    for stream in timeline.streams:
        own = [s for s in timeline.spans if s.stream == stream]
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(own)), f"{stream} overlaps"
    return timeline


def of(timeline: Timeline, *names: str) -> list[Span]:
    return [s for s in timeline.spans if s.name in names and s.kind != "wait" and s.seconds]


def seconds(spans: list[Span]) -> float:
    return sum(s.seconds for s in spans)


#: Llama 3 8B with LAYERS of its 32 blocks.
SHORT, LAYERS = "llama-3-8b-short", 4


@contextmanager
def short_llama() -> Iterator[None]:
    """Let the table of architectures have SHORT."""
    whole = shapes.find("llama-3-8b")
    short = replace(whole, name=SHORT, dims=replace(whole.dims, layers=LAYERS))
    with patch.dict(shapes.ARCHITECTURES, {SHORT: short}):  # type: ignore[arg-type]
        yield
