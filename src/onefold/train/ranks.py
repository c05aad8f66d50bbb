"""This rank among the others: its device, its process groups, the few numbers that ranks tell each
other on the host, and which rank has gone.

    join           torch.distributed, under a name of this start's own (`rendezvous`)
    Ranks          sums, gathers and broadcasts of small values over a gloo group of their own
    PeerMonitor    tells every rank within a second which rank has gone, also those that compute and wait for nobody

    rank 1 ──┐                       rank 1 ◄─┐ "2 has gone"
    rank 2 ──┼── rank 0              rank 2   ╳─── rank 0      the system closes a dead process's connections;
    rank 3 ──┘                       rank 3 ◄─┘                rank 0 tells the others

A closed connection is evidence, where a missing heartbeat is a guess: a rank may be busy for a
minute without being dead. A machine that loses its power closes nothing; TCP's keep-alive finds
that out in 8 s. Nothing is sent while all is well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onefold.comm import StallError
from onefold.device import backend_name, default_device, free_memory, set_default
from onefold.memory.host import free_host_memory
from onefold.train.errors import TrainError

#: Seconds in which all ranks must have started.
STARTING = 1800.0
#: Seconds between two looks at the store.
INTERVAL = 0.02
#: Seconds to connect the ranks to rank 0.
SETUP = 15.0
T = TypeVar("T")
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}


@dataclass
class Ranks:
    """Where this process stands.

    Attributes:
        rank, world_size: among all ranks of the run.
        local_rank, local_world_size: among those of this machine.
        device: where it computes.
        backend: of the collectives that move states.
        control: a gloo group of its own for numbers on the host, so that they never mix with the
            engine's collectives.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    control: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float, how: Any = dist.ReduceOp.SUM) -> list[float]:
        """Each value summed (or reduced otherwise) over ranks. Collective."""
        numbers = torch.tensor(values, dtype=torch.float64)
        self._talk(
            "the ranks' figures", lambda: dist.all_reduce(numbers, op=how, group=self.control)
        )
        return numbers.tolist()

    def least(self, value: float) -> float:
        """The least value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MIN)[0]

    def most(self, value: float) -> float:
        """The greatest value of all ranks. Collective."""
        return self.sum(value, how=dist.ReduceOp.MAX)[0]

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank. Collective; it must pickle."""
        box = [value]
        self._talk(
            "what the first rank says",
            lambda: dist.broadcast_object_list(box, src=0, group=self.control),
        )
        return box[0]

    def on_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; what it raises, too. Collective."""
        found: Any = None
        if self.is_first:
            try:
                found = make()
            except Exception as error:
                found = error
        found = self.from_first(found)
        if isinstance(found, Exception):
            raise found
        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective; it must pickle."""
        found: list[Any] = [value] * self.world_size
        self._talk(
            "what each rank says", lambda: dist.all_gather_object(found, value, group=self.control)
        )
        return found

    def free_memory(self) -> int:
        """Bytes free for this rank: of its GPU, or its part of the host's."""
        if self.device.type != "cpu":
            return free_memory(self.device)
        return free_host_memory() // self.local_world_size

    def _talk(self, what: str, act: Callable[[], object]) -> None:
        if self.world_size == 1:
            return
        try:
            act()
        except RuntimeError as error:
            text = str(error).splitlines()[0][:200]
            raise StallError(
                f"rank {self.rank} lost the others while it waited for {what}. (backend: {text})"
            ) from None


def join(device: str, timeout: float) -> Ranks:
    """Initialize torch.distributed from what the launcher has set, and say where this rank stands.
    `timeout`: seconds after which a collective on the host gives up.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    kind = default_device().type if device == "auto" else device
    where = torch.device(kind, local_rank) if kind != "cpu" else torch.device("cpu")
    set_default(where)
    backend = backend_name(where)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))
    if world_size > 1:
        store = dist.PrefixStore("onefold", store)
        store = dist.PrefixStore(rendezvous(store, rank, world_size, STARTING), store)
    dist.init_process_group(
        backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}",
        store=store,
        rank=rank,
        world_size=world_size,
    )
    # Loading, sampling and saving keep rank 0 longer than the others, so the host group is patient.
    patience = timedelta(seconds=max(1800.0, timeout))
    control = dist.new_group(backend="gloo", timeout=patience) if world_size > 1 else None
    return Ranks(rank, world_size, local_rank, local_world_size, where, backend, control)


def leave() -> None:
    """Free the process groups. On clean exits only: a stuck collective would be waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rendezvous(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """A name for this start of the ranks, the same on all of them and on no other start's.
    Collective.

    torchrun may keep one store over restarts (torch 2.13 does), with addresses of a start that was
    killed. Its restart count tells starts apart on one machine only, since each agent counts its
    own. So the ranks agree:

        every rank   hello/R  = a fresh random number                    (over what an earlier start's rank R had said)
        rank 0       answer   = all numbers as it has read them     ◄─┐
        every rank   ok/R     = digest of an answer with its own number │ again, until
        rank 0       all ok/R are the digest of its answer?  no ────────┘ they are
                     final    = that digest: the name

    Raises:
        TrainError: not all ranks came within `timeout` seconds.
    """

    def read(*keys: str) -> list[str]:
        there = store.check(list(keys))
        return [value.decode() for value in store.multi_get(list(keys))] if there else []

    mine, end = secrets.token_hex(8), time.monotonic() + timeout
    hellos = [f"hello/{r}" for r in range(world_size)]
    store.set(hellos[rank], mine)
    while time.monotonic() < end:
        if rank == 0 and (said := read(*hellos)):
            answer = json.dumps(said)
            store.set("answer", answer)
        else:
            (answer,) = read("answer") or ["[]"]
        if mine in json.loads(answer)[rank : rank + 1]:
            name = hashlib.sha256(answer.encode()).hexdigest()[:16]
            store.set(f"ok/{rank}", name)
            if rank == 0 and read(*(f"ok/{r}" for r in range(world_size))) == [name] * world_size:
                store.set("final", name)
            if read("final") == [name]:
                return name
        time.sleep(INTERVAL)
    missing = [str(r) for r, key in enumerate(hellos) if rank == 0 and not store.check([key])]
    who = f"ranks {', '.join(missing)}" if missing else "some ranks"
    raise TrainError(
        f"rank {rank} waited {timeout:.0f} s for all {world_size} ranks to start; {who} did not"
        " come."
    )


@dataclass(frozen=True)
class Peer:
    """A rank as another process sees it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class PeerMonitor:
    """This rank's connection to rank 0, or rank 0's to all, and the thread that watches it.
    `gone`: the ranks that have ended without a word, in the order this rank learned of them.
    """

    def __init__(
        self, peers: list[Peer], links: dict[int, socket.socket], on_gone: Callable[[Peer], None]
    ) -> None:
        self.gone: list[Peer] = []
        self._peers, self._links, self._on_gone = peers, links, on_gone
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="onefold-peers", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, ranks: Ranks, on_gone: Callable[[Peer], None]) -> PeerMonitor | None:
        """None for a lone rank, or where not all ranks can reach rank 0. Collective.
        `on_gone`: called on the watching thread, once for each rank that has gone.
        """
        if ranks.world_size == 1:
            return None
        peers = ranks.gather(Peer(ranks.rank, socket.gethostname(), os.getpid()))
        links: dict[int, socket.socket] = {}
        with _listener(ranks.world_size) if ranks.is_first else contextlib.nullcontext() as server:
            port = server.getsockname()[1] if server is not None else 0
            port, token = ranks.from_first((port, secrets.token_bytes(16)))
            with contextlib.suppress(OSError):
                if server is not None:
                    _accept(server, token, links, ranks.world_size - 1)
                else:
                    there = (os.environ.get("MASTER_ADDR", "localhost"), port)
                    links[0] = socket.create_connection(there, timeout=SETUP)
                    links[0].sendall(token + ranks.rank.to_bytes(4))
        made = ranks.least(len(links) == (ranks.world_size - 1 if ranks.is_first else 1))
        for link in links.values():
            _keep_alive(link) if made else link.close()
        return cls(peers, links, on_gone) if made else None

    def close(self) -> None:
        """Leave with a word: the others need not report this rank as gone."""
        self._closing = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(b"bye\n")
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        for link in self._links.values():
            link.close()

    def _watch(self) -> None:
        unread = dict.fromkeys(self._links, b"")
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while selector.get_map():
                for event, _ in selector.select():
                    rank, link = event.data, self._links[event.data]
                    try:
                        received = link.recv(4096)
                    except OSError:
                        received = b""
                    *lines, unread[rank] = (unread[rank] + received).split(b"\n")
                    for line in lines:
                        if line.startswith(b"gone "):
                            self._learn(int(line.split()[1]))
                    if b"bye" in lines or not received:
                        selector.unregister(link)
                        if b"bye" not in lines:
                            self._learn(rank)

    def _learn(self, rank: int) -> None:
        """Rank `rank` has gone: rank 0 tells the others, then this rank is told."""
        peer = self._peers[rank]
        if self._closing or peer in self.gone:
            return
        self.gone.append(peer)
        for other, link in self._links.items():
            if other not in (0, rank):
                with contextlib.suppress(OSError):
                    link.sendall(f"gone {rank}\n".encode())
        self._on_gone(peer)


def _listener(ranks: int) -> socket.socket:
    here, both = ("", 0), socket.AF_INET6
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(here, family=both, dualstack_ipv6=True, backlog=ranks)
    return socket.create_server(here, backlog=ranks)


def _accept(
    server: socket.socket, token: bytes, links: dict[int, socket.socket], count: int
) -> None:
    """Accept `count` ranks into `links`; who does not know `token` is a stranger.
    Raises OSError if they did not come within `SETUP` seconds.
    """
    server.settimeout(SETUP)
    while len(links) < count:
        link, _ = server.accept()
        link.settimeout(SETUP)
        said = link.recv(len(token) + 4, socket.MSG_WAITALL)
        if said.startswith(token):
            links[int.from_bytes(said[len(token) :])] = link
        else:
            link.close()


def _keep_alive(link: socket.socket) -> None:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
