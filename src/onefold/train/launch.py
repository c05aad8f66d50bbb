"""Starting the ranks: torchrun as a child process in a session of its own, with a rendezvous on a
free port.
"""

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from onefold.train.agent import END
from onefold.train.agent import GRACE as GRACE_OF_AGENT
from onefold.train.claim import RUN, Claim, name_output, run_of
from onefold.train.config import TrainConfig
from onefold.train.durations import seconds_of
from onefold.train.early import check_batch, refuse_earlier_run
from onefold.train.errors import TrainError
from onefold.train.interrupt import put_in_order
from onefold.train.machine import physical_cores
from onefold.train.stop import CONTROL, FINAL, PARENT, PREEMPTION, REQUESTS, STARTED, TRAINING, Stop
from onefold.train.wires import refuse_groups

#: What torch.distributed reads when ranks are started by somebody else.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: A file that the driver of a GPU makes: NVIDIA's, AMD's, that of a Jetson, that of Windows below
#: Linux.
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/nvmap", "/dev/dxg")
#: Seconds that the agent gets to end, before SIGKILL.
GRACE = 5.0
#: Seconds beyond --grace in which ranks that have saved may still leave.
SPARE = 5.0


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, from what `srun` sets; {} outside a step of several tasks, or
    where RANK is set already.

    Only a job step counts (SLURM_STEP_NUM_TASKS): in a batch script itself there is one process,
    whatever was allocated.
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
        "MASTER_PORT": str(
            20000
            + (int(environment["SLURM_JOB_ID"]) * 97 + int(environment["SLURM_STEP_ID"])) % 20000
        ),
    }


def joins(environment: Mapping[str, str]) -> bool:
    """True if a launcher (torchrun, Slurm, Kubernetes, ...) has set RANK: then this process is a
    rank.

    Raises:
        TrainError: RANK is set but not what belongs to it.
    """
    if "RANK" not in environment:
        return False
    missing = [name for name in LAUNCHED if name not in environment]
    if missing:
        raise TrainError(
            f"RANK={environment['RANK']} is set, so this process joins a run, but"
            f" {', '.join(missing)} is not. Set them as torchrun does, or unset RANK to let onefold"
            " start its own ranks."
        )
    return True


def ranks_to_start(config: TrainConfig) -> tuple[int, str]:
    """(how many, why): --nproc, else one a GPU, else one a physical core.

    Raises:
        TrainError: more ranks than GPUs.
    """
    gpus = _gpus() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise TrainError("--device cuda: torch finds no GPU here; use --device auto or cpu.")
    if gpus:
        if config.nproc is not None and config.nproc > gpus:
            raise TrainError(
                f"--nproc {config.nproc}: there are {gpus} GPUs; use at most {gpus}, or --device"
                " cpu."
            )
        return (config.nproc, "as asked") if config.nproc else (gpus, f"one a GPU, {gpus} here")
    cores = physical_cores()
    return (
        (config.nproc, "as asked")
        if config.nproc
        else (cores, f"one a physical core, {cores} here")
    )


def _gpus() -> int:
    """How many torch finds. Where no driver has made a device file there is none to find, and torch
    need not be imported.
    """
    if sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS):
        return 0
    from onefold.device import device_count

    return device_count()


def torchrun_arguments(config: TrainConfig, nproc: int) -> list[str]:
    """What torchrun is asked for: a rendezvous of its own on one machine, the user's on several.

    Raises:
        TrainError: something that several machines need is missing.
    """
    arguments = [f"--nproc-per-node={nproc}", f"--max-restarts={config.max_restarts}"]
    fewest, most = config.nodes
    if most == 1 and config.rdzv_endpoint is None:
        return ["--standalone", *arguments]
    several = f"--nnodes {config.nnodes}"
    if config.rdzv_endpoint is None:
        raise TrainError(
            f"{several}: say where the machines meet, with --rdzv-endpoint HOST:PORT (one of them,"
            " the same on all)."
        )
    if config.output is None:
        raise TrainError(f"{several}: name the folder that all machines see, with --output.")
    if fewest < most and config.resume != "auto":
        raise TrainError(
            f"{several}: machines may come and go, and each time the run goes on from a checkpoint:"
            " add --resume auto."
        )
    arguments += [
        f"--nnodes={config.nnodes}",
        f"--rdzv-backend={config.rdzv_backend}",
        f"--rdzv-endpoint={config.rdzv_endpoint}",
        f"--rdzv-id={config.rdzv_id}",
    ]
    arguments += [f"--rdzv-conf={config.rdzv_conf}"] if config.rdzv_conf else []
    arguments += [f"--local-addr={config.local_addr}"] if config.local_addr else []
    return arguments


def launch(config: TrainConfig) -> int:
    """Run `config` on ranks of this machine and return the exit status: 0, 1 for a failure, 130
    after Ctrl-C. See `onefold.train.stop`.

    Raises:
        TrainError: it cannot be; nothing was started then, and nothing is left.
    """
    fewest, most = config.nodes
    # It needs no GPUs counted, which takes an import of torch
    if config.nproc is not None and fewest == most:
        check_batch(config, config.nproc * fewest)
    torchrun_arguments(config, config.nproc or 1)
    if most == 1:
        refuse_earlier_run(config)
    named = name_output(config) if most == 1 else config
    with _claimed(named, new=config.output is None) as run:
        nproc, why = ranks_to_start(config)
        if fewest == most:
            check_batch(config, nproc * fewest)
        config.check_recipe()  # torch is imported here at the latest
        if most == 1:
            refuse_groups(config, nproc)
            # On several machines the first rank of all decides about the folder, which may be in
            # use by the time that others come.
            from onefold.train.output import with_output

            config = with_output(named)
        if not config.json_lines:
            print(f"starting {nproc} ranks ({why})", flush=True)
        return _run(config, nproc, run)


@contextlib.contextmanager
def _claimed(config: TrainConfig, new: bool) -> Iterator[str]:
    """Inside, this run has its output folder to itself; gives the run's name. `new`: the folder was
    made for it just now.
    """
    assert config.output is not None
    run = run_of(config, os.environ)
    claim = Claim.take(Path(config.output), run, new=new)
    put_in_order.append(claim.undo)
    try:
        if not claim.known and not config.json_lines:
            _say(
                f"the file system of {config.output} has no locks: another run that writes there"
                " would not be noticed"
            )
        yield run
    except TrainError:
        claim.undo()
        raise
    finally:
        put_in_order.remove(claim.undo)
        claim.release()


def _run(config: TrainConfig, nproc: int, run: str) -> int:
    """Start the agent, which starts the ranks, and wait for the end. Returns the exit status."""
    asked = torchrun_arguments(config, nproc)
    with noted_signals() as arrived, _control_folder() as control:
        (control / "config.json").write_text(
            config.model_dump_json(by_alias=True), encoding="utf-8"
        )
        environment = child_environment(os.environ, nproc, control, config.compile)
        process = subprocess.Popen(
            [sys.executable, "-m", "onefold.train.agent", *asked, f"--log-dir={control}",
             "-m", "onefold.train.rank", str(control / "config.json")],
            env={
                **environment, **_for_several(config), GRACE_OF_AGENT: str(seconds_of(config.grace)), STARTED: str(time.time()),
                PARENT: str(os.getpid()), RUN: run,
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return _Waiting(process, control, arrived, nproc, config).to_the_end()
        finally:
            _end(process, control)


def _for_several(config: TrainConfig) -> dict[str, str]:
    """On several machines torchrun makes a fresh store for each start: kept, it leads those that
    stay to one that has gone.
    """
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if config.nodes[1] > 1 else {}


def child_environment(
    environment: Mapping[str, str], nproc: int, control: Path, compiling: bool
) -> dict[str, str]:
    """The ranks' environment: the cores divided among them, libraries quiet and offline unless the
    user says otherwise.

    torch makes a folder for compiled code even where nothing is compiled; then it goes with the
    control folder.
    """
    ours = {
        "OMP_NUM_THREADS": str(max(1, physical_cores() // nproc)),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not compiling:
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(control / "inductor")
    return {**ours, **environment, CONTROL: str(control)}


class _Waiting:
    """The launcher while its ranks run: passes requests on, and sees that they are met in time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: Path,
        arrived: list[int],
        nproc: int,
        config: TrainConfig,
    ) -> None:
        self.process, self.control, self.arrived, self.nproc, self.config = (
            process,
            control,
            arrived,
            nproc,
            config,
        )
        self.heard = 0
        self.deadline: float | None = None
        self.interrupted: int | None = None

    def to_the_end(self) -> int:
        """The exit status of the run."""
        while self.process.poll() is None:
            time.sleep(0.05)
            code = self._look()
            if code is not None:
                _end(self.process, self.control)
                return code
        if self.interrupted is not None:
            return 128 + self.interrupted
        code = self.process.returncode
        if code < 0:
            _say(
                f"error: the agent that starts the ranks was ended by {signal.Signals(-code).name}."
            )
        return code if code >= 0 else 128 - code

    def _look(self) -> int | None:
        """An exit status if the run is over now, whatever its processes do."""
        new, self.heard = self.arrived[self.heard :], len(self.arrived)
        for number in new:
            over = self._passed_on(number)
            if over is not None:
                return over
        if (self.control / FINAL).exists():
            return 1
        several = self.config.nodes[1] > 1
        if (
            several
            and self.deadline is not None
            and len(list(self.control.glob("ended-*"))) == self.nproc
            and not _alive(self.control)
        ):
            # The agent might wait minutes for those of other machines, and would end the run for
            # them
            return 0
        if self.deadline is not None and time.monotonic() > self.deadline:
            _say(
                f"error: step and checkpoint took longer than --grace {self.config.grace}; what was"
                " saved before remains."
            )
            return 1
        return None

    def _passed_on(self, number: int) -> int | None:
        """Ask the ranks for what the signal means; an exit status if there is nothing to wait
        for.
        """
        if not (self.control / TRAINING).exists():
            return 128 + number
        by_scheduler = number in PREEMPTION
        if by_scheduler and self.deadline is None:
            self.deadline = time.monotonic() + seconds_of(self.config.grace) + SPARE
            (self.control / REQUESTS[Stop.PREEMPT]).touch()
            self._tell(
                f"\n{signal.Signals(number).name}: saving a checkpoint after this step, then ending"
            )
        elif not by_scheduler:
            if self.interrupted is not None:
                return 128 + self.interrupted
            self.interrupted = number
            (self.control / REQUESTS[Stop.INTERRUPT]).touch()
            self._tell("\nstopping after this step, then saving; Ctrl-C again ends at once")
        return None

    def _tell(self, text: str) -> None:
        if not self.config.json_lines:
            _say(text)


def _pids(control: Path) -> Iterator[int]:
    for file in control.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            yield int(file.read_text())


def _alive(control: Path) -> bool:
    """Whether a rank of this machine still runs."""
    for pid in _pids(control):
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
    return False


def _end(process: subprocess.Popen[bytes], control: Path) -> None:
    """Leave no process: ranks at once, then the agent. Each rank leads a group of its own, which
    goes with it.
    """
    if process.poll() is not None:
        return
    ranks = {*_pids(control), *_children_of(process.pid)}
    for pid in ranks:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)
    process.send_signal(END)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # Without ranks it may be importing torch, and hears nothing: they would end with it
        process.wait(GRACE if ranks else 0.2)
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _wait_for_the_end_of(ranks)


def _children_of(parent: int) -> list[int]:
    """Its processes, those that have just begun, too; [] where /proc does not tell."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _wait_for_the_end_of(ranks: Iterable[int]) -> None:
    """They were killed; this sees them gone (init, or who stands for it, takes them)."""
    end = time.monotonic() + GRACE
    for pid in ranks:
        while time.monotonic() < end:
            try:
                state = (
                    Path(f"/proc/{pid}/stat")
                    .read_text(errors="replace")
                    .rpartition(")")[2]
                    .split()[0]
                )
            except (OSError, IndexError):
                break
            if state in "ZX":
                break
            time.sleep(0.01)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, signals that ask to stop are written down here instead of ending this process."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGHUP, *PREEMPTION)
    }
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
