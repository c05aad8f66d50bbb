"""The ranks' store, asked with a limit.

One process keeps it: rank 0, or the launcher. If that process is stopped, or its host is gone, torch
waits for an answer without end (2.13): most calls have no limit, and a wait that has reached its own
tells the store so, and waits for the answer to that. To make a group of ranks, torch asks it too.
So each such call is made on a thread, which is left behind if no answer comes.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
#: Stores that have not answered, and the threads that still wait for them.
_silent: list[tuple[Any, threading.Thread]] = []


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def within(seconds: float, call: Callable[[], _T], store: Any = None) -> _T:
    """Return what `call` returns, which asks `store` (None: the default one).

    Raises:
        RuntimeError: no answer came within `seconds`, or an earlier call still waits for one.
    """
    store = default_store() if store is None else store
    _silent[:] = [(its, thread) for its, thread in _silent if thread.is_alive()]
    if all(its is not store for its, _ in _silent):
        answer: Future[_T] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(ask,), name="onefold-store", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # a script that ends during a save starts no threads any more
            ask()
        try:
            return answer.result(seconds)
        except TimeoutError:
            if answer.done():
                raise
        _silent.append((store, thread))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    raise RuntimeError(
        f"{'the launcher' if agent else 'rank 0'}, which keeps the ranks' store, does not answer: it is"
        " stopped, or its host cannot be reached"
    )
