"""How many threads of the host a rank's operators use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from onefold.cores import launcher_environment, physical_cores, threads_for


def host_threads(world_size: int) -> int:
    """Return the number of threads for work on state that is stored on the host: `threads_for` this
    process.

    `world_size`: the ranks of this machine, if no launcher says how many they are.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return threads_for(
        physical_cores(),
        int(ranks) if ranks.isdigit() else world_size,
        torch.get_num_threads(),
        os.environ,
        launcher_environment(),
    )


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let this thread's operators on the host use `count` threads, inside the context."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
