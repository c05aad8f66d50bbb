"""The copy of a run's state in host memory that an asynchronous save is written from, taken while
the training computes.

    training   save_async | forward   backward | step
    copy                  |──────────────|      ^ waits here for the rest of the copy, if there is any

Between two optimizer steps masters and states do not change, so they are copied behind the
training; what a forward pass may change (buffers, generators) is copied before the call returns.

[Note: nobody writes under the copy] Whoever writes through the engine (a step, a load,
full_params(write=True)) waits for the copy first. A write of the user's own shows in the tensors'
version counters, and the save then fails with a sentence instead of mixing two moments.
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
#: What does not change between two steps.
_STILL = ("parameter", "state")


class Copying:
    """One copy. Attributes: waited: seconds that the training stood still for it after the call had
    returned.
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
        # The copies so far, and whatever the training still writes to masters and states, come
        # before what the other thread copies.
        computing = current_stream(self._device)
        self._event = computing.record_event() if computing is not None else None

    def _copy(self, i: int) -> None:
        part = self._parts.tensors[i]
        # Memory is what there is too little of: it is written before the training goes on
        if isinstance(part.tensor, OnDisk):
            self._copies[i] = part
            return
        at, nbytes = self._places[i], nbytes_of(part.tensor)
        copy = self._buffer[at : at + nbytes].view(part.tensor.dtype)
        self._copies[i] = replace(part, tensor=copy.copy_(part.tensor, non_blocking=True))

    def run(self) -> RankState:
        """Copy what is left, in whatever thread. Returns the copied parts.
        Raises: CheckpointError: somebody wrote to what was being copied.
        """
        try:
            with torch.no_grad():
                # Whoever is on a stream is on its device: this thread needs no guard besides
                stream = new_stream(self._device)
                if stream is not None:
                    stream.wait_event(self._event)
                with use_stream(stream):
                    for i in self._versions:
                        self._copy(i)
                if stream is not None:
                    stream.synchronize()  # the first copies too: it came after them
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
        self._parts = parts  # lets go of what was copied
        return parts

    def wait(self) -> None:
        """Until nothing is read of the training's own memory any more."""
        if not self._done.is_set():
            begun = time.perf_counter()
            self._done.wait()
            self.waited += time.perf_counter() - begun


def _buffer_for(engine: Engine, parts: RankState) -> tuple[torch.Tensor, list[int]]:
    """(one buffer on the host, kept for the next time; where each part goes in it)."""
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
