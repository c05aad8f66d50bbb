"""Seconds of a step: the plan's schedule beside the engine's own, and the closed form of published
systems, of which nobody knows the order of operations.
"""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.validation.closed_form import SECONDS, Software, Traffic, Work, step_times
from benchmarks.validation.systems import work
from hypothesis import given
from hypothesis import strategies as st

from onefold.plan import times
from onefold.plan.api import planned as plan
from onefold.plan.hardware import Machine, builtin, machine
from onefold.plan.job import Job

gpus = st.sampled_from(sorted(builtin().gpus))
links = st.sampled_from(["100g", "8x200g", "ib-ndr"])
sizes = st.sampled_from([1, 2, 8, 16, 64, 512, 4096])


def plain(n: int = 64, link: str = "8x200g") -> Machine:
    return machine(n, 8, "a100-80", link)


@given(
    gpus,
    links,
    sizes,
    st.floats(1e9, 1e18),
    st.floats(1e6, 1e13),
    st.sampled_from(["zero-2", "zero-3"]),
)
def test_a_step_is_the_sum_of_its_parts(
    gpu: str, link: str, n: int, flops: float, numel: float, scheme: str
) -> None:
    there = machine(n, 8, gpu, link)
    times = step_times(work(numel, 24, flops, there, scheme), there)  # type: ignore[arg-type]
    assert tuple(times.seconds) == SECONDS
    assert times.step == pytest.approx(sum(times.seconds[name] for name in SECONDS[:-1]))
    assert all(v >= 0 for v in times.seconds.values())
    assert times.seconds["exposed communication"] <= times.communication * (1 + 1e-9)
    assert 0 < times.mfu < 1


def test_the_first_gather_and_the_last_reduction_stay_exposed() -> None:
    there, soft = plain(8), Software(overlap=1, straggler=0)
    moves = [
        Traffic.ring("all-gather", 7e9, 20, there),
        Traffic.ring("reduce-scatter", 7e9, 20, there),
    ]
    times = step_times(Work(1e18, moves), there, soft)
    assert times.seconds["exposed communication"] == pytest.approx(times.communication * 2 / 40)


def test_the_host_and_the_disk_are_hidden_as_far_as_compute_leaves_room() -> None:
    there, soft = plain(8), Software(overlap=1)
    idle, busy = (
        step_times(Work(flops, host_bytes=100e9), there, soft).seconds["io"]
        for flops in (0.0, 1e18)
    )
    assert idle == pytest.approx(100e9 / there.host_link())
    assert busy == 0
    slow = step_times(Work(0.0, host_bytes=1e9, nvme_bytes=100e9), there, soft).seconds["io"]
    assert slow == pytest.approx(100e9 / (there.host.nvme_bandwidth / 8))


# -- the schedule ----------------------------------------------------------------------------------

#: Milliseconds of a step of Llama 3 8B in bf16 on H100s, by (GPUs, stage, tokens, options): those of
#: the real engine, whose launches were timed one by one with the same prices of kernels and links;
#: parts were added up at 0.8 of a copy's rate then.
ENGINE: tuple[tuple[int, int, int, dict[str, Any], float], ...] = (
    (8, 3, 2048, {"prefetch": 0}, 297.6),
    (8, 3, 2048, {"prefetch": 1}, 199.4),
    (8, 3, 2048, {"prefetch": 2}, 198.2),
    (8, 3, 2048, {"in_flight": 0}, 237.8),
    (8, 3, 2048, {"in_flight": 1}, 202.1),
    (8, 2, 2048, {"in_flight": 0}, 235.9),
    (8, 2, 2048, {"in_flight": 1}, 200.1),
    (8, 2, 2048, {"in_flight": 2}, 197.4),
    (64, 3, 2048, {"prefetch": 0}, 521.6),
    (64, 3, 2048, {"prefetch": 1}, 275.5),  # two units ahead over two levels
    (64, 3, 2048, {"prefetch": 2}, 273.0),
    (64, 3, 8192, {"prefetch": 0}, 1160.7),
    (64, 3, 8192, {"prefetch": 1}, 873.3),
    (64, 3, 8192, {"prefetch": 2}, 870.6),
    (8, 3, 2048, {"offload_optimizer": "cpu"}, 3240),
    (8, 3, 2048, {"offload_optimizer": "cpu", "offload_param": "cpu"}, 3550),
)


@pytest.mark.parametrize(("gpus", "stage", "seq", "options", "engine"), ENGINE)
def test_a_step_takes_what_the_engine_takes(
    gpus: int,
    stage: int,
    seq: int,
    options: dict[str, Any],
    engine: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(times, "SUMMING_ON_A_GPU", 0.8)
    job = Job(seq=seq, checkpointing="none", options=tuple(options.items()))
    found = plan("llama-3-8b", machine(gpus, 8, "h100-80"), job, stages=(stage,), largest=False)
    (planned,) = (c for c in found.stages if c.scheme.stage == stage)
    assert 1000 * planned.step == pytest.approx(engine, rel=0.05)


@pytest.mark.parametrize("name", [pytest.param("gpt2-xl", marks=pytest.mark.slow), "llama-3-8b"])
def test_more_stages_and_micro_batches_never_take_less(name: str) -> None:
    def seconds(ranks: int, batch: int) -> list[float]:
        job = Job(seq=1024, checkpointing="none", offload="none", global_batch=batch)
        found = plan(name, machine(ranks, 8, "h100-80"), job, largest=False)
        assert all(
            sum(list(c.account.seconds.values())[:-1]) == pytest.approx(c.step)
            for c in found.stages
        )
        return [c.step for c in found.stages]

    for ranks in (8, 64):
        once, five = seconds(ranks, ranks), seconds(ranks, 5 * ranks)
        assert once[3] >= once[2] * 0.999 and five[3] >= five[1] * 0.999
        assert all(2 * a < b <= 5.001 * a for a, b in zip(once, five, strict=True)), (once, five)
