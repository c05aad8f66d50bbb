"""What the disk gives just now, and what of a run's files lies in the page cache.

`python -m benchmarks.offload.disk FOLDER MIB CHUNK` is the process that copies: `Copier` starts it,
and asks it for a copy between steps. It is a process of its own so that its buffers are nobody's
resident memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers import launch

MIB = 1 << 20


class Copier:
    """Direct sequential copies in another process.

    A copy reads four files and writes three of them, a chunk of each at a time: the pattern of an
    optimizer's step with two moments.
    """

    def __init__(self, folder: Path, mib: int, chunk_mib: int) -> None:
        """Starts the process and waits until its files are there.

        Args:
            mib: of each of the four files. chunk_mib: read or written at a time.

        Raises:
            RuntimeError: the process ended.
        """
        command = [
            sys.executable,
            "-m",
            "benchmarks.offload.disk",
            str(folder),
            str(mib),
            str(chunk_mib),
        ]
        self._process = subprocess.Popen(
            command,
            cwd=launch.ROOT,
            env=launch.environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def copy(self) -> dict[str, float]:
        """Bytes a second, read and written ones counted alike: "copy", one thread; "two", one that
        reads and one that writes.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("copy\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process that copies ended with status {self._process.wait()}; its words stand"
                " above."
            )
        answer: dict[str, float] = json.loads(line)
        return answer


def serve(folder: Path, mib: int, chunk_mib: int) -> None:
    """Copy whenever a line comes in; end with standard input, that is with whoever started this."""
    from benchmarks.nvme import READS, WRITES, Plain

    plain = Plain(folder, mib * MIB, chunk_mib * MIB)
    _fill(plain)
    moved = (READS + WRITES) * plain.nbytes
    print("{}", flush=True)
    for _ in sys.stdin:
        rates = {}
        for name, way in (("copy", plain.copy), ("two", plain.copy_two)):
            begun = time.perf_counter()
            way()
            rates[name] = moved / (time.perf_counter() - begun)
        print(json.dumps(rates), flush=True)


def _fill(plain: Any) -> None:
    """Random bytes into the files: some disks have an easy way with zeros and repetitions."""
    varied = memoryview(plain.memory)[: plain.chunk]
    for at in range(0, plain.nbytes, plain.chunk):
        for file in plain.files:
            varied[:] = os.urandom(plain.chunk)
            os.pwrite(file, varied, at)


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
    """Bytes of all files that this machine holds in its page cache; shared memory, which is counted
    among them, is not.
    """
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return 1024 * (int(found["Cached"]) - int(found["Shmem"]))


def files_of(folders: Iterable[Path]) -> list[Path]:
    """The files in these folders."""
    return [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
