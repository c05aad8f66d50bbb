"""For the tests of the NVMe store: tensors on pages, pages in the cache, programs of their own,
what the dead leave.
"""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch
from benchmarks.probes import cached_bytes

from onefold.offload.nvme import PAGE, Nvme, page_buffer
from onefold.offload.nvme.files import DATA, LOCK, MARK

SRC = Path(__file__).parents[2] / "src"


def on_pages(values: torch.Tensor) -> torch.Tensor:
    """The same values in memory that the disk can work on."""
    out = page_buffer(max(1, values.numel() * values.element_size())).view(values.dtype)[
        : values.numel()
    ]
    return out.copy_(values)


def blank(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return page_buffer(max(1, numel * dtype.itemsize)).view(dtype)[:numel]


def pages_in_cache(path: Path) -> int:
    """Pages of a file that the system holds in memory."""
    return cached_bytes([path]) // mmap.PAGESIZE


def lives_in_memory(folder: Path) -> bool:
    """Whether files here have no other place than the page cache, as on tmpfs."""
    path = folder / "probe"
    path.write_bytes(bytes(PAGE))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    held = pages_in_cache(path)
    path.unlink()
    return held > 0


def data_files(store: Nvme) -> list[Path]:
    return [folder / DATA for folder in store.folders]


def left_behind(
    parent: Path, mark: bytes = MARK + b"\n", age: float = 0.0, data: bytes | None = bytes(PAGE)
) -> Path:
    """A folder as a killed process leaves it."""
    folder = parent / f"onefold-dead-4711-{secrets.token_hex(4)}"
    folder.mkdir()
    (folder / LOCK).write_bytes(mark)
    if data is not None:
        (folder / DATA).write_bytes(data)
    then = time.time() - age
    for path in (folder / LOCK, folder):
        os.utime(path, (then, then))
    return folder


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python program of its own; `arguments` are its sys.argv[1:]. It reads and writes text."""
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
