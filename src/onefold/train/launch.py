"""`onefold train` if no launcher has started ranks yet: torchrun as a child process.

    joins, from_slurm    in processes/host.py: has a launcher set RANK? then this process is a rank (worker.run_rank)
    launch               checks without torch ─► claims the output folder ─► counts the ranks ─► runs the agent, which checks the rest
    _Waiting             while the agent runs: passes signals on to the ranks, and enforces --grace
    _end                 ends every process that is left

The agent (agent.py) is torchrun, with a rendezvous of its own. On several machines the user starts torchrun.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onefold.cores import physical_cores
from onefold.data.sources import needs_hub
from onefold.models.names import kind_of
from onefold.processes.claim import Claim
from onefold.processes.host import ALONE, child_environment, gpus_here
from onefold.processes.signals import (
    FINAL,
    GRACE,
    PARENT,
    PREEMPTION,
    REFUSED,
    REQUESTS,
    STARTED,
    TRAINING,
    Stop,
    noted_signals,
    put_in_order,
)
from onefold.train.config import TrainConfig
from onefold.train.early import check_batch
from onefold.train.output import RUN, name_output, refuse_earlier_run, run_of
from onefold.wording import TrainError, seconds_of

#: Seconds to wait until a killed rank is gone.
ENDING = 5.0
#: Seconds beyond --grace that ranks get to leave after they have saved.
SPARE = 5.0


def ranks_to_start(config: TrainConfig) -> tuple[int, str]:
    """Return (how many, why): --nproc, else one per GPU, else one per physical core.
    Raises TrainError for more ranks than GPUs.
    """
    gpus = gpus_here() if config.device != "cpu" else 0
    if config.device == "cuda" and not gpus:
        raise TrainError("--device cuda: torch finds no GPU here; use --device auto or cpu.")
    if gpus and config.nproc is not None and config.nproc > gpus:
        raise TrainError(
            f"--nproc {config.nproc}: there are {gpus} GPUs; use at most {gpus}, or --device cpu."
        )
    if config.nproc:
        return config.nproc, "as asked"
    if gpus:
        return gpus, f"one a GPU, {gpus} here"
    cores = physical_cores()
    return cores, f"one a physical core, {cores} here"


def launch(config: TrainConfig) -> int:
    """Run the training on ranks of this machine.
    Returns the exit status: 0, 1 for a failure, 130 after Ctrl-C.
    Raises TrainError if the run cannot start; then no rank was started and no file is left.
    """
    # With --nproc, check before GPUs are counted, which imports torch
    if config.nproc is not None:
        check_batch(config, config.nproc)
    refuse_earlier_run(config)
    with _claimed(config) as (named, run):
        nproc, why = ranks_to_start(config)
        check_batch(config, nproc)
        said = "" if config.json_lines else f"starting {nproc} ranks ({why})"
        return _run(named, nproc, run, said)


@contextlib.contextmanager
def _claimed(config: TrainConfig) -> Iterator[tuple[TrainConfig, str]]:
    """Hold the output folder for this run alone, inside the context.
    Yields (`config` with the folder named, the run's name). On exit, removes a folder that was made
    for this run and is still empty.
    """
    with _signals_later():
        named = name_output(config)
        assert named.output is not None
        run = run_of(named, os.environ)
        claim = Claim.take(Path(named.output), run, new=config.output is None)
        put_in_order.append(claim.undo)  # should a signal end this process before the ranks run
    try:
        if not claim.known and not named.json_lines:
            _say(
                f"the file system of {named.output} has no locks: another run that writes there"
                " would not be noticed"
            )
        yield named, run
    finally:
        put_in_order.remove(claim.undo)
        claim.undo()


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Block the signals that ask to stop, inside the context. A signal then cannot arrive between
    making the folder and registering its removal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *PREEMPTION))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(config: TrainConfig, nproc: int, run: str, said: str) -> int:
    """Start the agent, which prints `said` and starts the ranks, and wait for its end.
    Returns the exit status. Raises TrainError if the agent's checks refuse the configuration.
    """
    asked = [
        f"--rdzv-backend={ALONE}",
        f"--nproc-per-node={nproc}",
        f"--max-restarts={config.max_restarts}",
    ]
    with (
        noted_signals() as arrived,
        tempfile.TemporaryDirectory(prefix="onefold-", ignore_cleanup_errors=True) as folder,
    ):
        control = Path(folder)
        file = control / "config.json"
        file.write_text(config.model_dump_json(by_alias=True), encoding="utf-8")
        online = kind_of(config.model) == "hub" or needs_hub(config.data)
        environment = {
            **child_environment(os.environ, nproc, control, config.compile, online, alone=True),
            GRACE: str(seconds_of(config.grace)),
            STARTED: str(time.time()),
            PARENT: str(os.getpid()),
            RUN: run,
        }
        this = "onefold.train.agent"
        process = subprocess.Popen(
            [
                sys.executable, "-m", this, str(file), said,
                *asked, f"--log-dir={control}", "-m", this, "rank", str(file),
            ],
            env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = _Waiting(process, control, arrived, config).to_the_end()
        finally:
            _end(process, control)
        if code and (refused := control / REFUSED).exists():
            raise TrainError(refused.read_text(encoding="utf-8"))
        return code


@dataclass
class _Waiting:
    """The launcher while its ranks run: passes requests to stop on, and enforces their deadline."""

    process: subprocess.Popen[bytes]
    control: Path
    arrived: list[int]
    config: TrainConfig
    heard: int = 0
    deadline: float | None = None
    interrupted: int | None = None

    def to_the_end(self) -> int:
        """Wait for the end of the run and return its exit status."""
        while self.process.poll() is None:
            time.sleep(0.05)
            code = self._look()
            if code is not None:
                return code
        if self.interrupted is not None:
            return 128 + self.interrupted
        code = self.process.returncode
        if code >= 0:
            return code
        _say(f"error: the agent that starts the ranks was ended by {signal.Signals(-code).name}.")
        return 128 - code

    def _look(self) -> int | None:
        """Return an exit status if the run is over now, even if processes still run."""
        new, self.heard = self.arrived[self.heard :], len(self.arrived)
        for number in new:
            over = self._passed_on(number)
            if over is not None:
                return over
        if (self.control / FINAL).exists():
            return 1
        if self.deadline is not None and time.monotonic() > self.deadline:
            _say(
                f"error: step and checkpoint took longer than --grace {self.config.grace}; what was"
                " saved before remains."
            )
            return 1
        return None

    def _passed_on(self, number: int) -> int | None:
        """Ask the ranks to stop. Returns an exit status if there is nothing to wait for."""
        if not (self.control / TRAINING).exists():
            return 128 + number
        if number not in PREEMPTION:
            if self.interrupted is not None:
                return 128 + self.interrupted
            self.interrupted = number
            (self.control / REQUESTS[Stop.INTERRUPT]).touch()
            self._tell("\nstopping after this step, then saving; Ctrl-C again ends at once")
        elif self.deadline is None:
            self.deadline = time.monotonic() + seconds_of(self.config.grace) + SPARE
            (self.control / REQUESTS[Stop.PREEMPT]).touch()
            name = signal.Signals(number).name
            self._tell(f"\n{name}: saving a checkpoint after this step, then ending")
        return None

    def _tell(self, text: str) -> None:
        if not self.config.json_lines:
            _say(text)


def _pids(control: Path) -> Iterator[int]:
    for file in control.glob("rank-*.pid"):
        with contextlib.suppress(OSError, ValueError):
            yield int(file.read_text())


def _end(process: subprocess.Popen[bytes], control: Path) -> None:
    """End every process of the run and wait until the ranks are gone.
    Ranks end with their agent ([Note: nobody is left behind]). Each rank leads a process group,
    which is killed too, so the processes that a rank has started end with it.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # the agent starts no more ranks
    pids = set(_pids(control))
    with contextlib.suppress(OSError):  # ranks without a pid file yet; not every system has /proc
        pids |= set(
            map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        )
    watched = []
    for pid in pids:
        with contextlib.suppress(OSError, AttributeError):  # the rank is gone; or not Linux
            watched.append(os.pidfd_open(pid))
    process.kill()
    process.wait()
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)
    for file in watched:
        select.select([file], [], [], ENDING)
        os.close(file)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
