"""Bytes of a host and of a rank, from four places that know nothing of each other.

| where | what it counts | headers |
|---|---|---|
| interface | what the host gave its end of the link | one a packet of up to 64 KiB, before it is cut into frames |
| queue | the same as the rate is charged for it | one a frame |
| sockets | payload of a rank's connections, by where the other end is | none |
| ledger | what Onefold says that a rank sent, by the ranks of the move's group | none, nor gloo's |

Interface and queue see acknowledgements and the launchers' few words too. All count from the
beginning: take differences.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import probes
from benchmarks.wires.hosts import INTERFACE, tool


def interface_bytes() -> int:
    """Bytes that this host has sent over the link. (/proc, since /sys would show the network that
    it was mounted in.)
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == INTERFACE:
            return int(fields.split()[8])
    raise RuntimeError(
        f"this host has no interface {INTERFACE!r}: was this started by benchmarks.wires?"
    )


def queue_counters() -> dict[str, int]:
    """Bytes with every frame's headers and packets dropped, of the queue that the link's rate is
    made of.
    """
    told = subprocess.run(
        [tool("tc"), "-s", "-j", "qdisc", "show", "dev", INTERFACE],
        capture_output=True,
        text=True,
        check=True,
    )
    (root,) = [found for found in json.loads(told.stdout) if found.get("root")]
    return {"queue_bytes": root["bytes"], "dropped": root["drops"]}


def host_counters() -> dict[str, int]:
    """All that is a host's and not a rank's."""
    return {"interface_bytes": interface_bytes(), **queue_counters()}


def socket_counters(own_address: str) -> dict[str, int | None]:
    """Payload that this process sent to ranks of its own host and to others'; None where the kernel
    does not say.
    """
    sent = probes.socket_bytes_by_peer()
    if sent is None:
        return {"inside_bytes": None, "between_bytes": None}
    inside = sum(
        count
        for address, count in sent.items()
        if address == own_address or address.startswith(("127.", "::1"))
    )
    return {"inside_bytes": inside, "between_bytes": sum(sent.values()) - inside}


class LedgerCounter:
    """What Onefold's ledger entered since this was made, inside the host and between hosts."""

    def __init__(self, traffic: Any, ranks_a_host: int, rank: int) -> None:
        self._traffic, self._ranks_a_host, self._rank = traffic, ranks_a_host, rank
        traffic.reset()
        traffic.wanted = lambda: True

    def bytes(self) -> dict[str, int]:
        """`ledger_inside`, `ledger_between`, and `control_bytes`, which the ledger keeps apart.

        A move treats the other ranks of its group alike, so what it sent is divided by where they
        are.

        Raises:
            RuntimeError: more moves than the ledger keeps.
        """
        between = 0.0
        for event in self._traffic.events:
            others = [rank for rank in read_ranks(event.group) if rank != self._rank]
            away = [
                rank
                for rank in others
                if rank // self._ranks_a_host != self._rank // self._ranks_a_host
            ]
            between += event.nbytes * len(away) / max(1, len(others))
        total = self._traffic.total()
        kept = sum(event.nbytes for event in self._traffic.events)
        if kept != total:
            raise RuntimeError(
                f"the ledger kept moves of {kept:,} bytes of {total:,}: measure fewer steps at a"
                " time."
            )
        return {
            "ledger_inside": total - round(between),
            "ledger_between": round(between),
            "control_bytes": self._traffic.control_bytes,
        }


def ledger_counter(trainer: Any, ranks_a_host: int, rank: int) -> Callable[[], dict[str, int]]:
    """How to ask a trainer's ledger for what it enters from now on; a trainer without one has
    nothing to say.
    """
    onefold = getattr(trainer, "onefold", None)
    if onefold is None:
        return dict
    return LedgerCounter(onefold.engine_of(trainer.model).traffic, ranks_a_host, rank).bytes


def read_ranks(format_ranks: str) -> list[int]:
    """The ranks of "0-3", "0,2" or "0-1,4": the way groups are named in the ledger."""
    out: list[int] = []
    for part in format_ranks.split(","):
        first, _, last = part.partition("-")
        out += range(int(first), int(last or first) + 1)
    return out
