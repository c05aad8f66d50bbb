"""Copy a run's state to host memory for an asynchronous save, while the training computes.

    training   save_async | forward   backward | step
    copy                  |──────────────|      ^ waits here until the copy is complete

Master weights and optimizer states do not change between two optimizer steps, so a background
thread copies them. A forward pass may change buffers and random generators, so these are copied
before the call returns.

[Note: nobody writes under the copy] Every write through the engine (a step, a load,
full_params(write=True)) waits for the copy first. The user's own writes change the tensors' version
counters. The save then raises an error; otherwise the copy would mix old and new values.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.parts import PieceToWrite, RankState
from onefold.device import current_stream, has_streams, new_stream, use_stream
from onefold.layout import round_up
from onefold.memory import empty, nbytes_of
from onefold.runtime.engine import Engine
from onefold.runtime.storage import OnDisk

_buffers: weakref.WeakKeyDictionary[Engine, torch.Tensor] = weakref.WeakKeyDictionary()
#: Kinds of items that do not change between two steps.
_STILL = ("parameter", "state")


class Copying:
    """One copy. Attributes: waited: seconds that the training has waited for the copy after the
    call returned.
    """

    def __init__(self, engine: Engine, parts: RankState) -> None:
        self._parts, self.waited, self._done = parts, 0.0, threading.Event()
        self._device = engine.device
        self._buffer, self._places = _buffer_for(engine, parts)
        self._copies: dict[int, PieceToWrite] = {}
        self._event: Any = None
        still = [
            i
            for i, part in enumerate(parts.tensors)
            if part.item.kind in _STILL and not isinstance(part.tensor, OnDisk)
        ]
        self._versions = {i: _version(parts.tensors[i].tensor) for i in still}
        with torch.no_grad():
            for i in sorted(set(range(len(parts.tensors))) - set(still)):
                self._copy(i)
        # The background copies wait for this event: for the copies above, and for writes to masters
        # and states that are still queued on the training's stream.
        computing = current_stream(self._device)
        self._event = computing.record_event() if computing is not None else None

    def _copy(self, i: int) -> None:
        part = self._parts.tensors[i]
        # State on disk is there because memory is scarce: no copy. It is written to the checkpoint
        # before the training goes on.
        if isinstance(part.tensor, OnDisk):
            self._copies[i] = part
            return
        at, nbytes = self._places[i], nbytes_of(part.tensor)
        copy = self._buffer[at : at + nbytes].view(part.tensor.dtype)
        self._copies[i] = replace(part, tensor=copy.copy_(part.tensor, non_blocking=True))

    def run(self) -> RankState:
        """Copy the rest, in any thread. Returns the copied parts.
        Raises: CheckpointError: a tensor was written to while it was being copied.
        """
        try:
            with torch.no_grad():
                # Entering a stream also selects its device: no further guard is needed
                stream = new_stream(self._device)
                if stream is not None:
                    stream.wait_event(self._event)
                with use_stream(stream):
                    for i in self._versions:
                        self._copy(i)
                if stream is not None:
                    stream.synchronize()  # covers the first copies too, which the event waited for
            now = {i: _version(self._parts.tensors[i].tensor) for i in self._versions}
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


def _buffer_for(engine: Engine, parts: RankState) -> tuple[torch.Tensor, list[int]]:
    """Return (a host buffer, kept for later saves; the offset of each part in it, in bytes)."""
    places, total = [], 0
    for part in parts.tensors:
        places.append(total)
        if not isinstance(part.tensor, OnDisk):
            total += round_up(nbytes_of(part.tensor), 64)
    buffer = _buffers.get(engine)
    if buffer is None or buffer.numel() < total:
        _buffers.pop(engine, None)
        buffer = _buffers[engine] = empty(
            total,
            torch.uint8,
            torch.device("cpu"),
            pinned=engine.device if has_streams(engine.device) else None,
        )
    return buffer, places


def _version(tensor: Any) -> int:
    return 0 if isinstance(tensor, OnDisk) or tensor.is_inference() else int(tensor._version)
