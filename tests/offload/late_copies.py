"""Copies as a device makes them, on a CPU: not when they are asked for, but when somebody is made
to wait for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.device import CopyStream
from onefold.offload.activations import ActivationStore


@dataclass
class Memory:
    """Bytes that nobody here keeps alive."""

    storage: StorageWeakRef
    offset: int
    nbytes: int

    @classmethod
    def of(cls, t: Tensor) -> Memory:
        return cls(StorageWeakRef(t.untyped_storage()), t.storage_offset(), t.numel())

    def bytes(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        view: Any = torch.empty(0, dtype=torch.uint8)
        return view.set_(storage, self.offset, (self.nbytes,), (1,))  # type: ignore[no-any-return]


@dataclass
class LateTicket:
    into: Memory
    source: Memory
    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class Stream:
    name: str
    waits: list[Any] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class LateSide(CopyStream):
    """A side stream that is as late as it may be.

    Attributes:
        problems: copies whose memory was let go of before anybody had waited for them.
        computing: the stream that code runs on now; a test may put another one here.
    """

    def __init__(self, store: ActivationStore) -> None:
        super().__init__(torch.device("cpu"))
        self.asynchronous = True
        self.store = store
        self.late: deque[LateTicket] = deque()
        self.problems: list[str] = []
        self.computing = Stream("computing")

    def current(self) -> Stream:
        return self.computing

    def start(self, into: Tensor, source: Tensor) -> LateTicket:
        upward = any(
            slab.memory.untyped_storage()._cdata == source.untyped_storage()._cdata
            for slab in self.store.arena.slabs
        )
        if upward:
            into.fill_(0xA5)  # what is read too early is seen
        ticket = LateTicket(Memory.of(into), Memory.of(source))
        self.late.append(ticket)
        return ticket

    def order(self, ticket: Any, stream: Any = None) -> None:
        while ticket is not None and not ticket.done:
            first = self.late.popleft()
            into, source = first.into.bytes(), first.source.bytes()
            if into is None or source is None:
                self.problems.append(
                    f"{first.source.nbytes} bytes:"
                    f" {'what it reads' if source is None else 'what it writes'} was freed"
                )
            else:
                into.copy_(source)
            first.done = True

    def wait(self) -> None:
        if self.late:
            self.order(self.late[-1], self.computing)


def late(store: ActivationStore) -> LateSide:
    """Let the copies of `store` be late."""
    side = LateSide(store)
    store.side, store.arena.settle = side, side.wait
    return side
