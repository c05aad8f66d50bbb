"""Connections of one communicator of the stand-in: every rank to every other, and the thread that
moves bytes over them.

    host thread       post(operation) ─────────────► ... ─► hurry() ─► operation.done.wait()
    this thread                  (its delay goes by)    read the inputs, send; collect what arrives

An operation's inputs are read late: when its delay is over, or when the host begins to wait for
anything, whichever comes first. The host cannot overwrite an input while it waits, so that no rank
keeps another one waiting for longer than a delay.
"""

from __future__ import annotations

import contextlib
import pickle
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

#: What outputs hold until they are written: NaN in floating point.
POISON = 0xFF
# Kind, number, bytes of what the sender says of its operation, bytes of the payload
_HEAD = struct.Struct("<cQIQ")
COLLECTIVE, POINT = b"c", b"p"
every: weakref.WeakSet[Wire] = weakref.WeakSet()


@dataclass(eq=False)
class Operation:
    """One operation on one communicator, as this rank launched it.

    Attributes:
        said: what all ranks must say alike of a collective: its name, sizes, dtype; for a message
            between two, what both say.
        read: reads the inputs; the bytes for each rank that gets some, this one among them.
        sources: the ranks whose bytes `write` needs.
        write: writes the outputs, from the bytes of each source.
        due: when the inputs are read at the latest, by `time.monotonic`.
        outputs, inputs: the tensors.
    """

    kind: bytes
    number: int
    said: str
    read: Callable[[], Mapping[int, bytes]]
    sources: frozenset[int]
    write: Callable[[Mapping[int, bytes]], None]
    due: float
    outputs: Sequence[Tensor] = ()
    inputs: Sequence[Tensor] = ()
    arrived: dict[int, bytes] = field(default_factory=dict)
    sent: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    written: bool = False

    def finish(self) -> None:
        """Write the outputs, once."""
        if not self.written:
            self.written = True
            self.write(self.arrived)
            self.outputs, self.inputs, self.arrived = (), (), {}

    def take(self) -> Mapping[int, bytes]:
        """Read the inputs; what else of the outputs' memory they take is poisoned now."""
        payloads = self.read()
        for t in self.outputs:
            if (
                t.device.type == "cpu"
                and any(
                    other.data_ptr() == t.data_ptr() and other.numel() == t.numel()
                    for other in self.inputs
                )
                and t.numel()
            ):
                t.detach().view(-1).view(torch.uint8).fill_(POISON)
        return payloads


class Wire:
    """The connections of one rank. `address_of` gives the port that a rank listens at; it may wait
    for it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        tell: Callable[[int], None],
        address_of: Callable[[int], int],
        patience: timedelta,
    ) -> None:
        self.rank, self.size = rank, size
        self.lock = threading.Lock()
        self.posted: deque[Operation] = deque()  # whose inputs have not been read
        self.open: list[Operation] = []  # which wait for bytes
        self.inbox: dict[tuple[bytes, int, int], tuple[str, bytes]] = {}
        self.gone: dict[int, str] = {}
        self.closing = False
        self._out: dict[int, bytearray] = {p: bytearray() for p in range(size) if p != rank}
        self._in: dict[int, bytearray] = {p: bytearray() for p in self._out}
        self._socks = self._connect(tell, address_of, patience.total_seconds())
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"standin-{rank}", daemon=True)
        self._thread.start()
        every.add(self)

    def _connect(
        self, tell: Callable[[int], None], address_of: Callable[[int], int], patience: float
    ) -> dict[int, socket.socket]:
        found: dict[int, socket.socket] = {}
        with socket.create_server(("127.0.0.1", 0), backlog=self.size) as server:
            server.settimeout(patience)
            tell(server.getsockname()[1])
            for peer in range(self.rank):
                found[peer] = socket.create_connection(
                    ("127.0.0.1", address_of(peer)), timeout=patience
                )
                found[peer].sendall(struct.pack("<I", self.rank))
            for _ in range(self.rank + 1, self.size):
                link, _ = server.accept()
                link.settimeout(patience)
                found[struct.unpack("<I", link.recv(4, socket.MSG_WAITALL))[0]] = link
        for link in found.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setblocking(False)
        return found

    # -- the host's side ---------------------------------------------------------------------------

    def post(self, operation: Operation) -> None:
        with self.lock:
            if self.closing:  # aborted: what is launched now fails at once
                operation.error = "the communicator was closed on this rank"
                operation.done.set()
                return
            self.posted.append(operation)
        self._poke()

    def hurry(self) -> None:
        """The host is about to wait: no input can change any more."""
        with self.lock:
            for operation in self.posted:
                operation.due = 0.0
        self._poke()

    def close(self, now: bool = False) -> None:
        """Send what is to be sent, unless `now`, and let go of the connections."""
        if self.closing:
            return
        if not now:
            self.hurry()
            end = time.monotonic() + 5.0
            while time.monotonic() < end and (
                self.posted or any(self._out[p] for p in self._out if p not in self.gone)
            ):
                time.sleep(0.001)
        self.closing = True
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # -- the thread's side -------------------------------------------------------------------------

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, link in self._socks.items():
            selector.register(link, selectors.EVENT_READ, peer)
        while not self.closing:
            for peer, link in self._socks.items():
                if peer not in self.gone:
                    writes = selectors.EVENT_WRITE if self._out[peer] else 0
                    selector.modify(link, selectors.EVENT_READ | writes, peer)
            for key, events in selector.select(self._patience()):
                if key.data is None:
                    with contextlib.suppress(OSError):
                        self._woken.recv(4096)
                else:
                    self._move(selector, key.data, events)
            self._send_what_is_due()
            self._collect()
        for link in (*self._socks.values(), self._wake, self._woken):
            link.close()
        selector.close()
        with self.lock:
            for operation in (*self.posted, *self.open):
                operation.error = operation.error or "the communicator was closed on this rank"
                operation.done.set()

    def _patience(self) -> float | None:
        with self.lock:
            return max(0.0, self.posted[0].due - time.monotonic()) if self.posted else None

    def _move(self, selector: Any, peer: int, events: int) -> None:
        link = self._socks[peer]
        try:
            if events & selectors.EVENT_READ:
                data = link.recv(1 << 20)
                if not data:
                    raise ConnectionError("connection closed")
                self._in[peer] += data
                self._unpack(peer)
            if events & selectors.EVENT_WRITE and self._out[peer]:
                del self._out[peer][: link.send(memoryview(self._out[peer])[: 1 << 20])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            # What the peer sent before it went says why
            with contextlib.suppress(OSError):
                while data := link.recv(1 << 20):
                    self._in[peer] += data
                    self._unpack(peer)
            self.gone[peer] = str(error)
            self._out[peer].clear()
            selector.unregister(link)

    def _unpack(self, peer: int) -> None:
        box = self._in[peer]
        while len(box) >= _HEAD.size:
            kind, number, said, payload = _HEAD.unpack_from(box)
            end = _HEAD.size + said + payload
            if len(box) < end:
                return
            with memoryview(box) as view:
                words = pickle.loads(view[_HEAD.size : _HEAD.size + said])
                self.inbox[kind, number, peer] = words, bytes(view[_HEAD.size + said : end])
            del box[:end]

    def _send_what_is_due(self) -> None:
        while True:
            with self.lock:
                if not self.posted or self.posted[0].due > time.monotonic():
                    return
                # In the order of the launches: one communicator runs them one after the other
                operation = self.posted.popleft()
                self.open.append(operation)
            words = pickle.dumps(operation.said)
            try:
                payloads = operation.take()
            except Exception as error:
                payloads, operation.error = {}, f"{operation.said}: {error}"
            for peer, payload in payloads.items():
                if peer == self.rank:
                    operation.arrived[peer] = payload
                elif peer not in self.gone:
                    self._out[peer] += (
                        _HEAD.pack(operation.kind, operation.number, len(words), len(payload))
                        + words
                        + payload
                    )
            operation.sent = True

    def _collect(self) -> None:
        for operation in list(self.open):
            for peer in operation.sources - operation.arrived.keys():
                found = self.inbox.pop((operation.kind, operation.number, peer), None)
                if found is None:
                    if peer in self.gone:
                        operation.error = (
                            operation.error
                            or f"rank {peer} of the communicator is gone: {self.gone[peer]}"
                        )
                    continue
                words, operation.arrived[peer] = found
                if words != operation.said:
                    operation.error = (
                        f"the ranks launched different operations as number {operation.number} of"
                        f" one communicator: rank {self.rank} launched {operation.said}, rank"
                        f" {peer} launched {words}"
                    )
            if operation.error or operation.sources <= operation.arrived.keys():
                with self.lock:
                    self.open.remove(operation)
                operation.done.set()
