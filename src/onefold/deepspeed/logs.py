"""The logger, and messages that only some ranks print."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from onefold.deepspeed.communication import get_rank
from onefold.device import default_device, memory_figures
from onefold.memory import free_host_memory, total_host_memory

_F = TypeVar("_F", bound=Callable[..., Any])
logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO) -> None:
    """Log on these ranks; None, or a list with -1 in it, means all ranks."""
    if ranks is None or -1 in ranks or get_rank() in ranks:
        logger.log(level, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the message and the memory in use, in GiB, on the first rank, if `force` is true."""
    if not force or get_rank():
        return
    used = total_host_memory() - free_host_memory()
    parts = [f"host {used / 2**30:.2f} of {total_host_memory() / 2**30:.2f} GiB"]
    if (held := memory_figures(default_device())) is not None:
        parts.insert(
            0,
            f"allocated {held.allocated / 2**30:.2f}, at most {held.allocated_peak / 2**30:.2f} GiB;"
            f" reserved {held.reserved / 2**30:.2f}, at most {held.reserved_peak / 2**30:.2f} GiB",
        )
    print(f"{message}: {'; '.join(parts)}", flush=True)


def instrument_w_nvtx(func: _F) -> _F:
    """Return the function unchanged: torch's profiler already names the operators."""
    return func
