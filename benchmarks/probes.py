"""Memory, files and bytes on the wire as the kernel counts them: no library reports on itself.

Linux only; elsewhere a probe of this process answers None, and the table shows a dash.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

# -- memory ----------------------------------------------------------------------------------------


def status_bytes(field: str, process: int | str = "self") -> int | None:
    """A field of /proc/PROCESS/status in bytes; None where there is none."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(found[0]) if found else None


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def resident_mib() -> float | None:
    """Resident set now, MiB."""
    return _mib(status_bytes("VmRSS"))


def peak_resident_mib() -> float | None:
    """Highest resident set since `reset_peak` or, where that is not permitted, ever, MiB."""
    return _mib(status_bytes("VmHWM"))


def reset_peak() -> bool:
    """Bring the peak down to the resident set of now; False where the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back_free_heap() -> None:
    """Ask the C library to return freed memory, which would count as resident."""
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def difference(after: float | None, before: float | None) -> float | None:
    """`after - before`, None where either is unknown."""
    return None if after is None or before is None else after - before


# -- files -----------------------------------------------------------------------------------------


def moved_bytes(process: int | str = "self") -> dict[str, int]:
    """Bytes so far through system calls ("_calls") and of the disk; empty where nobody counts."""
    names = {"rchar": "read_calls", "wchar": "write_calls"}
    names |= {"read_bytes": "read_disk", "write_bytes": "write_disk"}
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
    except (OSError, ValueError):
        return {}
    return {ours: int(found[theirs]) for theirs, ours in names.items()}


def moved_since(before: dict[str, int]) -> dict[str, int]:
    """What this process has moved since `moved_bytes` said so."""
    return {name: value - before[name] for name, value in moved_bytes().items() if name in before}


def cached_bytes(paths: Iterable[Path]) -> int:
    """Bytes of these files that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping,
        ):
            # A copy-on-write mapping, since this wants one that can be written to
            first = ctypes.c_char.from_buffer(mapping)
            failed = libc.mincore(ctypes.addressof(first), size, found)
            del first  # the mapping cannot be closed while anybody points into it
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore does not say what of {path} lies in memory")
        total += mmap.PAGESIZE * sum(byte & 1 for byte in found.raw)
    return total


def page_cache_bytes() -> int:
    """Bytes of files in the machine's page cache, without shared memory."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return 1024 * (int(found["Cached"]) - int(found["Shmem"]))


def file_system(folder: Path) -> str:
    """The type of the file system that the folder lies on, as the kernel calls it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    here = folder.resolve()
    around = [m for m in mounts if here.is_relative_to(m[1])]
    return max(around, key=lambda m: len(m[1]))[2] if around else "unknown"


# -- wire ------------------------------------------------------------------------------------------


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
                inet = probe.family in (socket.AF_INET, socket.AF_INET6)
                if probe.type != socket.SOCK_STREAM or not inet:
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


def interface_bytes_sent(interface: str = "lo") -> int | None:
    """Bytes sent over an interface, headers included. (/sys would show another network's.)"""
    try:
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == interface:
                return int(fields.split()[8])
    except OSError:
        pass
    return None
