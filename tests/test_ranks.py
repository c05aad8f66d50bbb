"""The harness itself: it returns values, tells failures, kills what hangs and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import ranks
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


NEIGHBOURS = """
import os, threading
import pytest, torch
import torch.distributed as dist
from on_ranks import on_ranks

@on_ranks(2)
@pytest.mark.parametrize("power", [lambda x: x, lambda x: x * x])
def test_good(power, folder):
    (folder / str(dist.get_rank())).write_text("")
    dist.barrier()
    assert len(list(folder.iterdir())) == 2 and power(1) == 1

@on_ranks(2)
def test_uneven():
    total = torch.ones(1)
    if dist.get_rank() == 1:
        raise ValueError("of rank one")
    dist.all_reduce(total)

@on_ranks(2)
def test_both_raise():
    assert dist.get_rank() > 5, "alike"

@on_ranks(2)
def test_skips():
    pytest.skip("not here")

@on_ranks(2)
def test_dies():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()

@on_ranks(2)
def test_dtype_left():
    torch.set_default_dtype(torch.float64)

@on_ranks(2)
def test_last():
    dist.barrier()
"""


@pytest.mark.slow
def test_neighbours_on_ranks_share_a_start_and_have_results_of_their_own(tmp_path: Path) -> None:
    """Whatever happens in one test, those behind it are run."""
    tests = Path(__file__).parent
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tests)!r})\nimport ranks, on_ranks\n"
        "from on_ranks import folder, pytest_pyfunc_call\nranks.PRELOADED[:] = ['torch']\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'on_ranks: there')\n"
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
        "def pytest_collection_modifyitems(items):\n    on_ranks.form_groups(items)\n"
        "def pytest_unconfigure():\n    ranks.stop_fork_servers()\n"
    )
    (tmp_path / "test_neighbours.py").write_text(NEIGHBOURS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ranks.absolute_path()},
    )
    ended = {name: how for how, name in re.findall(r"^(\w+) \S*::(\w+)", run.stdout, re.M)}
    good = {"test_good": "PASSED", "test_last": "PASSED"}
    bad = dict.fromkeys(
        ["test_uneven", "test_both_raise", "test_dies", "test_dtype_left"], "FAILED"
    )
    assert ended == good | bad, run.stdout
    assert "4 failed, 3 passed, 1 skipped" in run.stdout, run.stdout
    for words in ("rank 1: ValueError: of rank one", "rank 0: AssertionError: alike", "died"):
        assert words in run.stdout
