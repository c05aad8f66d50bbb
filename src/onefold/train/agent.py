"""The process between `onefold train` and its ranks: torchrun's elastic agent, without its log of what the ranks say better.

Run as `python -m onefold.train.agent` with torchrun's own arguments, in a session of its own: a Ctrl-C in the terminal
reaches the launcher only, and the launcher decides (see `onefold.train.stop`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from onefold.train.stop import CONTROL, follow_parent


def main(arguments: list[str]) -> int:
    """Start the ranks and wait for them. Returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)
    follow_parent()
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        spoken = Path(os.environ[CONTROL], "failed").exists()
        if not spoken:
            print(f"error: {_how_it_ended(rank, failure.exitcode)}", file=sys.stderr)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _how_it_ended(rank: int, status: int) -> str:
    if status >= 0:
        return f"rank {rank} ended with status {status} and said nothing."
    name = signal.Signals(-status).name
    hint = ""
    if -status == signal.SIGKILL:
        hint = " This is how the kernel ends a process when memory runs out: try a higher --stage, a smaller --micro-batch or --seq."
    return f"rank {rank} was ended by {name}.{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
