"""Saves in the background: one thread per rank. `wait` raises the error of a failed save. If nobody
waits for it, the next optimizer step raises its error.

First it copies the state to host memory, while the training computes:

    training   save_async | forward   backward | step
    copy                  |──────────────|      ^ waits here until the copy is complete

Master weights and optimizer states do not change between two optimizer steps, so a background
thread copies them. A forward pass may change buffers and random generators, so these are copied
before the call returns.

The first save takes the host memory for the copy, pinned if the device has streams. Pinning 12 GB
takes seconds, so the background thread does it.

[Note: nobody writes under the copy] Every write through the engine (a step, a load,
full_params(write=True)) waits for the copy first. The user's own writes change the tensors' version
counters, also those of a module in its forward pass to weights of which masters are a part. The save
then raises an error; otherwise the copy would mix old and new values.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.parts import PieceToWrite, RankState
from onefold.device import current_stream, has_streams, new_stream, use_stream
from onefold.layout import round_up
from onefold.memory import empty
from onefold.runtime.engine import Engine


@dataclass
class _Kept:
    """What the saves of one engine use again: a stream (torch gives out only some 32 different ones), and
    host buffers for the items that are still between two steps (True) and for the others (False).
    """

    stream: Any = None
    buffers: dict[bool, torch.Tensor] = field(default_factory=dict)


_kept: weakref.WeakKeyDictionary[Engine, _Kept] = weakref.WeakKeyDictionary()


class Copying:
    """One copy. Attributes: waited: seconds that the training has waited for the copy after the
    call returned.
    """

    def __init__(self, engine: Engine, parts: RankState) -> None:
        self._parts, self.waited, self._done = parts, 0.0, threading.Event()
        self._device = engine.device
        self._kept = _kept.setdefault(engine, _Kept())
        self._copies: dict[int, PieceToWrite] = {}
        self._event: Any = None
        self._versions = self._now()
        with torch.no_grad():
            self._copy(sorted(set(range(len(parts.tensors))) - set(self._versions)), still=False)
        # The background copies wait for this event: for the copies above, and for writes to masters
        # and states that are still queued on the training's stream.
        computing = current_stream(self._device)
        self._event = computing.record_event() if computing is not None else None

    def _copy(self, which: list[int], still: bool) -> None:
        """Start to copy the parts with these numbers."""
        pieces = self._parts.tensors
        total = sum(round_up(pieces[i].nbytes, 64) for i in which)
        buffer, at = self._kept.buffers.pop(still, None), 0
        if buffer is None or buffer.numel() < total:
            pinned = self._device if has_streams(self._device) else None
            buffer = None  # before a larger one is made
            buffer = empty(total, torch.uint8, torch.device("cpu"), pinned=pinned)
        self._kept.buffers[still] = buffer
        for i in which:
            copy = buffer[at : at + pieces[i].nbytes].view(pieces[i].dtype)
            filled, at = 0, at + round_up(pieces[i].nbytes, 64)
            for part in pieces[i].values():
                copy[filled : filled + part.numel()].copy_(part, non_blocking=True)
                filled += part.numel()
            self._copies[i] = replace(pieces[i], values=partial(list, [copy]), watched=())

    def _now(self) -> dict[int, int]:
        """Return the versions of the parts that stay as they are between two steps."""
        watched = ((i, part.watched) for i, part in enumerate(self._parts.tensors))
        return {i: sum(t._version for t in ts if not t.is_inference()) for i, ts in watched if ts}

    def run(self) -> RankState:
        """Copy the rest, in any thread. Returns the copied parts.
        Raises: CheckpointError: a tensor was written to while it was being copied.
        """
        try:
            with torch.no_grad():
                # Entering a stream also selects its device, for which the buffer is pinned
                stream = self._kept.stream = self._kept.stream or new_stream(self._device)
                if stream is not None:
                    stream.wait_event(self._event)
                with use_stream(stream):
                    self._copy(list(self._versions), still=True)
                if stream is not None:
                    stream.synchronize()  # covers the first copies too, which the event waited for
            now = self._now()
            torn = [i for i, version in self._versions.items() if now[i] != version]
        finally:
            self._done.set()
        if torn:
            raise CheckpointError(
                f"{self._parts.tensors[torn[0]].item} was written to while save_async was copying"
                " it, so the copy is of two moments. Write to parameters before save_async or"
                " after its wait(), or use save()."
            )
        copies = [self._copies[i] for i in range(len(self._parts.tensors))]
        parts = replace(self._parts, tensors=copies)
        self._parts = parts  # drops the references to the original tensors
        return parts

    def wait(self) -> None:
        """Wait until the copy no longer reads the training's own memory."""
        if not self._done.is_set():
            begun = time.perf_counter()
            self._done.wait()
            self.waited += time.perf_counter() - begun


class Background:
    """A save under way.

    Attributes:
        path: the checkpoint.
        seconds: from start to end of the work; None until it has ended.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        path: Path,
        work: Callable[[], None],
        begun: float,
        copying: Copying | None = None,
    ) -> None:
        self.path, self._begun, self._engines = path, begun, weakref.WeakSet(engines)
        self.seconds: float | None = None
        self._error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        # Not a daemon: a program that ends during a save waits until the checkpoint is written.
        self._thread = threading.Thread(target=self._run, name=f"onefold {path.name}", daemon=False)
        self._copying = copying
        for engine in engines:
            # The engine joins the thread before it frees anything that the thread may read
            engine.settle = partial(_join, self._thread)
            if copying is not None:
                engine.copying = copying.wait
        self._stall_s = time.perf_counter() - begun
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            # Logged at once: the program may end without another step
            logging.getLogger("onefold").error("%s: %s", self.path, error)
            self._failed(error)
        finally:
            self._work = None  # frees the tensors that the work referred to
            self.seconds = time.perf_counter() - self._begun

    def _failed(self, error: BaseException) -> None:
        self._error = error
        for engine in self._engines:
            engine.failure = engine.last_failure = error

    @property
    def stall_s(self) -> float:
        """Seconds that the training has waited for this work so far, in the call and in steps."""
        return self._stall_s + (self._copying.waited if self._copying is not None else 0.0)

    @property
    def done(self) -> bool:
        """Whether the work has ended on this rank, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end of the work. Returns the checkpoint's path.

        Raises:
            CheckpointError: the work failed. Once `wait` has raised this on every rank, no step
                raises it again.
        """
        self._thread.join()
        if self._error is not None:
            for engine in self._engines:
                if engine.failure is self._error:
                    engine.failure = None
            raise self._error
        return self.path


def _join(thread: threading.Thread) -> None:
    """Wait for the work under way. A failure is not raised here: see `Background.wait`."""
    if thread is not threading.current_thread():
        thread.join()
