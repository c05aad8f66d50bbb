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

#: Kinds of items that do not change between two steps.
_STILL = ("parameter", "state")


class _Kept:
    """What the saves of one engine use again: a stream, and host buffers for the items that are
    still between two steps (True) and for the others (False).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._buffers: dict[bool, torch.Tensor] = {}

    @property
    def stream(self) -> Any:
        """The stream of the background copies; None on a device without streams. Torch gives out
        only some 32 different streams, so one is kept.
        """
        if self._stream is None:
            self._stream = new_stream(self._device)
        return self._stream

    def buffer(self, still: bool, nbytes: int) -> torch.Tensor:
        """Return host memory of at least `nbytes`, pinned for a device with streams."""
        buffer = self._buffers.get(still)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(still, None)
            pinned = self._device if has_streams(self._device) else None
            host = torch.device("cpu")
            buffer = self._buffers[still] = empty(nbytes, torch.uint8, host, pinned=pinned)
        return buffer


_kept: weakref.WeakKeyDictionary[Engine, _Kept] = weakref.WeakKeyDictionary()


class Copying:
    """One copy. Attributes: waited: seconds that the training has waited for the copy after the
    call returned.
    """

    def __init__(self, engine: Engine, parts: RankState) -> None:
        self._parts, self.waited, self._done = parts, 0.0, threading.Event()
        self._device = engine.device
        self._kept = _kept.setdefault(engine, _Kept(engine.device))
        self._copies: dict[int, PieceToWrite] = {}
        self._event: Any = None
        still = [
            i
            for i, part in enumerate(parts.tensors)
            if part.item.kind in _STILL and not isinstance(part.tensor, OnDisk)
        ]
        self._versions = {i: _version(parts.tensors[i].tensor) for i in still}
        with torch.no_grad():
            self._copy(sorted(set(range(len(parts.tensors))) - set(still)), still=False)
        # The background copies wait for this event: for the copies above, and for writes to masters
        # and states that are still queued on the training's stream.
        computing = current_stream(self._device)
        self._event = computing.record_event() if computing is not None else None

    def _copy(self, which: list[int], still: bool) -> None:
        """Start to copy the parts with these numbers."""
        places, total = {}, 0
        for i in which:
            tensor = self._parts.tensors[i].tensor
            # State on disk is there because memory is scarce: no copy. It is written to the
            # checkpoint before the training goes on.
            if isinstance(tensor, OnDisk):
                self._copies[i] = self._parts.tensors[i]
            else:
                places[i] = (tensor, total)
                total += round_up(nbytes_of(tensor), 64)
        buffer = self._kept.buffer(still, total)
        for i, (tensor, at) in places.items():
            copy = buffer[at : at + nbytes_of(tensor)].view(tensor.dtype)
            copy.copy_(tensor, non_blocking=True)
            self._copies[i] = replace(self._parts.tensors[i], tensor=copy)

    def run(self) -> RankState:
        """Copy the rest, in any thread. Returns the copied parts.
        Raises: CheckpointError: a tensor was written to while it was being copied.
        """
        try:
            with torch.no_grad():
                # Entering a stream also selects its device, for which the buffer is pinned
                stream = self._kept.stream
                if stream is not None:
                    stream.wait_event(self._event)
                with use_stream(stream):
                    self._copy(list(self._versions), still=True)
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


def _version(tensor: Any) -> int:
    return 0 if isinstance(tensor, OnDisk) or tensor.is_inference() else int(tensor._version)
