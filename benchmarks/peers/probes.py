"""Resident memory and bytes on the wire of this process, as the kernel counts them: no library
reports on itself.

Linux only; elsewhere a probe answers None, and the table shows a dash.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from pathlib import Path

_STATUS = Path("/proc/self/status")


def _status_mib(field: str) -> float | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return None


def resident_mib() -> float | None:
    """Resident set now, MiB."""
    return _status_mib("VmRSS")


def peak_resident_mib() -> float | None:
    """Highest resident set since `reset_peak`, or since the process started where a reset is not
    permitted, MiB.
    """
    return _status_mib("VmHWM")


def reset_peak() -> bool:
    """Bring the peak down to the resident set of now; False where the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back_free_heap() -> None:
    """Ask the C library to return what it has of freed memory: nobody's state, though it would
    count as resident.
    """
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def socket_bytes_by_peer() -> dict[str, int] | None:
    """Payload bytes that the TCP sockets of this process have sent so far, by the address of the
    other end.

    Read from the kernel's `struct tcp_info` of each open socket (tcpi_bytes_sent -
    tcpi_bytes_retrans, Linux 4.19), so headers, retransmissions and other traffic of the machine do
    not disturb it. None where the kernel does not say.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    found: dict[str, int] = {}
    for name in names:
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as probe:
                if probe.type != socket.SOCK_STREAM or probe.family not in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    continue
                info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                peer = str(probe.getpeername()[0]).removeprefix("::ffff:")
        except OSError:  # closed meanwhile, or not a connected socket
            continue
        except AttributeError:  # no TCP_INFO on this system
            return None
        if len(info) < 216:
            return None
        sent, again = struct.unpack_from("=QQ", info, 200)
        found[peer] = found.get(peer, 0) + sent - again
    return found


def socket_bytes_sent() -> int | None:
    """The same to all others together."""
    found = socket_bytes_by_peer()
    return None if found is None else sum(found.values())


def loopback_bytes_sent() -> int | None:
    """Bytes that the whole machine has sent over its loopback interface so far, headers
    included.
    """
    try:
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == "lo":
                return int(fields.split()[8])
    except OSError:
        pass
    return None


def difference(after: float | None, before: float | None) -> float | None:
    """`after - before`, None where either is unknown."""
    return None if after is None or before is None else after - before
