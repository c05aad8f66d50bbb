"""Ranks of this machine for the doctor, and their last words. No process and no file is left, whatever
happens.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from onefold.processes.host import child_environment
from onefold.processes.local import how_it_ended, local_ranks
from onefold.wording import few


def launch(count: int, folder: Path, *arguments: str) -> str:
    """Run a module's `main` as so many ranks until they end. Returns what became of those that failed,
    or "".

    Args:
        folder: for what the ranks print.
    """
    repeatable = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    environment = child_environment(repeatable, count, folder, compiling=False)
    with local_ranks(count, environment, *arguments, logs=folder) as ranks:
        failed = ranks.wait(period=0.1).failures
    ended = {rank: failure.exitcode for rank, failure in failed.items()}
    lost = {rank: status for rank, status in ended.items() if status == -signal.SIGKILL}
    return few(_last_words(folder, rank, status) for rank, status in (lost or ended).items())


def _last_words(folder: Path, rank: int, status: int) -> str:
    """Say how a rank ended, or where it stood still."""
    files = sorted(folder.glob(f"**/{rank}/stderr.log"))
    said = files[0].read_text(errors="replace").strip() if files else ""
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', said.rpartition("call first)")[2])
    if "Timeout (" in said and frames:
        file, line, function = frames[0]
        return f"rank {rank} stood still in {function} ({Path(file).name}:{line})"
    last = said.splitlines()[-1] if said else "it said nothing"
    return f"{how_it_ended(rank, status)}: {last}"
