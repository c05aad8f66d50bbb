"""The harness itself: it returns values, tells failures, kills what hangs and leaves nothing."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, outcomes_of, run_ranks

PROCESSOR = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ONEFOLD_TEST_PRODUCTS")


def sum_over_ranks(start: float) -> tuple[int, float]:
    total = torch.full((3,), start + dist.get_rank())
    dist.all_reduce(total)
    return os.getpid(), total[0].item()


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one does not like this")
    dist.barrier()


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(7)


def processor() -> tuple[str, dict[str, str], list[float]]:
    """How torch computes in this process: its instructions, what it was told of the processor, and
    the bits of a product.
    """
    torch.set_num_threads(1)
    told = {name: value for name, value in os.environ.items() if name in PROCESSOR}
    product = torch.linspace(-1, 1, 37 * 53).view(37, 53) @ torch.linspace(1, 2, 53 * 61).view(
        53, 61
    )
    return torch.backends.cpu.get_cpu_capability(), told, product.flatten().tolist()


def test_ranks_compute_as_this_process_does() -> None:
    """What `make test-processors` sets reaches them through the fork server."""
    assert run_ranks(2, processor) == [processor()] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_returns_its_value(world_size: int) -> None:
    values = run_ranks(world_size, sum_over_ranks, 10.0)
    expected = sum(10.0 + rank for rank in range(world_size))
    assert [total for _, total in values] == [expected] * world_size
    assert not any(psutil.pid_exists(pid) for pid, _ in values), "a rank outlived its test"


def test_a_failure_on_one_rank_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)rank 1: ValueError: rank one does not like this.*raise_on_rank_1"
    ):
        run_ranks(2, raise_on_rank_1)


def test_a_rank_that_hangs_is_killed() -> None:
    begin = time.monotonic()
    outcomes = outcomes_of(2, sleep_for, 60.0, timeout=1.0)
    assert [o.error for o in outcomes] == ["killed", "killed"]
    assert time.monotonic() - begin < 45.0  # of the 60 that they would sleep


def test_a_rank_that_dies_is_told_from_one_that_answers() -> None:
    outcomes = outcomes_of(2, die_on_rank_0)
    assert [(o.error, o.exitcode) for o in outcomes] == [("died", 7), ("", 0)]
