"""What the disk gives just now.

`python -m benchmarks.offload.disk FOLDER MIB CHUNK` is the process that copies: `Copier` starts it,
and asks it for a copy between steps. It is a process of its own so that its buffers are nobody's
resident memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.launch import environment

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
        work = ["-m", "benchmarks.offload.disk", str(folder), str(mib), str(chunk_mib)]
        self._process = subprocess.Popen(
            [sys.executable, *work],
            cwd=ROOT,
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def copy(self) -> dict[str, float]:
        """Bytes a second, read and written: "copy" by one thread, "two" by two."""
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


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
