"""How many of the host's threads work on what is stored there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest
import torch

from onefold.cores import launcher_environment, threads_for
from onefold.device import using_threads

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_PROCID": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("cores", "ranks", "now", "environment", "launcher", "expected"),
    [
        # torchrun has set 1: the share of the cores
        (96, 8, 1, TORCHRUN, {}, 12),
        (96, 8, 1, TORCHRUN, None, 12),
        (4, 8, 1, TORCHRUN, {}, 1),
        # The user has set 1 before torchrun
        (96, 8, 1, TORCHRUN, {"OMP_NUM_THREADS": "1"}, 1),
        # The user has set another number, in the environment or in the script
        (96, 8, 4, {**TORCHRUN, "OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}, 4),
        (96, 8, 3, TORCHRUN, {}, 3),
        # Another launcher sets nothing by itself
        (96, 8, 1, SRUN, {}, 1),
        # Nobody has set anything: torch's own number, at most the share
        (96, 1, 96, {}, {}, 96),
        (96, 8, 96, {}, {}, 12),
        (96, 8, 2, {}, {}, 2),
        (2, 1, 2, {}, None, 2),
        (1, 0, 1, {}, None, 1),
    ],
)
def test_threads_are_the_share_of_the_cores_unless_the_user_has_set_a_number(
    cores: int,
    ranks: int,
    now: int,
    environment: Mapping[str, str],
    launcher: Mapping[str, str] | None,
    expected: int,
) -> None:
    assert threads_for(cores, ranks, now, environment, launcher) == expected


def test_the_launchers_own_environment_is_what_its_user_has_set() -> None:
    """As torchrun does, the launcher sets a variable before it starts the rank."""
    child = (
        "from onefold.cores import launcher_environment;"
        " print('ONEFOLD_SET_LATE' in launcher_environment(),"
        " launcher_environment()['ONEFOLD_SET_BEFORE'])"
    )
    launcher = (
        "import os, subprocess, sys; os.environ['ONEFOLD_SET_LATE'] = '1';"
        f" subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    said = subprocess.run(
        [sys.executable, "-c", launcher],
        env={**os.environ, "ONEFOLD_SET_BEFORE": "yes"},
        capture_output=True,
        text=True,
        check=True,
    )
    if launcher_environment() is None:
        pytest.skip("this system does not tell a process's first environment")
    assert said.stdout.split() == ["False", "yes"]


def test_a_number_of_threads_is_taken_back_and_is_that_of_one_thread() -> None:
    before = torch.get_num_threads()
    beside: list[int] = []
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        torch.get_num_threads()
        inside.set()
        leave.wait(60)
        beside.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    with pytest.raises(ValueError, match="on purpose"), using_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        leave.set()
        thread.join()
        raise ValueError("on purpose")
    assert beside == [before] and torch.get_num_threads() == before
