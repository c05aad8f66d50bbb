"""Whole commands: a second one on the same folder, ranks whose launcher is killed, Ctrl-C in every
moment of the start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import held
from onefold.processes.claim import LOCK, Claim
from onefold.wording import TrainError
from started_runs import (
    JOB,
    environment,
    left_behind,
    options,
    pid_of,
    processes_of,
    runs,
    started,
    wait_for,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.one_in(3)

ENDLESS = options({**JOB, "steps": 10**6, "nproc": 2, "output": "run"})


@pytest.mark.slow
def test_a_second_command_is_refused_and_what_was_killed_makes_way(
    tmp_path: Path, every: bool
) -> None:
    """One run is begun, a second one beside it; the first is killed; the same command goes on, and so on."""
    temporary = tmp_path / "tmp"
    again = [*ENDLESS, "--resume", "auto"]
    with started(tmp_path, *ENDLESS) as first:
        # While its ranks import torch, seconds before they would write anything
        wait_until(lambda: (tmp_path / "run" / LOCK).exists())
        with started(tmp_path, *again, temporary="second") as second:
            out, err = second.communicate(timeout=300)
        assert (
            second.returncode == 2
            and f"--output run is in use by process {first.pid} on " in err
            and err.count("\n") == 1
        ), err
        assert json.loads(out)["event"] == "error"
        wait_for_step(first, 15)
        with started(tmp_path, *ENDLESS, "--overwrite", temporary="third") as third:
            assert (
                f"process {first.pid} on " in third.communicate(timeout=300)[1]
                and third.returncode == 2
            )
        wait_for(first, lambda row: row["event"] == "checkpoint")

        ranks = [pid_of(temporary, rank) for rank in (0, 1)]
        first.kill()
        with started(tmp_path, *again, temporary="fourth") as fourth:
            wait_for(fourth, lambda row: row["event"] == "note" and "going on from" in row["text"])
            assert not any(runs(pid) for pid in ranks)
            wait_until(lambda: not processes_of(temporary))

            ranks = [pid_of(tmp_path / "fourth", rank) for rank in (0, 1)]
            fourth.kill()
            wait_until(lambda: not any(runs(pid) for pid in ranks))

    if not every:
        return
    with started(tmp_path, *again, temporary="fifth") as fifth:
        # A rank that imports torch: it has not looked at its parent for long
        wait_until(lambda: pid_of(tmp_path / "fifth", 0))
        fifth.kill()
        wait_until(lambda: not processes_of(tmp_path / "fifth"))


@pytest.mark.slow
def test_ranks_of_torchrun_end_with_it_and_the_first_holds_the_folder_as_long_as_it_lives(
    tmp_path: Path,
) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "-m",
        "onefold",
        "train",
    ]
    job = options({**JOB, "steps": 10**6, "output": "run"})
    with subprocess.Popen(
        [*launcher, *job],
        cwd=tmp_path,
        env=environment(tmp_path / "tmp"),
        stdout=subprocess.DEVNULL,
    ) as torchrun:
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
            (rank,) = (pid for pid in processes_of(tmp_path / "tmp") if pid != torchrun.pid)
            with pytest.raises(TrainError, match=f"in use by process {rank} on "):
                Claim(tmp_path / "run")
        finally:
            torchrun.kill()
    wait_until(lambda: not runs(rank))
    wait_until(lambda: may_be_taken(tmp_path / "run"))  # what it was about to start goes with it


def may_be_taken(folder: Path) -> bool:
    try:
        Claim(folder).release()
    except TrainError:
        return False
    return True


# -- Ctrl-C ----------------------------------------------------------------------------------------


def interrupted_behind(folder: Path, module: str, *arguments: str) -> None:
    """Ctrl-C behind the import of `module`: status 130, not a word, nothing left."""
    process = subprocess.Popen(
        [sys.executable, held.__file__, module, *arguments], cwd=folder, env=environment(folder / "tmp"), text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == f"{held.HELD}\n", f"{arguments} did not stop behind {module}: {said}"
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, words) == (130, ""), (module, process.returncode, words)
    assert left_behind(folder / "tmp") == [], module


TRAIN = [
    "train",
    "--model",
    "llama:tiny",
    "--tokenizer",
    "bytes",
    "--device",
    "cpu",
    "--nproc",
    "2",
    "--steps",
    "9",
    "--output",
    "run",
]


@pytest.mark.parametrize(
    "module",
    [
        "onefold.cli.app",
        "typer",
        "onefold.train.config",
        "pydantic",
        "onefold.recipe",
        "onefold.train.launch",
    ],
)
def test_ctrl_c_while_onefold_train_imports_ends_it_without_a_word(
    tmp_path: Path, module: str
) -> None:
    interrupted_behind(tmp_path, module, *TRAIN)
    assert not (tmp_path / "run").exists(), "what was made for the run goes with it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torch.nn", ["plan", "gpt2", "--gpus", "2", "--gpu", "a100-80"]),
        ("torch.nn", ["doctor"]),
        ("torch.nn", ["checkpoint", "inspect", "."]),
        ("onefold.cli.app", ["report", "."]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_ctrl_c_while_another_command_imports_ends_it_without_a_word(
    tmp_path: Path, module: str, arguments: list[str]
) -> None:
    interrupted_behind(tmp_path, module, *arguments)


@pytest.mark.parametrize(
    "moment",
    ["its output is made", "the command has its folder", "a rank starts", "both ranks have joined"],
)
def test_ctrl_c_while_ranks_start_leaves_no_process_and_no_file(
    tmp_path: Path, moment: str
) -> None:
    temporary = tmp_path / "tmp"
    reached = {
        "its output is made": lambda: (tmp_path / "run").exists(),
        "the command has its folder": lambda: any(temporary.glob("onefold-*")),
        "a rank starts": lambda: pid_of(temporary, 0) or pid_of(temporary, 1),
        "both ranks have joined": (
            lambda: (
                (tmp_path / "run" / LOCK).exists() and pid_of(temporary, 0) and pid_of(temporary, 1)
            )
        ),
    }[moment]
    with started(tmp_path, *ENDLESS) as process:
        wait_until(lambda: reached() or process.poll() is not None, pause=0.0)
        if moment == "both ranks have joined":
            wait_for(process, lambda row: row["event"] == "note")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == "", (process.returncode, err)
    assert left_behind(temporary) == [] and not (tmp_path / "run" / LOCK).exists()
    if moment in ("its output is made", "the command has its folder"):
        assert not (tmp_path / "run").exists(), "what was made for the run goes with it"


# -- others' words ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_say_nothing_on_their_standard_error_when_all_is_well(tmp_path: Path) -> None:
    """transformers imports torchao, which tells of kernels that it cannot load; torch of
    enumerations that torchao registers.
    """
    for arguments in (
        [
            *TRAIN[:-4],
            "--steps",
            "1",
            "--seq",
            "32",
            "--save-every",
            "1",
            "--moments",
            "int8",
            "--output",
            "run",
        ],
        ["checkpoint", "verify", "run"],
        ["plan", "run/model", "--gpus", "2", "--gpu", "a100-80", "--seq", "32"],
        ["doctor"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "onefold", *arguments], cwd=tmp_path, env=environment(tmp_path / "tmp"), text=True, capture_output=True,
            timeout=300,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), (arguments, done.stderr[-2000:])
