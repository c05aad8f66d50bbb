"""Safetensors files, written and read in pieces, with checksums of all bytes.

    |8 bytes: n|n bytes: JSON header, padded with spaces|data of the 1st tensor|data of the 2nd|...|
                                                        ^ data_start, a multiple of 8

The format's own library needs all tensors in memory to write a file, and reads without checksums.
This module writes a file tensor by tensor and computes checksums on the way. It reads ranges
directly into their final memory. Every safetensors reader can open the files.

[Note: a checksum from parts] At another world size, several ranks each read a part of a piece that
one rank wrote. The CRC-32s of the parts combine to the piece's CRC-32 in the manifest. Every byte
is thus checked, although no rank reads more than it needs. A checksum is a polynomial over GF(2)
modulo the CRC-32 generator, lowest power in the highest bit. Appending n bytes multiplies the
polynomial before them by x^(8n). Hence crc(a + b) = crc(a) · x^(8·len(b)) + crc(b), where the
conditioning at both ends cancels.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.progress import moved
from onefold.reading import open_regular, parse_json

#: Bytes per system call. Small enough that checksum and copy find them in the CPU's cache.
CHUNK = 4 << 20
#: Bytes after which the kernel is told to start writing to the disk.
AHEAD = 16 << 20
#: Bytes after which the disk is waited for: no file leaves more than these to its last flush, during
#: which the rank gives no sign of progress.
FLUSH = 1 << 30
#: The largest header that the format's own library accepts, in bytes.
LARGEST_HEADER = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to write. `tensor`: a contiguous host tensor, or a function that returns one or the
    parts of one in order.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: torch.Tensor | Callable[[], torch.Tensor | Iterable[torch.Tensor]]


@dataclass(frozen=True)
class TensorSpan:
    """The position of a tensor in a file: bytes `[begin, end)` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


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
        spans = {}
        for key, t in table.items():
            sizes = [*t["shape"], *t["data_offsets"]]
            if len(sizes) > 66 or not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes):
                raise ValueError(f"tensor {key[:60]!r} has sizes that no tensor has")
            begin, end = (len(head) + t["data_offsets"][i] for i in (0, 1))
            spans[key] = TensorSpan(DTYPES[t["dtype"]], tuple(t["shape"]), begin, end)
        return spans
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Written:
    """A file that was written. `head`: SHA-256 of its header. `crcs`: each tensor's CRC-32."""

    nbytes: int
    head: str
    crcs: dict[str, int]


def _chunks(planned: Planned) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, at most `CHUNK` at a time."""
    given = planned.tensor if isinstance(planned.tensor, torch.Tensor) else planned.tensor()
    for tensor in [given] if isinstance(given, torch.Tensor) else given:
        if tensor.dtype != planned.dtype:
            raise AssertionError(f"{planned.key}: planned {planned.dtype}, given {tensor.dtype}")
        data = bytes_of(tensor.contiguous())
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]


def write_tensors(path: Path, planned: Sequence[Planned], exported: bool = False) -> Written:
    """Write a new file, tensor by tensor. Returns after the file has been flushed to disk.
    `exported`: for other libraries, without checksums; transformers 4 asks for the format.
    Raises: OSError: from the system (no space, no permission, the file exists).
    """
    metadata = {"format": "pt"} if exported else {}
    head, places = header_of(((p.key, p.dtype, p.shape) for p in planned), metadata)
    crcs: dict[str, int] = {}
    at = begun = flushed = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write(file, memoryview(head))
        at += len(head)
        for p in planned:
            crc = given = 0
            for chunk in _chunks(p):
                crc = 0 if exported else crc32(chunk, crc)
                _write(file, chunk)
                moved()
                at, given = at + len(chunk), given + len(chunk)
                if at - begun >= AHEAD and hasattr(os, "posix_fadvise"):
                    # On DONTNEED, Linux starts to write dirty pages: the disk then works while the
                    # next bytes are checksummed.
                    os.posix_fadvise(file, begun, at - begun, os.POSIX_FADV_DONTNEED)
                    begun = at
                if at - flushed >= FLUSH:
                    os.fsync(file)
                    flushed = at
            if given != numel_of(p.shape) * p.dtype.itemsize:
                raise AssertionError(f"{p.key}: planned {p.dtype} {p.shape}, given {given} bytes")
            crcs[p.key] = crc
        os.fsync(file)
    finally:
        os.close(file)
    return Written(
        max([len(head), *(e.end for e in places.values())]), hashlib.sha256(head).hexdigest(), crcs
    )


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]


class TensorFile:
    """A safetensors file to read ranges from.

    Raises:
        CheckpointError: there is no such file, it is not a safetensors file, or its length differs
            from what its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file = open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            self.nbytes = os.fstat(self._file).st_size
            self.head = self._head()
            self.header = self._parse()
        except BaseException:
            self.close()
            raise

    def _head(self) -> bytes:
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if self.nbytes < 8 or length > min(LARGEST_HEADER, self.nbytes - 8):
            raise DamagedCheckpoint(
                f"{self.path} is no safetensors file: it has {self.nbytes} bytes and says that its"
                f" header has {length}."
            )
        return os.pread(self._file, 8 + length, 0)

    def _parse(self) -> dict[str, TensorSpan]:
        try:
            header = parse_header(self.head)
        except ValueError as error:
            raise DamagedCheckpoint(
                f"{self.path} has a header that is none of the safetensors format ({error})."
            ) from None
        end = len(self.head)
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

    def read(self, key: str, start: int, stop: int, out: torch.Tensor) -> int:
        """Read elements `[start, stop)` of the flattened tensor `key` into `out` ([stop - start],
        on the host), converted to out's dtype.

        Returns:
            The CRC-32 of the bytes in the file.

        Raises:
            CheckpointError: the file ends before these elements.
        """
        entry = self.header[key]
        size = entry.dtype.itemsize
        if not 0 <= start <= stop <= numel_of(entry.shape) or out.numel() != stop - start:
            raise AssertionError(
                f"{key}: elements {start} to {stop} of {entry.shape} into {tuple(out.shape)}"
            )
        at, crc = entry.begin + start * size, 0
        if out.dtype == entry.dtype and out.is_contiguous():
            data = bytes_of(out)
            for begin in range(0, len(data), CHUNK):
                crc = self._read(data[begin : begin + CHUNK], at + begin, crc)
            return crc
        flat, step = out.reshape(-1), CHUNK // size
        if flat.data_ptr() != out.data_ptr():
            raise AssertionError(f"{key}: the destination is not contiguous")
        buffer = torch.empty(min(step, stop - start), dtype=entry.dtype, device="cpu")
        for begin in range(0, stop - start, step):
            part = buffer[: min(step, stop - start - begin)]
            crc = self._read(bytes_of(part), at + begin * size, crc)
            flat[begin : begin + len(part)].copy_(part)
        return crc

    def _read(self, into: memoryview, at: int, crc: int) -> int:
        whole = into
        while len(into):
            got = os.preadv(self._file, [into], at)
            if got == 0:
                raise DamagedCheckpoint(f"{self.path} ended at byte {at} while it was read.")
            into, at = into[got:], at + got
            moved()
        return crc32(whole, crc)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_GENERATOR = 0xEDB88320
_ONE = 1 << 31  # x^0


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the generator."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ _GENERATOR if b & 1 else b >> 1  # b · x
    return product


@lru_cache(maxsize=4096)
def _x_to(exponent: int) -> int:
    """Return x^exponent modulo the generator, by repeated squaring."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square, exponent = _times(square, square), exponent >> 1
    return result


def combine(first: int, second: int, second_length: int) -> int:
    """Return the CRC-32 of a + b, given those of a and b. `second_length`: b's length in bytes."""
    return _times(_x_to(8 * second_length), first) ^ second


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of consecutive parts, given `(crc, length in bytes)` of each in order."""
    whole = 0
    for crc, length in parts:
        whole = combine(whole, crc, length)
    return whole
