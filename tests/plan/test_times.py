"""The time model: what must hold for any machine, and what its terms are."""

from __future__ import annotations

import pytest
from benchmarks.validation.systems import work
from hypothesis import given
from hypothesis import strategies as st

from onefold.plan.hardware import Machine, builtin, machine
from onefold.plan.schema import SECONDS
from onefold.plan.times import Work, step_times
from onefold.plan.traffic import Software, Traffic

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
