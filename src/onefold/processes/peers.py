"""Notify every rank within a second if another rank's process has ended, also ranks that compute
and wait for nobody.

    rank 1 ──┐                       rank 1 ◄─┐ 2
    rank 2 ──┼── rank 0              rank 2   ╳─── rank 0      the system closes a dead process's connections;
    rank 3 ──┘                       rank 3 ◄─┘                rank 0 tells the others

A closed connection proves that the process has ended. A missing heartbeat would not: a rank may be
busy for a minute. A machine that loses power does not close its connections, and TCP's keep-alive
detects that after 8 s. Nothing is sent as long as all ranks run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from onefold.processes.host import LOOPBACK
from onefold.processes.ranks import Ranks

#: Seconds to connect the ranks to rank 0.
SETUP = 15.0
#: What a rank says that leaves in order. Rank 0 tells the others the number of one that has gone, in
#: as many bytes.
BYE = b"\xff" * 4
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}


@dataclass(frozen=True)
class Peer:
    """A rank as another process sees it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class PeerMonitor:
    """This rank's connection to rank 0 (on rank 0: its connections to all), and the thread that
    watches it. `gone`: the ranks that have ended without a goodbye message, in the order in which
    this rank learned of them.
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
        """Connect the ranks. Returns None if there is one rank only, or if not all ranks can reach
        rank 0. Collective. `on_gone`: called on the watching thread, once for each rank that has
        ended.
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
        """Say goodbye and disconnect: the others then do not report this rank as gone."""
        self._closing = True
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.sendall(BYE)
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        for link in self._links.values():
            link.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while selector.get_map():
                for event, _ in selector.select():
                    link, said = self._links[event.data], b""
                    with contextlib.suppress(OSError):
                        said = link.recv(4, socket.MSG_WAITALL)
                    closed = len(said) < 4
                    if closed or said == BYE:
                        selector.unregister(link)
                    if said != BYE:
                        self._learn(event.data if closed else int.from_bytes(said))

    def _learn(self, rank: int) -> None:
        """Handle the end of rank `rank`: rank 0 tells the others, then `on_gone` is called."""
        peer = self._peers[rank]
        if self._closing or peer in self.gone:
            return
        self.gone.append(peer)
        for other, link in self._links.items():
            if other not in (0, rank):
                with contextlib.suppress(OSError):
                    link.sendall(rank.to_bytes(4))
        self._on_gone(peer)


def _listener(ranks: int) -> socket.socket:
    alone = os.environ.get("MASTER_ADDR") == LOOPBACK
    here, both = (LOOPBACK if alone else "", 0), socket.AF_INET6
    if not alone and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(here, family=both, dualstack_ipv6=True, backlog=ranks)
    return socket.create_server(here, backlog=ranks)


def _accept(
    server: socket.socket, token: bytes, links: dict[int, socket.socket], count: int
) -> None:
    """Accept connections of `count` ranks into `links`. Connections that do not send `token` are
    closed. Raises OSError if the ranks do not connect within `SETUP` seconds.
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
