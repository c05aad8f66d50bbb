"""Safetensors files that are read in ranges and check themselves.

    |8 bytes: n|n bytes: JSON header, padded with spaces|data of the 1st tensor|data of the 2nd|...|crc32|
                                                        ^ data_start, a multiple of 8

The format's own library needs all tensors in memory to write a file, and reads without checksums.
This module writes a file tensor by tensor, and reads ranges directly into their final memory. Every
safetensors reader can open the files.

The last tensor, `crc32`, has a checksum for each `BLOCK` bytes of each tensor before it. A read is
widened to whole blocks and compared where it happens, so a rank of another number of ranks checks
what it reads, and reads at most two blocks more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.progress import moved
from onefold.reading import open_regular, parse_json

#: Bytes per system call: small enough that checksum and copy find them in the CPU's cache. A multiple of BLOCK.
CHUNK = 4 << 20
#: Bytes of a tensor that share a checksum.
BLOCK = 256 << 10
#: Bytes after which the kernel is told to start writing to the disk.
AHEAD = 16 << 20
#: Bytes after which the disk is waited for: no file leaves more than these to its last flush, during
#: which the rank gives no sign of progress.
FLUSH = 1 << 30
#: The largest header that the format's own library accepts, in bytes.
LARGEST_HEADER = 100_000_000
#: The tensor with the checksums.
SUMS = "crc32"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to write. `parts`: returns it from element `first` on in flattened parts, in order, on
    any device.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[torch.Tensor]]
    first: int = 0

    @property
    def nbytes(self) -> int:
        return numel_of(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorSpan:
    """The position of a tensor in a file: bytes `[begin, end)` from the start of the file. `sums`: the
    number of its first checksum.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    sums: int = 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, readable and writable."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def numel_of(shape: Sequence[int]) -> int:
    return prod(shape)


def header_of(
    planned: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorSpan]]:
    """Return the header of a file with these tensors in this order, and each tensor's position.
    Raises: CheckpointError: the format has no name for a dtype, or a key occurs twice.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape in planned:
        if dtype not in CODES:
            raise CheckpointError(
                f"tensor {key!r} has dtype {dtype}, which safetensors files cannot hold; known are"
                f" {', '.join(DTYPES)}."
            )
        if key in table:
            raise CheckpointError(f"two tensors are called {key!r}.")
        end = at + numel_of(shape) * dtype.itemsize
        table[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, parse_header(head)


def parse_header(head: bytes) -> dict[str, TensorSpan]:
    """Return each tensor's position, given a file's header. Raises: ValueError: it is damaged."""
    try:
        table = parse_json(head[8:])
        table.pop("__metadata__", None)
        spans, sums = {}, 0
        for key, t in table.items():
            sizes = [*t["shape"], *t["data_offsets"]]
            if len(sizes) > 66 or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
                raise ValueError(f"tensor {key[:60]!r} has sizes that no tensor has")
            begin, end = (len(head) + t["data_offsets"][i] for i in (0, 1))
            spans[key] = TensorSpan(DTYPES[t["dtype"]], tuple(t["shape"]), begin, end, sums)
            sums += _blocks(end - begin)
        return spans
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def write_tensors(path: Path, planned: Sequence[Planned], shared: bool = False) -> str:
    """Write a new file, tensor by tensor. Returns after the file has been flushed to disk: its digest
    (see `TensorFile`).
    `shared`: of an export, without checksums, of which each rank writes its parts and all the header;
    transformers 4 asks for the format.
    Raises: OSError: from the system (no space, no permission, the file exists).
    """
    sums = np.zeros(sum(_blocks(p.nbytes) for p in planned), "<u4")
    tensors = [(p.key, p.dtype, p.shape) for p in planned]
    last = [] if shared else [(SUMS, torch.uint32, sums.shape)]
    head, spans = header_of([*tensors, *last], {"format": "pt"} if shared else {})
    begun = flushed = 0
    how = os.O_WRONLY | os.O_CREAT | (0 if shared else os.O_EXCL)
    with open(os.open(path, how, 0o666), "wb", buffering=0) as file:
        _put(file, head)
        for p in planned:
            span, at = spans[p.key], p.first * p.dtype.itemsize
            file.seek(span.begin + at)
            for part in p.parts():
                data = bytes_of(part.to("cpu", p.dtype).contiguous())
                while data:
                    some = data[: CHUNK - at % BLOCK]
                    left = b"" if shared else some
                    while left:
                        number, room = span.sums + at // BLOCK, BLOCK - at % BLOCK
                        sums[number] = crc32(left[:room], int(sums[number]))
                        at, left = at + len(left[:room]), left[room:]
                    _put(file, some)
                    data = data[len(some) :]
                    moved()
                end = file.tell()
                if end - begun >= AHEAD and hasattr(os, "posix_fadvise"):
                    # On DONTNEED, Linux starts to write dirty pages: the disk then works while the
                    # next bytes are checksummed.
                    os.posix_fadvise(file.fileno(), begun, end - begun, os.POSIX_FADV_DONTNEED)
                    begun = end
                if end - flushed >= FLUSH:
                    os.fsync(file.fileno())
                    flushed = end
            if at != p.nbytes and not shared:
                raise AssertionError(f"{p.key}: planned {p.nbytes} bytes, given {at}")
        _put(file, b"" if shared else sums.tobytes())
        os.fsync(file.fileno())
        return _digest(head, sums)


def _put(file: Any, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file.fileno(), left) :]


def _digest(head: bytes, sums: Any) -> str:
    return hashlib.sha256(head + sums.tobytes()).hexdigest()


class TensorFile:
    """A safetensors file to read ranges from.

    Args:
        checked: it has checksums, with which reads are compared.

    Attributes:
        header: the position of each tensor.

    Raises:
        CheckpointError: there is no such file, it is not a safetensors file, or its length differs
            from what its header says.
    """

    def __init__(self, path: Path, checked: bool = False) -> None:
        self.path = Path(path)
        try:
            self._file = open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            self.nbytes = os.fstat(self._file).st_size
            length = int.from_bytes(os.pread(self._file, 8, 0), "little")
            if self.nbytes < 8 or length > min(LARGEST_HEADER, self.nbytes - 8):
                raise DamagedCheckpoint(
                    f"{self.path} is no safetensors file: it has {self.nbytes} bytes and says that its"
                    f" header has {length}."
                )
            self._head = os.pread(self._file, 8 + length, 0)
            self.header = self._parse()
            self._sums = self._read_sums() if checked else np.zeros(0, "<u4")
            self._checked = checked
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """SHA-256 of header and checksums, and with them of all that is in the file."""
        return _digest(self._head, self._sums)

    def _parse(self) -> dict[str, TensorSpan]:
        try:
            header = parse_header(self._head)
        except ValueError as error:
            raise DamagedCheckpoint(
                f"{self.path} has a header that is none of the safetensors format ({error})."
            ) from None
        end = len(self._head)
        for key, entry in sorted(header.items(), key=lambda item: (item[1].begin, item[1].end)):
            nbytes = numel_of(entry.shape) * entry.dtype.itemsize
            if (entry.begin, entry.end - entry.begin) != (end, nbytes):
                raise DamagedCheckpoint(
                    f"{self.path}: tensor {key!r} lies at bytes {entry.begin} to {entry.end}, which"
                    " cannot be."
                )
            end = entry.end
        if end != self.nbytes:
            raise DamagedCheckpoint(
                f"{self.path} has {self.nbytes} bytes and should have {end}: it was cut short, or"
                " something was added."
            )
        return header

    def _read_sums(self) -> Any:
        span = self.header.get(SUMS)
        last = next(reversed(self.header.values()), None)
        if span is None or span is not last or span.end - span.begin != 4 * span.sums:
            raise DamagedCheckpoint(
                f"{self.path} has not one checksum for each {BLOCK >> 10} KiB of its tensors: Onefold"
                " did not write it so."
            )
        return np.frombuffer(os.pread(self._file, 4 * span.sums, span.begin), "<u4")

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> None:
        """Read elements `[start, stop)` of the flattened tensor `key` into `out` ([stop - start],
        contiguous, on the host), converted to out's dtype.

        Raises:
            CheckpointError: the file ends before these elements, or their bytes have changed.
        """
        span = self.header[key]
        size, flat = span.dtype.itemsize, out.view(-1)
        if not 0 <= start <= stop <= numel_of(span.shape) or len(flat) != stop - start:
            raise AssertionError(
                f"{key}: elements {start} to {stop} of {span.shape} into {len(flat)}"
            )
        first, last = start * size, stop * size  # bytes of the tensor
        grid = BLOCK if self._checked else 1
        for a in range(first // grid * grid, last, CHUNK):
            b = min(a + CHUNK, -(-last // grid) * grid, span.end - span.begin)
            x, y = max(a, first) // size, min(b, last) // size
            into = flat[x - start : y - start]
            if into.dtype == span.dtype and (a, b) == (x * size, y * size):
                self._fill(key, span, a, bytes_of(into))
            else:
                part = torch.empty((b - a) // size, dtype=span.dtype, device="cpu")
                self._fill(key, span, a, bytes_of(part))
                into.copy_(part[x - a // size : y - a // size])

    def _fill(self, key: str, span: TensorSpan, at: int, into: memoryview) -> None:
        """Read bytes of a tensor from `at` on, which is where a block begins."""
        left, place = into, span.begin + at
        while left:
            got = os.preadv(self._file, [left], place)
            if got == 0:
                raise DamagedCheckpoint(f"{self.path} ended at byte {place} while it was read.")
            left, place = left[got:], place + got
            moved()
        for begin in range(0, len(into), BLOCK) if self._checked else ():
            number = span.sums + (at + begin) // BLOCK
            if crc32(into[begin : begin + BLOCK]) != self._sums[number]:
                raise DamagedCheckpoint(
                    f"{self.path}: {key!r}: bytes have changed since they were written. Load an"
                    " earlier checkpoint; `onefold checkpoint verify` lists all that is damaged."
                )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
