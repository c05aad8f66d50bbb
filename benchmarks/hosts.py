"""Two hosts on this machine, joined by one link of a given rate.

    10.77.0.1                                          10.77.0.2
    +-----------------------+                          +-----------------------+
    |  2 ranks       [wire] |== queue, rate -->        | [wire]       2 ranks  |
    |                       |        <-- rate, queue ==|                       |
    +-----------------------+                          +-----------------------+

[Note: hosts that cannot outlive us] A host is a set of namespaces without a name, held by its first
process, `cat`, which reads a pipe that only this process holds open. When we end, however we end,
the pipe closes and `cat` with it; and with the first process of a process namespace the kernel ends
all others in it and takes the network namespace, the devices and their queues apart. So nothing is
left of a run that was killed, and there is nothing to recognise by name and remove. (`ip netns add`
makes a name under /run/netns that stays behind SIGKILL.)

[Note: what limits the rate] `tbf` on either end's sending side, since every kernel that shapes at
all has it. It charges a packet that the network card would cut into frames (TSO) with the headers
of all its frames, so 100 Mbit/s carry some 95.6 of payload at 1,500 bytes a frame, as a real link
does. Its bucket holds a millisecond's worth, at least one such packet; the queue is longer than
what TCP keeps in it, so that nothing is dropped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import CannotGoOn

HOSTS = 2
INTERFACE = "wire"
ADDRESS = "WIRES_ADDRESS"
"""The environment variable that tells a rank its own host's address."""
LARGEST_PACKET = 68 * 1024
"""Bytes of what the kernel hands to a device at once, headers of its frames included: a smaller bucket would cut it up."""
QUEUE = 64 << 20
"""Bytes that wait at the link before one is dropped."""


class HostError(CannotGoOn):
    """Hosts or links cannot be made here; the message says why and what would help."""


def said(rate: float) -> str:
    """Bits a second in words."""
    unit, size = next(u for u in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("bit/s", 1.0)) if rate >= u[1])
    return f"{rate / size:g} {unit}"


def tool(name: str) -> str:
    """The path of a tool; only root's PATH has the folders of some."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise HostError(
            f"{name} cannot be found: install iproute2 (ip, tc) and util-linux (unshare, nsenter);"
            " this needs Linux."
        )
    return found


class Host:
    """One host: the process whose namespaces it is, and the address where others reach it."""

    def __init__(self, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number + 1}"
        alone = ["--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
        command = [tool("unshare"), *alone, "sh", "-c", "echo up; exec cat"]
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._holder.pid
        self._started: list[subprocess.Popen[bytes]] = []
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != b"up\n":
            said = self._holder.stderr.read().decode(errors="replace").strip()
            self.close()
            raise HostError(
                f"a host of its own is not permitted here ({said}): start this as root or under"
                " `unshare --map-root-user`, in a container with the capabilities SYS_ADMIN and"
                " NET_ADMIN."
            )

    @property
    def namespace(self) -> str:
        """What tells this host's network from others on the machine: "net:[4026532600]"."""
        return os.readlink(f"/proc/{self.pid}/ns/net")

    def set(self, *command: str) -> str:
        """Run one command of the network's configuration; its output.

        Raises:
            HostError: it failed.
        """
        done = subprocess.run(
            [tool("nsenter"), f"--net=/proc/{self.pid}/ns/net", tool(command[0]), *command[1:]],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise HostError(f"`{' '.join(command)}` failed: {said}")
        return done.stdout

    def start(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        **streams: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host, in `folder`. It ends with the host at the latest."""
        ours = f"/proc/{self.pid}/ns"
        enter = [
            tool("nsenter"),
            f"--net={ours}/net",
            f"--mount={ours}/mnt",
            f"--pid={ours}/pid_for_children",
            "env",
            f"--chdir={folder}",
        ]
        self._started.append(
            subprocess.Popen(
                [*enter, *command], env=dict(environment), start_new_session=True, **streams
            )
        )
        return self._started[-1]

    def close(self) -> None:
        """End every process of the host; its devices and queues go with it."""
        with contextlib.suppress(ProcessLookupError):
            # --kill-child: the first process goes too, and the kernel ends all others
            os.killpg(self.pid, signal.SIGKILL)
        for process in [self._holder, *self._started]:
            process.wait()
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()


def _shape(host: Host, rate: float) -> None:
    """Hold what the host sends to `rate` bits a second.

    Raises:
        HostError: this kernel cannot.
    """
    burst = max(LARGEST_PACKET, int(rate / 8 / 1000))
    tbf = ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE)]
    try:
        host.set("tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *tbf)
    except HostError as error:
        raise HostError(
            f"this kernel limits no rate ({error}): it lacks tbf (CONFIG_NET_SCH_TBF, `modprobe"
            " sch_tbf`)."
        ) from None


@contextlib.contextmanager
def joined(rate: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts and the link between them; gone on leaving.

    Raises:
        HostError: a tool, a permission or a part of the kernel is missing.
    """
    for name in ("ip", "tc", "unshare", "nsenter"):
        tool(name)
    with contextlib.ExitStack() as stack:
        pair = []
        for number in (0, 1):
            pair.append(Host(number))
            stack.callback(pair[-1].close)
        first, second = pair
        ends = f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {second.pid}"
        first.set(*ends.split())
        for host in pair:
            # No IPv6 announcements among the counted bytes
            host.set("ip", "link", "set", INTERFACE, "addrgenmode", "none")
            host.set("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _shape(host, rate)
            for device in ("lo", INTERFACE):
                host.set("ip", "link", "set", device, "up")
        yield first, second


def permitted(rate: float) -> str | None:
    """Why two hosts with such a link cannot be had here, None if they can. Tries it."""
    try:
        with joined(rate):
            return None
    except HostError as error:
        return str(error)
