"""One run in an output folder, and processes that end with those that started them. None of these
processes imports torch, so that they are quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.processes.claim import LOCK, Claim, HeldError
from onefold.train.config import read_options
from onefold.train.output import name_output, run_of
from onefold.wording import TrainError
from started_runs import SOURCE, runs, wait_until

#: Claims the folder for a run, says so, and holds it until its standard input ends.
HOLDS = """
import sys
from pathlib import Path
from onefold.processes.claim import Claim
from onefold.wording import TrainError
try:
    claim = Claim.take(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
except TrainError as error:
    print("refused:", error, flush=True)
    sys.exit()
assert "torch" not in sys.modules
print("held", flush=True)
sys.stdin.read()
claim.release()
"""
#: A process that ends with its parent, below one that does so, too.
CHAIN = """
import os, subprocess, sys, time
from pathlib import Path
from onefold.processes.signals import end_with_parent
depth, folder, parent = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
end_with_parent(parent)
(folder / f"unfinished-{depth}").write_text(str(os.getpid()))
(folder / f"unfinished-{depth}").rename(folder / f"pid-{depth}")
if depth:
    command = [sys.executable, "-c", os.environ["PROGRAM"], str(depth - 1), str(folder), str(os.getpid())]
    subprocess.Popen(command).wait()
time.sleep(600)
"""


def started(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "PROGRAM": program},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Claims(contextlib.ExitStack):
    """Processes that claim the folder, which end with the context."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def begin(self, run: object, patience: float = 10.0) -> subprocess.Popen[str]:
        process = started(HOLDS, self.folder, run, patience)
        self.callback(process.communicate, timeout=300)
        return process

    def said(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def test_a_folder_has_one_run_whose_processes_may_be_many(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Claims(folder) as claims:
        first, other = (claims.begin("a") for _ in range(2))
        assert claims.said(first) == claims.said(other) == "held"
        with pytest.raises(HeldError) as told:
            Claim.take(folder, "b", patience=0.2)
        assert f" on {socket.gethostname()}, since " in str(told.value), told.value
    assert not (folder / LOCK).exists(), "the last process of a run that ends by itself removes it"
    Claim.take(folder, "b").release()


def test_what_a_killed_run_left_behind_holds_the_folder_as_long_as_it_lives(tmp_path: Path) -> None:
    with Claims(tmp_path) as claims:
        launcher = claims.begin("a")
        assert claims.said(launcher) == "held"
        rank = claims.begin("a")
        assert claims.said(rank) == "held"
        launcher.kill()
        launcher.wait()
        os.kill(rank.pid, signal.SIGSTOP)  # it cannot end by itself, and holds on
        with pytest.raises(HeldError, match=f"by what process {launcher.pid} on .* left behind"):
            Claim.take(tmp_path, "b", patience=0.2)
        rank.kill()
        Claim.take(tmp_path, "b").release()


def test_of_runs_that_begin_at_the_same_moment_one_gets_the_folder(tmp_path: Path) -> None:
    with Claims(tmp_path / "run") as claims:
        processes = [claims.begin(run, 30.0) for run in range(4)]
        said = {process.pid: claims.said(process) for process in processes}
        (winner,) = (pid for pid, text in said.items() if text == "held")
        assert sum(f"process {winner} on" in text for text in said.values()) == 3, said


def test_a_claim_that_is_undone_leaves_no_folder_and_a_new_name_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Claim.take(tmp_path / "a" / "b", "x").undo()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    names = {name_output(read_options({"model": "llama:tiny"})).output for _ in range(5)}
    assert len(names) == 5 and all(name is not None and Path(name).is_dir() for name in names)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file", "is a file; name a folder"),
        ("file/run", "a part of the path is a file"),
        ("/proc/onefold", "name a folder that this user may write to"),
        ("x" * 300, "cannot be written"),
    ],
)
def test_where_nothing_can_be_written_is_said(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=said):
        Claim.take(tmp_path / path, "x")


AT = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("options", "one", "other", "same"),
    [
        ({}, {}, {}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "j", "RANK": "0"}, {"TORCHELASTIC_RUN_ID": "j", "RANK": "1"}, True),
        ({}, {"RANK": "0", **AT}, {"RANK": "1", **AT}, True),
        ({}, {"RANK": "0", **AT}, {"RANK": "0", **AT, "MASTER_PORT": "2"}, False),
        ({}, {"ONEFOLD_RUN": "r", "RANK": "1", **AT}, {"ONEFOLD_RUN": "r"}, True),
    ],
)  # fmt: skip
def test_a_run_has_one_name_in_all_its_processes_and_another_run_has_another(
    options: dict[str, str], one: dict[str, str], other: dict[str, str], same: bool
) -> None:
    read = read_options(options)
    assert (run_of(read, one) == run_of(read, other)) == same


@pytest.mark.parametrize("killed", [[1], [2, 1]], ids=["the second", "both at once"])
def test_processes_end_with_those_that_started_them(tmp_path: Path, killed: list[int]) -> None:
    """launcher (2) ─► agent (1) ─► rank (0). Who has lost its parent before it looks ends, too."""
    first = started(CHAIN, 2, tmp_path, os.getpid())
    try:
        wait_until(lambda: (tmp_path / "pid-0").exists())
        pids = {depth: int((tmp_path / f"pid-{depth}").read_text()) for depth in range(3)}
        for depth in killed:
            os.kill(pids[depth], signal.SIGKILL)
        wait_until(lambda: not any(runs(pids[depth]) for depth in range(max(killed) + 1)))
    finally:
        first.kill()
        first.wait()
    late = started(CHAIN, 0, tmp_path, first.pid)
    assert late.wait(300) == 128 + signal.SIGKILL
