"""Invariant 9: every use of a buffer on another stream is behind a wait.

On the virtual device (tests/virtual) every copy and kernel runs as late, and in as strange an order, as the waits allow, by a seed; and a
checker names two uses of the same bytes that no wait orders. Collectives are those of the stand-in for NCCL (tests/standin), each
communicator on a stream of its own. What is compared with is the same program with each operation done at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import virtual
from late_steps import Trial, under_schedules
from models import TinyGPT
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())

HOST = {"offload_optimizer": "cpu", "offload_param": "cpu"}
DISK = {"offload_optimizer": "nvme", "offload_param": "nvme", "chunk": 65536}


class Checkpointed(TinyGPT):
    def __init__(self) -> None:
        super().__init__(checkpointing="non-reentrant")


def of(stage: int, how: str = "", steps: int = 3, build: Any = TinyGPT, **options: Any) -> Trial:
    return Trial(stage, options, frozenset(how.split()), steps, build)


ALONE = {
    "as it is": of(0, "clips evaluates"),
    "states on the host": of(0, "clips accumulates decays", offload_optimizer="cpu"),
    "bf16, states on the host": of(0, "evaluates decays", precision="bf16", offload_optimizer="cpu"),
    "stepped behind the backward pass": of(0, offload_optimizer="cpu", step_in_backward=True),
    "bf16, stepped behind the backward pass": of(3, precision="bf16", **HOST, step_in_backward=True),
    "all on the host": of(3, "evaluates writes", **HOST),
    "bf16, all on the host, checkpointed": of(3, "frozen", precision="bf16", build=Checkpointed, **HOST),
    "states on NVMe": of(0, "clips writes", offload_optimizer="nvme", chunk=65536),
    "bf16, all on NVMe": of(3, "evaluates", precision="bf16", **DISK),
    "activations on the host": of(0, offload_activations=True),
    "saved and loaded": of(0, "saves fused"),
    "saved and loaded, all on the host": of(3, "saves writes", **HOST),
}
TOGETHER = {
    "stage 0": (2, of(0, "clips accumulates raises")),
    "stage 1, bf16": (2, of(1, "evaluates writes", precision="bf16")),
    "stage 2": (2, of(2, "clips raises")),
    "stage 3": (2, of(3, "clips evaluates")),
    "stage 3, bf16": (2, of(3, "saves accumulates decays", precision="bf16")),
    "stage 3, checkpointed, frozen parts": (2, of(3, "frozen", build=Checkpointed)),
    "stage 3, nothing prefetched": (2, of(3, overlap=False)),
    "stage 1, states on the host": (2, of(1, "evaluates writes decays", precision="bf16", offload_optimizer="cpu")),
    "stage 3, all on the host": (2, of(3, "saves writes decays", precision="bf16", **HOST)),
    "stage 3, stepped behind the backward pass": (2, of(3, precision="bf16", **HOST, step_in_backward=True)),
    "stage 3, all on NVMe": (2, of(3, "clips", precision="bf16", **DISK)),
    "stage 2, activations on the host": (2, of(2, offload_activations=True)),
    "two levels": (4, of(3, "clips", group=2)),
    "HSDP": (4, of(3, "accumulates raises", shard_group=2)),
    "a second copy, int8": (4, of(3, precision="bf16", group=2, second_copy=True, gather_codec="int8")),
    "int4 gradients": (2, of(2, "clips", precision="bf16", reduce_codec="int4")),
}


def seeds(everything: bool) -> range:
    return range(100 if everything else int(os.environ.get("ONEFOLD_TEST_SEEDS", "4")))


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_has_the_same_bits_under_every_schedule(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = run_ranks(1, under_schedules, ALONE[name], seeds(request.config.getoption("--all")), str(tmp_path), timeout=1200)
    assert found == [[]]


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_have_the_same_bits_under_every_schedule(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    world_size, trial = TOGETHER[name]
    found = run_ranks(world_size, under_schedules, trial, seeds(request.config.getoption("--all")), str(tmp_path), timeout=1200)
    assert found == [[]] * world_size
