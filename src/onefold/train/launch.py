"""Starting the ranks: torchrun as a child process in a session of its own, with a rendezvous on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from onefold.train.config import TrainConfig
from onefold.train.errors import TrainError
from onefold.train.machine import physical_cores
from onefold.train.stop import CONTROL

#: What torch.distributed reads when ranks are started by somebody else.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Seconds that ranks get to end after SIGTERM, before SIGKILL.
GRACE = 5.0


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, from what `srun` sets; {} outside a step of several tasks, or where RANK is set already.

    Only a job step counts (SLURM_STEP_NUM_TASKS): in a batch script itself there is one process, whatever was allocated.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST", "localhost")
    # "node7,node9" or "node[07-09,12]-ib": the first host of the list
    first = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,]*))?", hosts)
    assert first is not None
    local = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": local.group() if local else "1",
        "MASTER_ADDR": "".join(part or "" for part in first.groups()),
        # Every task must come to the same number without talking; two steps of one job differ.
        "MASTER_PORT": str(20000 + (int(environment["SLURM_JOB_ID"]) * 97 + int(environment["SLURM_STEP_ID"])) % 20000),
    }


def joins(environment: Mapping[str, str]) -> bool:
    """True if a launcher (torchrun, Slurm, Kubernetes, ...) has set RANK: then this process is a rank.

    Raises:
        TrainError: RANK is set but not what belongs to it.
    """
    if "RANK" not in environment:
        return False
    missing = [name for name in LAUNCHED if name not in environment]
    if missing:
        raise TrainError(
            f"RANK={environment['RANK']} is set, so this process joins a run, but {', '.join(missing)} is not. "
            "Set them as torchrun does, or unset RANK to let onefold start its own ranks."
        )
    return True


def ranks_to_start(config: TrainConfig) -> tuple[int, str]:
    """(how many, why): --nproc, else one a GPU, else one a physical core.

    Raises:
        TrainError: more ranks than GPUs.
    """
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise TrainError("--device cuda: torch finds no GPU here; use --device auto or cpu.")
    if gpus:
        if config.nproc is not None and config.nproc > gpus:
            raise TrainError(f"--nproc {config.nproc}: there are {gpus} GPUs; use at most {gpus}, or --device cpu.")
        return (config.nproc, "as asked") if config.nproc else (gpus, f"one a GPU, {gpus} here")
    cores = physical_cores()
    return (config.nproc, "as asked") if config.nproc else (cores, f"one a physical core, {cores} here")


def launch(config: TrainConfig) -> int:
    """Run `config` on ranks of this machine and return the exit status: 0, 1 for a failure, 130 after Ctrl-C."""
    nproc, why = ranks_to_start(config)
    if not config.json_lines:
        print(f"starting {nproc} ranks ({why})", flush=True)
    with noted_signals() as arrived, _control_folder() as control:
        (control / "config.json").write_text(config.model_dump_json(by_alias=True), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "onefold.train.agent", "--standalone", f"--nproc-per-node={nproc}",
             f"--log-dir={control}",
             "-m", "onefold.train.worker", str(control / "config.json")],
            env=child_environment(os.environ, nproc, control, config.compile),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _wait(process, control, arrived, quiet=config.json_lines)
        finally:
            _end(process, control)


def child_environment(environment: Mapping[str, str], nproc: int, control: Path, compiling: bool) -> dict[str, str]:
    """The ranks' environment: the cores divided among them, libraries quiet and offline unless the user says otherwise.

    torch makes a folder for compiled code even where nothing is compiled; then it goes with the control folder.
    """
    ours = {
        "OMP_NUM_THREADS": str(max(1, physical_cores() // nproc)),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if not compiling:
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(control / "inductor")
    return {**ours, **environment, CONTROL: str(control)}


def _wait(process: subprocess.Popen[bytes], control: Path, arrived: list[int], quiet: bool) -> int:
    told = 0
    while process.poll() is None:
        time.sleep(0.05)
        if len(arrived) <= told:
            continue
        told += 1
        worth_saving = (control / "training").exists()
        if told > 1 or not worth_saving:
            _end(process, control)
            break
        (control / "stop").touch()
        if not quiet:
            _say("\nstopping after this step, then saving; Ctrl-C again ends at once")
    if arrived:
        return 128 + arrived[0]
    return process.returncode


def _end(process: subprocess.Popen[bytes], control: Path) -> None:
    """Leave no process: ranks at once, then the agent. Each rank leads a group of its own, which goes with it."""
    if process.poll() is not None:
        return
    for file in control.glob("rank-*.pid"):
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError, ValueError):
                kill(int(file.read_text()), signal.SIGKILL)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, signals that ask to stop are written down here instead of ending this process."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _control_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="onefold-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
