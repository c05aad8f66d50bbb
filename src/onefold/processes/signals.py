"""What holds for every process of the command: its signals, its parent, and who asks it to end.

    start, imports          `end_at_once`: there is nothing to put in order, and an import does not bear an exception in its middle
    with interruptible():   KeyboardInterrupt, which the command catches
    while ranks run         noted by the launcher and passed on to the ranks, as below

    who asks                                    what the ranks do after the step                       exit status
    Ctrl-C (SIGINT, or the terminal closed)     the model, and a checkpoint if the run keeps any       130 (129)
    SIGTERM, SIGUSR1 (Slurm, Kubernetes, spot)  a checkpoint, within --grace                           0
    --save-before                               a checkpoint, in time                                  0
    the same before the first step              nothing: there is nothing to save                      128 + signal
    Ctrl-C twice                                nothing, at once                                       130

    terminal, scheduler ──signal──► onefold train ── file in the control folder ──► every rank
    another launcher    ──signal──────────────────────────────────────────────────► every rank

Ranks agree by reducing what they were asked with each step's loss, so that all leave after the same
step. SIGTERM is also how torchrun ends ranks to start them anew, because one has gone (then the
others cannot finish their step, and end with an error) or because a machine has come (then they
finish it and save, and nothing is lost).

[Note: signals on a thread] Python runs a signal's handler on the main thread, between two
instructions: not while that thread waits inside a collective. The numbers of arriving signals are
therefore written to a pipe by the interpreter, at once, and a thread reads it.

[Note: nobody is left behind] The launcher, the agent or both may be killed at any moment, and
nobody then ends the others. So every process ends with the one that has started it, from its first
moment on, before it imports anything: launcher ─► agent ─► rank. Who has started it stands in the
environment, since a process that begins a moment after that one's end would take another for its
parent.

The launcher and its ranks share a temporary folder, the control folder: ranks leave their process
ids there, the first of a machine says when there is something to save, and the first rank that
fails is the one that speaks.
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

#: torchao, which transformers imports, tells of its kernels for GPUs that are not here, and of
#: enumerations that PyTorch knows by itself.
_LOGGERS = ("torchao", "torch.utils._pytree", "torch.distributed.elastic.multiprocessing.redirects")
_MODULES = r"(torchao|transformers|torch\.utils\._pytree|torch\.jit|pydantic|typer|rich)(\.|$)"


def quiet_third_parties() -> None:
    """Errors of theirs are still shown. Imports none of them; call it before they are imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=kind, module=_MODULES)


#: Called by `end_at_once` before the process ends, the last one first.
put_in_order: list[Callable[[], object]] = []


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A signal's handler: end this process with status 128 + `number`."""
    for act in reversed(put_in_order):
        with contextlib.suppress(Exception):
            act()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + number)


def listen() -> None:
    """Let Ctrl-C and SIGTERM end this process at once. Called before other imports."""
    if threading.current_thread() is not threading.main_thread():
        return  # somebody else's process, whose signals are its own
    for number in (signal.SIGINT, signal.SIGTERM):
        # Nohup, and shells that start a job in the background
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt. Import before: an import may swallow it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, signals that ask to stop are written down here instead of ending this process."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    numbers = (signal.SIGINT, signal.SIGHUP, *PREEMPTION)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


CONTROL = "ONEFOLD_CONTROL"
#: The process id of who has started this process.
PARENT = "ONEFOLD_PARENT"
#: When the launcher started, seconds since the epoch.
STARTED = "ONEFOLD_STARTED"
#: Seconds that torchrun waits between SIGTERM and SIGKILL when it starts ranks anew.
GRACE = "ONEFOLD_GRACE"
INTERRUPTED = 130
#: What a rank returns that was not asked to end itself, so that its agent starts it again with the
#: machines that remain.
AGAIN = 75
TRAINING, FINAL = "training", "final"
#: The file in the control folder in which the agent says why it starts no ranks.
REFUSED = "refused"
#: Signals by which schedulers announce the end.
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)


class Stop(enum.IntFlag):
    """Why a run ends before its last step."""

    NONE = 0
    INTERRUPT = 1
    PREEMPT = 2
    TIME = 4

    @property
    def reason(self) -> str:
        """For people."""
        if self & Stop.PREEMPT:
            return "SIGTERM or SIGUSR1"
        return "--save-before" if self & Stop.TIME else "Ctrl-C" if self else ""


#: The file in the control folder by which the launcher passes a request on.
REQUESTS = {Stop.INTERRUPT: "stop-interrupt", Stop.PREEMPT: "stop-preempt"}


class StopSignal:
    """On a rank: what has this rank been asked?

    Args:
        rank: among all. local_rank: among those of this machine.
        grace: seconds from the first SIGTERM or SIGUSR1 after which the rank ends without having
            saved, with status 1.

    Attributes:
        last_words: called before SIGTERM ends this rank because there is nothing to save yet.
    """

    def __init__(self, rank: int, local_rank: int = 0, grace: float = 30.0) -> None:
        folder = os.environ.get(CONTROL)
        self.control = Path(folder) if folder else None
        self.rank, self.local_rank, self.grace = rank, local_rank, grace
        self.generation = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.last_words: Callable[[], object] = lambda: None
        self._asked = Stop.NONE
        self._armed = self._saved = False
        self._listen()
        if self.control is not None:
            with contextlib.suppress(OSError):
                (self.control / f"ended-{local_rank}").unlink(missing_ok=True)
                if local_rank == 0:
                    (self.control / TRAINING).unlink(missing_ok=True)

    def arm(self) -> None:
        """There is something to save now: a signal no longer ends the process at once."""
        self._armed = True
        if self.local_rank == 0:
            self._mark(TRAINING)

    def disarm(self) -> None:
        """What was to be saved is saved; the time that was left for it no longer matters."""
        self._saved = True

    @property
    def asked(self) -> Stop:
        """What was asked of this rank. Other ranks may not know yet: reduce it."""
        asked = self._asked
        for kind, name in REQUESTS.items():
            if self.control is not None and (self.control / name).exists():
                asked |= kind
        return asked

    def exit_code(self, stopped: Stop) -> int:
        """This rank's exit status; after Ctrl-C the launcher itself turns 0 into 130."""
        self._mark(f"ended-{self.local_rank}")
        by_hand = stopped & Stop.INTERRUPT and not stopped & (Stop.PREEMPT | Stop.TIME)
        return INTERRUPTED if by_hand and self.control is None else 0

    def speak_first(self) -> bool:
        """True for the first rank of this machine that asks; those that fail later keep quiet."""
        if self.control is None:
            return True
        try:
            os.close(os.open(self.control / f"failed-{self.generation}", os.O_CREAT | os.O_EXCL))
        except OSError:
            return False
        return True

    def no_restart(self) -> None:
        """What went wrong would go wrong again: end the run instead of restarting ranks."""
        self._mark(FINAL)

    def _mark(self, name: str) -> None:
        if self.control is not None:
            with contextlib.suppress(OSError):
                (self.control / name).touch()

    def _listen(self) -> None:
        """See [Note: signals on a thread]."""
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
        again = bool(self._asked & Stop.INTERRUPT) and number == signal.SIGINT
        if not self._armed and number == signal.SIGTERM:
            self.last_words()
        if not self._armed or again:
            os._exit(128 + number)
        if number == signal.SIGINT:
            self._asked |= Stop.INTERRUPT
        elif not self._asked & Stop.PREEMPT:
            self._asked |= Stop.PREEMPT
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
            print(text, file=sys.stderr, flush=True)
        os._exit(1)


# -- ending with one's parent ----------------------------------------------------------------------


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, however that ends. See [Note: nobody is left behind].

    `parent`: the process that has started this one, where that is known: it may have ended by now.
    """
    if sys.platform == "linux":  # the kernel tells at once, of the thread that started this process
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


def parent_told() -> int | None:
    """The process id that whoever started this process has left for it in the environment."""
    return int(os.environ[PARENT]) if PARENT in os.environ else None
