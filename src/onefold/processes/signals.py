"""Signals, requests to end, and the parent of every process of the command.

    start, imports          `end_at_once`: there is nothing to clean up, and an exception would break a half-done import
    with interruptible():   KeyboardInterrupt, which the command catches
    while ranks run         passed on to the ranks, as below

    request                                     what the ranks save after the step                     exit status
    Ctrl-C (SIGINT, or the terminal closed)     a checkpoint                                           130 (129)
    SIGTERM, SIGUSR1 (Slurm, Kubernetes, spot)  a checkpoint, within --grace                           0
    any of these before the first step          nothing: there is nothing to save                      128 + signal
    Ctrl-C twice                                nothing: they end at once                              130

    terminal, scheduler ──signal──► onefold train ──signal──► every rank
    another launcher    ──signal────────────────────────────► every rank

The ranks reduce these requests together with each step's loss, so all ranks leave after the same
step. torchrun also sends SIGTERM to restart ranks, in two cases. If a rank has ended, the others
cannot finish their step and end with an error. If a machine has joined, the ranks finish the step
and save, and nothing is lost.

[Note: signals on a thread] Python runs a signal's handler on the main thread between two bytecode
instructions, so not while that thread waits inside a collective. The interpreter therefore writes
the numbers of arriving signals to a pipe at once, and another thread reads the pipe.

[Note: nobody is left behind] The command may be killed at any moment, and then cannot end the ranks
that it has started. So every rank watches its parent from the start, before it imports anything, and
ends with it. The parent's process id is in the environment. A process that starts just after its
parent's end has another parent by then.

The command and its ranks share a temporary folder, the control folder. The first rank marks there that
there is something to save; the first rank that fails, that it reports the error.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

#: Loggers to silence. torchao, which transformers imports, warns of kernels for GPUs that are not
#: here, and of enumerations that PyTorch registers itself.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.distributed.elastic.multiprocessing.redirects")
_MODULES = r"(torchao|transformers|torch\.utils\._pytree|torch\.jit|pydantic|typer|rich)(\.|$)"


def quiet_third_parties() -> None:
    """Hide warnings of third-party packages. Their errors are still shown. Call it before they are
    imported; it does not import them.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=kind, module=_MODULES)


#: Called by `end_at_once` before the process ends, the last one first.
put_in_order: list[Callable[[], object]] = []


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Signal handler: end this process with status 128 + `number`."""
    for act in reversed(put_in_order):
        with contextlib.suppress(Exception):
            act()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + number)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold signals that end this process back until the block is left: by then `put_in_order` has
    what it makes.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen() -> None:
    """Let Ctrl-C and SIGTERM end this process at once. Called before other imports."""
    if threading.current_thread() is not threading.main_thread():
        return  # not the command's own process: its owner handles signals
    for number in (signal.SIGINT, signal.SIGTERM):
        # nohup, and shells that start a job in the background, have signals ignored: keep that
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the signals that end this process raise KeyboardInterrupt, with their number, inside the
    block. Import modules before it: an import may swallow the exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CONTROL = "ONEFOLD_CONTROL"
#: The process id of the process that has started this one.
PARENT = "ONEFOLD_PARENT"
INTERRUPTED = 130
#: Exit status of a rank that was not itself asked to end. Its agent then restarts it with the
#: remaining machines.
AGAIN = 75
#: Files in the control folder: there is something to save; a rank reports why it failed; ranks are not
#: to be started again.
TRAINING, FAILED, FINAL = "training", "failed", "final"
#: Signals by which schedulers announce that they will end the process.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class Stop(enum.IntFlag):
    """Why a run ends before its last step."""

    NONE = 0
    INTERRUPT = 1
    PREEMPT = 2

    @property
    def reason(self) -> str:
        """The reason, for messages."""
        if self & Stop.PREEMPT:
            return "SIGTERM or SIGUSR1"
        return "Ctrl-C" if self else ""


class StopSignal:
    """The requests to stop that a rank has received.

    Args:
        rank: the rank among all ranks. local_rank: the rank on this machine.
        grace: seconds from the first SIGTERM or SIGUSR1 after which the rank ends with status 1,
            even if it has not saved.

    Attributes:
        asked: the requests to this rank. Reduce them over all ranks, since others may not know yet.
    """

    def __init__(self, rank: int, local_rank: int = 0, grace: float = 30.0) -> None:
        folder = os.environ.get(CONTROL)
        self.control = Path(folder) if folder else None
        self.rank, self.local_rank, self.grace = rank, local_rank, grace
        self.asked = Stop.NONE
        self._armed = self._saved = False
        self._listen()

    def arm(self) -> None:
        """Mark that there is something to save: a signal no longer ends the process at once."""
        self._armed = True
        if self.local_rank == 0:
            self._mark(TRAINING)

    def disarm(self) -> None:
        """Mark that everything has been saved: the end of `grace` no longer ends the process."""
        self._saved = True

    def exit_code(self, stopped: Stop) -> int:
        """Return this rank's exit status. After Ctrl-C, the launcher turns 0 into 130 itself."""
        by_hand = stopped & Stop.INTERRUPT and not stopped & Stop.PREEMPT
        return INTERRUPTED if by_hand and self.control is None else 0

    def speak_first(self) -> bool:
        """Return True for the first rank of this machine that calls it. Only that rank reports its
        error.
        """
        if self.control is None:
            return True
        try:
            (self.control / FAILED).touch(exist_ok=False)
        except OSError:
            return False
        return True

    def no_restart(self) -> None:
        """End the run instead of restarting ranks, because the same error would occur again."""
        self._mark(FINAL)

    def _mark(self, name: str) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):
                (self.control / name).touch()

    def _listen(self) -> None:
        """Start the thread that reads signals. See [Note: signals on a thread]."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in (signal.SIGINT, *PREEMPTION):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def listen() -> None:
            while True:
                for number in os.read(reading, 64):
                    self._arrived(number)

        threading.Thread(target=listen, name="onefold-signals", daemon=True).start()

    def _arrived(self, number: int) -> None:
        if number != signal.SIGINT and number not in PREEMPTION:
            return
        again = bool(self.asked & Stop.INTERRUPT) and number == signal.SIGINT
        if not self._armed or again:
            os._exit(128 + number)
        if number == signal.SIGINT:
            self.asked |= Stop.INTERRUPT
        elif not self.asked & Stop.PREEMPT:
            self.asked |= Stop.PREEMPT
            late = threading.Timer(self.grace, self._too_late)
            late.daemon = True
            late.start()

    def _too_late(self) -> None:
        if self._saved:
            return
        if self.speak_first():
            text = (
                f"rank {self.rank}: step and checkpoint took longer than the {self.grace:g} s of"
                " --grace; what was saved before remains."
            )
            with contextlib.suppress(OSError):  # nobody may read it any more
                print(text, file=sys.stderr, flush=True)
        os._exit(1)


# -- ending with one's parent ----------------------------------------------------------------------


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends or is killed. See [Note: nobody is left behind].

    `parent`: the id of the process that has started this one, if known. It may have ended by now.
    """
    # The kernel kills this process as soon as the thread that started it ends
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError, ImportError):
            import ctypes

            ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    started_by = os.getppid() if parent is None else parent
    if os.getppid() != started_by:
        os._exit(128 + signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == started_by:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="onefold-end-with-parent", daemon=True).start()
