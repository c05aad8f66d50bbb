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
what TCP keeps in it, so that nothing is dropped. `netem` could do rate and delay alone, but not
every kernel is built with it: it is asked for only where a delay is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, CannotGoOn
from benchmarks.launch import environment

HOSTS = 2
INTERFACE = "wire"
PORT = 29400
"""Of the plain stream: a new host has every port free."""
ADDRESS = "WIRES_ADDRESS"
"""The environment variable that tells a rank its own host's address."""
LARGEST_PACKET = 68 * 1024
"""Bytes of what the kernel hands to a device at once, headers of its frames included: a smaller bucket would cut it up."""
QUEUE = 64 << 20
"""Bytes that wait at the link before one is dropped."""


TOOLS = {
    name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    for name in ("ip", "tc", "unshare", "nsenter")
}
"""Where the tools are, None where one is not. Only root's PATH has the folders of the first two."""


class HostError(CannotGoOn):
    """Hosts or links cannot be made here; the message says why and what would help."""


@dataclass(frozen=True)
class Link:
    """`rate` in bits a second, each way; `delay_ms` one way, beside what the rate takes."""

    rate: float
    delay_ms: float = 0.0

    @property
    def title(self) -> str:
        units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
        unit, size = next((u, s) for u, s in units if self.rate >= s)
        delay = f", {self.delay_ms:g} ms each way" if self.delay_ms else ""
        return f"{self.rate / size:g} {unit}{delay}"


def tool(name: str) -> str:
    """The path of a tool.

    Raises:
        HostError: it is not there.
    """
    found = TOOLS[name]
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


def _shape(host: Host, link: Link) -> None:
    """Hold what the host sends to the link's rate, and delay it.

    Raises:
        HostError: this kernel cannot.
    """
    burst = max(LARGEST_PACKET, int(link.rate / 8 / 1000))
    tbf = ["tbf", "rate", f"{link.rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE)]
    root = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:"]
    if link.delay_ms:
        try:
            host.set(*root, "netem", "delay", f"{link.delay_ms:g}ms", "limit", "100000")
        except HostError as error:
            raise HostError(
                f"this kernel gives a link no delay ({error}): it lacks netem"
                " (CONFIG_NET_SCH_NETEM, `modprobe sch_netem`). Leave --delay out to measure the"
                " rate alone."
            ) from None
        root = ["tc", "qdisc", "add", "dev", INTERFACE, "parent", "1:1", "handle", "10:"]
    try:
        host.set(*root, *tbf)
    except HostError as error:
        raise HostError(
            f"this kernel limits no rate ({error}): it lacks tbf (CONFIG_NET_SCH_TBF, `modprobe"
            " sch_tbf`)."
        ) from None


@contextlib.contextmanager
def joined(link: Link) -> Iterator[tuple[Host, Host]]:
    """Two hosts and the link between them; gone on leaving.

    Raises:
        HostError: a tool, a permission or a part of the kernel is missing.
    """
    for name in TOOLS:
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
            _shape(host, link)
            for device in ("lo", INTERFACE):
                host.set("ip", "link", "set", device, "up")
        yield first, second


def permitted(link: Link) -> str | None:
    """Why two hosts with such a link cannot be had here, None if they can. Tries it."""
    try:
        with joined(link):
            return None
    except HostError as error:
        return str(error)


# -- one plain stream over the link, for the rate that it really carries --------------------------------


def measured(link: Link, seconds: float = 0.5) -> dict[str, Any]:
    """What one plain stream gets from the link: payload "bit_s" a second, and "round_trip_ms" of
    its first words.

    Raises:
        HostError: there can be no hosts, or the stream did not get through.
    """
    script = [sys.executable, "-m", "benchmarks.hosts"]
    how: dict[str, Any] = {"folder": ROOT, "environment": environment(1)}
    how |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with joined(link) as (first, second):
        receiver = first.start([*script, "receive"], **how)
        assert receiver.stdout is not None
        if receiver.stdout.readline() != b"ready\n":
            raise HostError("the plain stream that measures the link did not start.")
        sender = second.start([*script, "send", first.address, str(seconds)], **how)
        try:
            told = [process.communicate(timeout=30 + seconds)[0] for process in (sender, receiver)]
            return {"bit_s": float(told[1]), "round_trip_ms": float(told[0])}
        except (subprocess.TimeoutExpired, ValueError):
            raise HostError(
                "the plain stream that measures the link did not get through."
            ) from None


def receive() -> None:
    """Prints payload bits a second between the first block and the last."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            room = memoryview(bytearray(1 << 20))
            for _ in range(5):
                connection.sendall(connection.recv(1))
            connection.recv_into(room)
            begun, got = time.perf_counter(), 0
            while taken := connection.recv_into(room):
                got += taken
                ended = time.perf_counter()
    print(8 * got / (ended - begun) if got else 0.0)


def send(address: str, seconds: float) -> None:
    """Prints the milliseconds of the quickest round trip of one byte."""
    with socket.create_connection((address, PORT)) as connection:
        trips = []
        for _ in range(5):
            begun = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - begun)
        print(1000 * min(trips))
        block, end = bytes(1 << 18), time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], float(sys.argv[3]))
