"""Joining or starting ranks, and what ranks find in their environment."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from onefold.cores import physical_cores
from onefold.processes import host
from onefold.processes.host import child_environment, from_slurm, joins
from onefold.processes.local import local_ranks
from onefold.train.config import resolve
from onefold.train.launch import ranks_to_start
from onefold.wording import TrainError
from started_runs import processes_of, started, wait_for


def test_a_process_with_a_rank_joins_and_one_without_starts_ranks() -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert joins(whole) and not joins({})
    with pytest.raises(TrainError, match="WORLD_SIZE, MASTER_ADDR"):
        joins({"RANK": "1", "MASTER_PORT": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-4,9]", "n3"),
        ("gpu-[007,010]-ib,x", "gpu-007-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_a_slurm_step_of_several_tasks_joins(nodes: str, first: str) -> None:
    step = {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }  # fmt: skip
    found = from_slurm(step)
    assert joins(found) and found["MASTER_ADDR"] == first
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == (
        "3",
        "4",
        "1",
        "2",
    )
    assert 20000 <= int(found["MASTER_PORT"]) < 40000
    assert from_slurm({**step, "RANK": "0"}) == {}


def test_a_slurm_batch_script_starts_its_own_ranks() -> None:
    assert from_slurm({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == {}


def test_messages_are_logged_again_where_ranks_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("torch.distributed.elastic.multiprocessing.start_processes", fails)
    with pytest.raises(OSError), local_ranks(1, {}, "nothing", logs=tmp_path):
        pass
    assert logging.getLogger("onefold").isEnabledFor(logging.ERROR)


def test_cores_are_divided_among_ranks_unless_the_user_has_said_so(tmp_path: Path) -> None:
    assert child_environment({}, 1, tmp_path, False)["OMP_NUM_THREADS"] == str(physical_cores())
    assert child_environment({}, 1000, tmp_path, False)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])  # fmt: skip
def test_ranks_on_gpus_get_expandable_segments_unless_the_user_has_said_otherwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver"
    monkeypatch.setattr(host, "DRIVERS", (str(driver),))
    assert name not in child_environment({}, 1, tmp_path, False)
    driver.touch()
    set_by_us = child_environment({}, 1, tmp_path, False)
    assert set_by_us["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    found = child_environment({name: "max_split_size_mb:64"}, 1, tmp_path, False)
    kept = {key: value for key, value in found.items() if key.endswith("ALLOC_CONF")}
    assert kept == {name: "max_split_size_mb:64"}
    assert child_environment({"OMP_NUM_THREADS": "3"}, 2, tmp_path, False)["OMP_NUM_THREADS"] == "3"
    assert child_environment({}, 1, tmp_path, False)["HF_HUB_OFFLINE"] == "1"


def test_ranks_are_as_many_as_asked_for_or_as_cores() -> None:
    assert ranks_to_start(resolve({"nproc": 3, "device": "cpu"}))[0] == 3
    assert ranks_to_start(resolve({"device": "cpu"}))[0] == physical_cores()


def listeners(pids: Iterable[int]) -> set[str]:
    """The addresses, in hexadecimal, on which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_loopback_alone_and_goes_on_where_its_folder_is_removed(
    tmp_path: Path,
) -> None:
    job = "--model small_lm:unhurried --tokenizer bytes --seq 64 --device cpu --nproc 2 --steps 20"
    where = tmp_path / "run"
    with started(tmp_path, *job.split(), "--eval-every", "0", "--output", str(where)) as process:
        wait_for(process, lambda row: row["event"] == "step")
        found = processes_of(tmp_path / "tmp")
        assert len(found) >= 3  # the command, two ranks
        assert listeners(found) == {"0100007F"}
        shutil.rmtree(where)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["event"] == "done" and events[-1]["model"] == str(where / "model")
