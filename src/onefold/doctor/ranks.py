"""Start ranks on this machine with torchrun's agent, in the process of the command. No process and no
file is left, whatever happens.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path
from unittest.mock import patch

from onefold.processes.host import child_environment
from onefold.wording import few


def launch(ranks: int, folder: Path, *arguments: str) -> str:
    """Run Python with `arguments` as so many ranks until they end. Returns what became of those that
    failed, or "".

    Args:
        folder: for what the ranks print.

    Raises:
        torch's SignalException: a signal arrived; every rank is ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    repeatable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    config = LaunchConfig(
        1,
        1,
        ranks,
        logs,
        "doctor",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    environment = child_environment(repeatable, ranks, folder, compiling=False)
    logging.disable(logging.CRITICAL)  # the agent's own words
    try:
        with patch.dict(os.environ, environment):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
        lost = {rank: code for rank, code in ended.items() if code == -signal.SIGKILL}
        return few(_last_words(folder, rank, code) for rank, code in (lost or ended).items())
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _last_words(folder: Path, rank: int, status: int) -> str:
    """Say how a rank ended, or where it stood still."""
    files = sorted(folder.glob(f"**/{rank}/stderr.log"))
    said = files[0].read_text(errors="replace").strip() if files else ""
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', said.rpartition("call first)")[2])
    if "Timeout (" in said and frames:
        file, line, function = frames[0]
        return f"rank {rank} stood still in {function} ({Path(file).name}:{line})"
    how = f"ended with status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
        how += " (memory may have run out)" if -status == signal.SIGKILL else ""
    return f"rank {rank} {how}: {said.splitlines()[-1] if said else 'it said nothing'}"
