"""Before a run: what the disks give, and whether it will fit."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from nvme_tools import left_behind

from onefold.offload.nvme import Nvme, TierError, measure, refuse_unless_fits

MIB = 1 << 20


def test_measuring_says_what_each_folder_gives_and_leaves_nothing(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    threads, files, state = (
        set(threading.enumerate()),
        len(os.listdir("/proc/self/fd")),
        torch.get_rng_state(),
    )
    rates = measure(paths, 8 * MIB)
    assert [rate.path for rate in rates] == [str(path) for path in paths]
    for rate in rates:
        assert rate.read > MIB, rate
        assert rate.write > MIB, rate
        assert 0 < rate.free <= shutil.disk_usage(tmp_path).total
    with Nvme(paths, name="same") as store:
        assert all(rate.direct for rate in rates) == store.direct
    assert not any(any(path.iterdir()) for path in paths)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert torch.equal(torch.get_rng_state(), state), "the run's random numbers are not used up"


def test_measuring_a_folder_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(TierError, match="is not there"):
        measure(tmp_path / "missing")


def test_what_does_not_fit_is_refused_with_what_is_needed_and_what_is_free(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free
    refuse_unless_fits([tmp_path], free // 2, "the optimizer's states")
    with pytest.raises(
        TierError,
        match=(
            rf"the optimizer's states: {4 * free:,} bytes are needed at {tmp_path}, where .* are"
            r" free"
        ),
    ):
        refuse_unless_fits([tmp_path], 4 * free, "the optimizer's states")
    with pytest.raises(TierError, match="is not there"):
        refuse_unless_fits([tmp_path / "missing"], 1, "the optimizer's states")


def test_folders_of_one_file_system_share_what_is_free_in_it(tmp_path: Path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    need = int(1.5 * shutil.disk_usage(tmp_path).free)  # each half would fit
    with pytest.raises(TierError, match=f"{paths[0]} and {paths[1]}"):
        refuse_unless_fits(paths, need, "this run")


def test_what_the_dead_have_left_does_not_count_as_full(tmp_path: Path):
    dead = left_behind(tmp_path)
    refuse_unless_fits([tmp_path], 1, "this run")
    assert not dead.exists()
