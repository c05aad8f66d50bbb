"""One run in an output folder: claims of real processes, which are quick since none of them imports
torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold.processes.claim import LOCK, Claim, HeldError
from onefold.train.config import read_options
from onefold.train.output import name_output, run_of
from onefold.wording import TrainError
from started_runs import SOURCE, runs, wait_until

#: Claims the folder for a run, says so, and holds it until its standard input ends; then releases
#: it.
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


@contextlib.contextmanager
def claimed(
    folder: Path, run: str, patience: float = 10.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has said whether it has the folder, and that."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder), run, str(patience)], env={**os.environ, "PYTHONPATH": SOURCE}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(300)


def test_a_folder_has_one_run_whose_processes_may_be_many(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder, "a") as (first, said):
        assert said == "held"
        with claimed(folder, "a") as (_, said):
            assert said == "held", "another process of the same run"
        with pytest.raises(HeldError) as told:
            Claim.take(folder, "b")
        assert f"is in use by process {first.pid} on {socket.gethostname()}, since " in str(
            told.value
        ), told.value
        assert (folder / LOCK).exists()
    assert not (folder / LOCK).exists(), "the last process of a run that ends by itself removes it"
    Claim.take(folder, "b").release()


def test_what_was_killed_holds_nothing_and_what_it_left_behind_holds_as_long_as_it_lives(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with claimed(folder, "a") as (launcher, _), claimed(folder, "a") as (rank, said):
        assert said == "held" and rank.stdin is not None
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        with pytest.raises(
            HeldError, match=f"by what process {launcher.pid} on .* has started and left behind"
        ):
            Claim.take(folder, "b", patience=0.2)
        os.kill(rank.pid, signal.SIGSTOP)  # it cannot end by itself, and holds on
        with claimed(folder, "b", patience=0.5) as (_, said):
            assert said.startswith("refused:")
        os.kill(rank.pid, signal.SIGKILL)
        Claim.take(folder, "b").release()
    assert not (folder / LOCK).exists()


def test_of_runs_that_begin_at_the_same_moment_one_gets_the_folder(tmp_path: Path) -> None:
    folder, count = tmp_path / "run", 6
    with contextlib.ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", HOLDS, str(folder), str(run), "30"], env={**os.environ, "PYTHONPATH": SOURCE}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for run in range(count)
        ]  # fmt: skip
        for process in processes:
            stack.callback(process.communicate, timeout=300)
        said = [process.stdout.readline() for process in processes if process.stdout is not None]
        (winner,) = (
            process for process, text in zip(processes, said, strict=True) if text == "held\n"
        )
        assert sum(f"process {winner.pid} on" in text for text in said) == count - 1, said


def test_a_claim_that_is_undone_leaves_no_folder_and_a_new_name_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Claim.take(tmp_path / "a" / "b", "x").undo()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    names = {name_output(read_options({"model": "llama:tiny"})).output for _ in range(5)}
    assert len(names) == 5 and all(name is not None and Path(name).is_dir() for name in names)


def test_where_nothing_can_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "file", "is a file; name a folder"),
        (tmp_path / "file" / "run", "a part of the path is a file"),
        (Path("/proc/onefold"), "name a folder that this user may write to"),
        (tmp_path / ("x" * 300), "cannot be written"),
    ):
        with pytest.raises(TrainError, match=said):
            Claim.take(path, "x")


def test_the_same_run_has_one_name_in_all_its_processes_and_another_run_has_another() -> None:
    plain = read_options({})
    several = read_options(
        {"nnodes": "1:2", "rdzv_endpoint": "a:29500", "output": "x", "resume": "auto"}
    )
    assert run_of(plain, {}) != run_of(plain, {})
    assert run_of(several, {}) == run_of(several, {}) == "onefold at a:29500"
    assert run_of(plain, {"TORCHELASTIC_RUN_ID": "j", "RANK": "0"}) == run_of(
        plain, {"TORCHELASTIC_RUN_ID": "j", "RANK": "1"}
    )
    where = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert run_of(plain, {"RANK": "0", **where}) == run_of(plain, {"RANK": "1", **where})
    assert run_of(plain, {"RANK": "0", **where}) != run_of(
        plain, {"RANK": "0", **where, "MASTER_PORT": "2"}
    )
    assert run_of(several, {"ONEFOLD_RUN": "r", "RANK": "1", **where}) == "r"


#: A process that ends with its parent, below one that does so, too: it writes its process id when
#: it is under way.
CHAIN = """
import os, subprocess, sys, time
from pathlib import Path
from onefold.processes.signals import end_with_parent
depth, folder, parent = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
end_with_parent(parent)
(folder / f"unfinished-{depth}").write_text(str(os.getpid()))
(folder / f"unfinished-{depth}").rename(folder / f"pid-{depth}")
if depth:
    subprocess.Popen([sys.executable, "-c", os.environ["CHAIN"], str(depth - 1), str(folder), str(os.getpid())]).wait()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "killed", [[2], [1], [2, 1]], ids=["the first", "the second", "both at once"]
)
def test_processes_end_with_those_that_started_them(tmp_path: Path, killed: list[int]) -> None:
    """launcher (2) ─► agent (1) ─► rank (0)."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "CHAIN": CHAIN}
    first = subprocess.Popen(
        [sys.executable, "-c", CHAIN, "2", str(tmp_path), str(os.getpid())], env=environment
    )
    try:
        wait_until(lambda: (tmp_path / "pid-0").exists())
        pids = {depth: int((tmp_path / f"pid-{depth}").read_text()) for depth in range(3)}
        for depth in killed:
            os.kill(pids[depth], signal.SIGKILL)
        wait_until(lambda: not any(runs(pids[depth]) for depth in range(max(killed) + 1)))
    finally:
        first.kill()
        first.wait()


def test_a_process_whose_parent_has_gone_before_it_looks_ends_too(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "PYTHONPATH": SOURCE, "CHAIN": CHAIN}
    done = subprocess.run(
        [sys.executable, "-c", CHAIN, "0", str(tmp_path), str(gone.pid)],
        env=environment,
        timeout=300,
    )
    assert done.returncode == 128 + signal.SIGKILL and list(tmp_path.iterdir()) == []
