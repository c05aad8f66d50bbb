"""Start ranks on this machine, for `onefold train` without a launcher and for `onefold doctor`.

this process ── the store in which the ranks meet, on the loopback interface alone
  ├── rank 0    `python -m onefold.processes.local MODULE ARGUMENTS`, which calls MODULE's main(ARGUMENTS),
  └── rank 1    in a session of its own: a Ctrl-C in the terminal reaches this process only, which
                decides what to do (`onefold.processes.signals`)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from onefold.processes.host import LOOPBACK, local_store
from onefold.processes.signals import (
    PARENT,
    end_with_parent,
    put_in_order,
    quiet_third_parties,
)


@contextlib.contextmanager
def local_ranks(
    count: int, environment: Mapping[str, str], *arguments: str, logs: Path, printed: bool = False
) -> Iterator[Any]:
    """Run so many ranks inside the block, and yield torchrun's handle on their processes, a `PContext`.
    When the block ends, those that are left are killed, with what they have started.

    Args:
        environment: of every rank; the variables that torchrun would set are added.
        arguments: a module, and what its `main` is given, which returns the exit status.
        logs: an empty folder. The ranks print into files there, unless they are `printed`: then where
            this process prints.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    store = local_store()
    shared = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
        **environment,
        PARENT: str(os.getpid()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank opens a store of its own
    }
    each = {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)}
    command = dict.fromkeys(each, ("-m", "onefold.processes.local", *arguments))
    told = DefaultLogsSpecs(str(logs), Std.NONE if printed else Std.ALL)
    logging.disable(logging.CRITICAL)  # the ranks report errors better than torch does here
    try:
        # This process has handlers of its own
        with patch.dict(os.environ, TORCHELASTIC_SIGNALS_TO_HANDLE="SIGQUIT"):
            ranks = start_processes("rank", sys.executable, command, each, told)
        end = partial(ranks.close, signal.SIGKILL)
        put_in_order.append(end)  # should a signal end this process
        try:
            yield ranks
        finally:
            end()
            put_in_order.remove(end)
    finally:
        logging.disable(logging.NOTSET)


def how_it_ended(rank: int, status: int) -> str:
    """Say how a rank ended that has failed."""
    if status > 0:
        return f"rank {rank} ended with status {status}"
    hint = " (memory may have run out)" if -status == signal.SIGKILL else ""
    return f"rank {rank} was ended by {signal.Signals(-status).name}{hint}"


if __name__ == "__main__":
    end_with_parent(int(os.environ[PARENT]))  # before anything slow is imported
    # SIGINT ends the rank until there is something to save: see onefold.processes.signals
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_third_parties()
    # Objects made by the imports stay alive. Collecting among them takes a fifth of the import time
    gc.disable()
    named = importlib.import_module(sys.argv[1])
    gc.freeze()
    gc.enable()
    sys.exit(named.main(*sys.argv[2:]))
