"""Which rank has gone, told to every rank within a second, also to those that compute and wait for
nobody.

    rank 0 ── rank 1 ── rank 2 ── rank 3 ── rank 0          one connection to the rank before, one to the rank after
                            ╳
             "2 has gone" ◄─┘ └─► "2 has gone"              the system closes a dead process's connections; its neighbours pass it on

A closed connection is evidence, where a missing heartbeat is a guess: a rank may be busy for a
minute without being dead. A machine that loses its power closes nothing; TCP's keep-alive finds
that out in 8 s. Nothing is sent while all is well.

A rank that learns of it in a collective gets a `StallError` there; it is given `PATIENCE` to say
so. One that computes is ended by the thread that watches. Either way no rank is left behind, and
torchrun can start those that remain.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from onefold.train.ranks import Ranks

#: Seconds that a rank gets to end by itself after another has gone: a collective's error waits 3 s
#: for the others' notes.
PATIENCE = 5.0
#: Seconds to make the two connections.
SETUP = 15.0
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}


@dataclass(frozen=True)
class Peer:
    """A rank as another process sees it."""

    rank: int
    host: str
    pid: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Neighbours:
    """This rank's two connections.

    Attributes:
        gone: the ranks that have ended without a word, in the order this rank learned of them.
    """

    def __init__(
        self,
        peers: list[Peer],
        rank: int,
        links: list[tuple[int, socket.socket]],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.gone: list[Peer] = []
        self._peers, self._rank, self._links, self._on_gone = (
            peers,
            rank,
            dict(enumerate(links)),
            on_gone,
        )
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="onefold-neighbours", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, ranks: Ranks, on_gone: Callable[[Peer], None]) -> Neighbours | None:
        """Join the ring; None for a lone rank, or where the ranks cannot reach each other.
        Collective.

        Args:
            on_gone: called on the watching thread, once for each rank that has gone.
        """
        if ranks.world_size == 1:
            return None
        token = ranks.from_first(secrets.token_bytes(16))
        others = [
            host for host in ranks.gather(socket.gethostname()) if host != socket.gethostname()
        ]
        with _listener() as listener:
            address = _own_address(others)
            peers = ranks.gather(
                Peer(
                    ranks.rank,
                    socket.gethostname(),
                    os.getpid(),
                    address,
                    listener.getsockname()[1],
                )
            )
            links: list[tuple[int, socket.socket]] = []
            with contextlib.suppress(OSError):
                links = _join(listener, peers, ranks.rank, token)
        (made,) = ranks.least(float(len(links)))
        if made < 2:
            for _, link in links:
                link.close()
            return None
        return cls(peers, ranks.rank, links, on_gone)

    def close(self) -> None:
        """Leave the ring with a word: this rank ends as it should, or because of another that the
        others know of already.
        """
        self._closing = True
        for _, link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.sendall(b"bye\n")
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        for _, link in list(self._links.values()):
            link.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, (_, link) in self._links.items():
                selector.register(link, selectors.EVENT_READ, number)
            rests = dict.fromkeys(self._links, b"")
            open_links = set(self._links)
            while open_links:
                for event, _ in selector.select():
                    key: int = event.data
                    peer, link = self._links[key]
                    try:
                        received = link.recv(4096)
                    except OSError:
                        received = b""
                    *lines, rests[key] = (rests[key] + received).split(b"\n")
                    over = not received or b"bye" in lines
                    if over:
                        selector.unregister(link)
                        open_links.discard(key)
                    for line in lines:
                        if line.startswith(b"gone "):
                            self._learn(int(line.split()[1]), key)
                    if over and b"bye" not in lines:
                        self._learn(peer, key)

    def _learn(self, rank: int, heard_from: int) -> None:
        """Rank `rank` has gone: pass it on, then say so here."""
        if self._closing or rank == self._rank or any(p.rank == rank for p in self.gone):
            return
        self.gone.append(self._peers[rank])
        for key, (_, link) in self._links.items():
            if key != heard_from:
                with contextlib.suppress(OSError):
                    link.sendall(f"gone {rank}\n".encode())
        self._on_gone(self._peers[rank])


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _own_address(others: list[str]) -> str:
    """The address by which the ranks on the other machines (or, if there are none, this one) reach
    this machine. Nothing is sent.

    Where MASTER_ADDR is this machine, its name may lead to an address that is valid here only; then
    the way to another machine tells.
    """
    found = "127.0.0.1"
    for target in [os.environ.get("MASTER_ADDR", "localhost"), *others[:1]]:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, where = socket.getaddrinfo(
                target, 9, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                found = str(probe.getsockname()[0])
            if not others or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                break
    return found


def _join(
    listener: socket.socket, peers: list[Peer], rank: int, token: bytes
) -> list[tuple[int, socket.socket]]:
    """Connect to the rank after this one, accept the rank before. Who does not know `token` is a
    stranger.

    Raises:
        OSError: it did not work within `SETUP` seconds.
    """
    after = peers[(rank + 1) % len(peers)]
    outgoing = socket.create_connection((after.address, after.port), timeout=SETUP)
    try:
        outgoing.sendall(token)
        listener.settimeout(SETUP)
        while True:
            incoming, _ = listener.accept()
            incoming.settimeout(SETUP)
            if incoming.recv(len(token), socket.MSG_WAITALL) == token:
                break
            incoming.close()
    except OSError:
        outgoing.close()
        raise
    for link in (outgoing, incoming):
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return [(after.rank, outgoing), ((rank - 1) % len(peers), incoming)]
