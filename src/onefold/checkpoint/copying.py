"""Copy a run's state to host memory for an asynchronous save, while the training computes.

    training   save_async | forward   backward | step
    copy                  |──────────────|      ^ waits here until the copy is complete

Master weights and optimizer states do not change between two optimizer steps, so a background
thread copies them. A forward pass may change buffers and random generators, so these are copied
before the call returns.

The first save takes the host memory for the copy, pinned if the device has streams. Pinning 12 GB
takes seconds, so the background thread does it.

[Note: nobody writes under the copy] Every write through the engine (a step, a load,
full_params(write=True)) waits for the copy first. The user's own writes change the tensors' version
counters. The save then raises an error; otherwise the copy would mix old and new values.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
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
            self._copies[i] = replace(pieces[i], values=partial(list, [copy]), watched=None)

    def _now(self) -> dict[int, int]:
        """Return the versions of the parts that stay as they are between two steps."""
        watched = ((i, part.watched) for i, part in enumerate(self._parts.tensors))
        return {i: 0 if t.is_inference() else int(t._version) for i, t in watched if t is not None}

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
