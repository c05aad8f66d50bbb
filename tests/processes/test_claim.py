"""One run in an output folder, and processes that end with those that started them. None of these
processes imports torch, so that they are quick.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from onefold.processes.claim import LOCK, Claim
from onefold.train.config import read_options
from onefold.train.output import name_output
from onefold.wording import TrainError
from started_runs import SOURCE, runs, wait_until

#: Claims the folder, says so, and holds it until its standard input ends.
HOLDS = """
import sys
from pathlib import Path
from onefold.processes.claim import Claim
from onefold.wording import TrainError
try:
    claim = Claim(Path(sys.argv[1]))
except TrainError as error:
    print("refused:", error, flush=True)
    sys.stdin.read()
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

    def begin(self) -> subprocess.Popen[str]:
        process = started(HOLDS, self.folder)
        self.callback(process.communicate, timeout=300)
        return process

    def said(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def test_a_folder_has_one_run_until_it_ends_or_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Claims(folder) as claims:
        first = claims.begin()
        assert claims.said(first) == "held"
        words = f"in use by process {first.pid} on {socket.gethostname()}, since "
        with pytest.raises(TrainError, match=words):
            Claim(folder)
        first.kill()
        first.wait()
        second = claims.begin()
        assert claims.said(second) == "held"
    assert not (folder / LOCK).exists(), "a run that ends by itself removes it"
    Claim(folder).release()


def test_of_runs_that_begin_at_the_same_moment_one_gets_the_folder(tmp_path: Path) -> None:
    with Claims(tmp_path / "run") as claims:
        processes = [claims.begin() for _ in range(4)]
        said = {process.pid: claims.said(process) for process in processes}
        (winner,) = (pid for pid, text in said.items() if text == "held")
        assert sum(f"process {winner} on" in text for text in said.values()) == 3, said


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", has_none)
    with pytest.warns(UserWarning, match="has no locks"):
        Claim(tmp_path).release()


def test_a_claim_that_is_undone_leaves_no_folder_and_a_new_name_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Claim(tmp_path / "a" / "b").undo()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    names = {name_output(read_options({"model": "llama:tiny"})).output for _ in range(5)}
    assert len(names) == 5 and all(name is not None and Path(name).is_dir() for name in names)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file", "a file of this name is in the way"),
        ("file/run", "a part of the path is a file"),
        ("/proc/onefold", "onefold cannot be written: No such file"),
        ("x" * 300, "cannot be written"),
    ],
)
def test_where_nothing_can_be_written_is_said(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=said):
        Claim(tmp_path / path)


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
