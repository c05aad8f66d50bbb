"""The process between `onefold train` and its ranks: torchrun's elastic agent, without its log of
what the ranks say better.

Run as `python -m onefold.train.agent` with torchrun's own arguments, in a session of its own: a
Ctrl-C in the terminal reaches the launcher only, and the launcher decides (see
`onefold.train.stop`). Schedulers that send a signal to every process of a
job reach this one too: it lets them pass, and ends on `END`, which the launcher sends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from onefold.train.stop import CONTROL, PARENT, end_with_parent, parent_told

#: What ends the agent and its ranks at once.
END = signal.SIGQUIT
#: How long torchrun waits between SIGTERM and SIGKILL when it starts ranks anew, in seconds.
GRACE = "ONEFOLD_GRACE"


def main(arguments: list[str]) -> int:
    """Start the ranks, start them again as often as may be, and wait for them. Returns the exit
    status.
    """
    _let_signals_pass()
    sys.unraisablehook = _once_more
    end_with_parent(parent_told())
    os.environ[PARENT] = str(os.getpid())  # of the ranks
    logging.disable(logging.CRITICAL)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    asked = run.parse_args(arguments)
    for name, value in (
        ("signals_to_handle", END.name),
        ("shutdown_timeout", int(float(os.environ.get(GRACE, "30")))),
    ):
        if hasattr(asked, name):  # not in every version of torch
            setattr(asked, name, value)
    try:
        run.run(asked)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if not _has_spoken(Path(os.environ[CONTROL])):
            print(f"error: {_how_it_ended(rank, failure.exitcode)}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousTimeoutError:
        print(
            "error: the machines did not meet in time: fewer than --nnodes asks for came to"
            " --rdzv-endpoint.",
            file=sys.stderr,
        )
        return 1
    except RendezvousClosedError:
        print("error: the run has ended on the other machines.", file=sys.stderr)
        return 1
    except RendezvousError as error:
        text = str(error).splitlines()[0]
        hint = "is it HOST:PORT of one of them, and is that one up?"
        print(
            f"error: the machines cannot meet at --rdzv-endpoint ({text}): {hint}", file=sys.stderr
        )
        return 1
    except RuntimeError as error:
        # torch.distributed's DistError and its kinds
        # A machine went while they met, and with it what they tell each other through
        if not type(error).__name__.startswith("Dist"):
            raise
        text = (str(error).splitlines() or [type(error).__name__])[0]
        print(
            f"error: the machines lost each other while they met ({text}). Start this one again,"
            " and it joins them.",
            file=sys.stderr,
        )
        return 1
    finally:
        signal.signal(END, signal.SIG_IGN)  # it ends by itself now
    return 0


def quietly(arguments: list[str]) -> int:
    """As `main`, also if `END` comes while that tells how the ranks ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        return main(arguments)
    except SignalException as error:
        return 128 + error.sigval


def _let_signals_pass() -> None:
    """A handler that does nothing rather than SIG_IGN, which the ranks would inherit."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    signal.signal(END, end)


def _once_more(lost: Any) -> None:
    """`END` raises wherever the process is. Where that is a weak reference's callback or the like,
    Python prints a traceback and goes on as
    if nothing had come: the signal is sent again a moment later.
    """
    if isinstance(lost.exc_value, SystemExit) or type(lost.exc_value).__name__ == "SignalException":
        again = threading.Timer(0.05, os.kill, (os.getpid(), END))
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(lost)


def _has_spoken(control: Path) -> bool:
    """Whether a rank of the last start told what went wrong."""
    starts = [file.stat().st_mtime_ns for file in control.glob("rank-*.pid")]
    return any(
        file.stat().st_mtime_ns >= min(starts, default=0) for file in control.glob("failed-*")
    )


def _how_it_ended(rank: int, status: int) -> str:
    if status >= 0:
        return f"rank {rank} ended with status {status} and said nothing."
    name = signal.Signals(-status).name
    hint = ""
    if -status == signal.SIGKILL:
        hint = (
            " This is how the kernel ends a process when memory runs out: try a higher --stage, a"
            " smaller --micro-batch or --seq."
        )
    return f"rank {rank} was ended by {name}.{hint}"


if __name__ == "__main__":
    sys.exit(quietly(sys.argv[1:]))
