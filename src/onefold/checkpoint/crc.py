"""CRC-32 of a whole from the CRC-32s of its parts.

Ranks that load at another world size each read a part of what one rank wrote. Their parts'
checksums combine to the one in the manifest, so every byte is checked although no rank reads more
than it needs.

A checksum is a polynomial over GF(2) modulo the CRC-32 generator, lowest power in the highest bit.
Appending n bytes multiplies what came before by x^(8n); hence crc(a + b) = crc(a) · x^(8·len(b)) +
crc(b), where the conditioning at both ends cancels.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from zlib import crc32

__all__ = ["combine", "crc32", "joined"]

_GENERATOR = 0xEDB88320
_ONE = 1 << 31  # x^0


def _times(a: int, b: int) -> int:
    """The product of two polynomials."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ _GENERATOR if b & 1 else b >> 1  # b · x
    return product


@lru_cache(maxsize=4096)
def _x_to(exponent: int) -> int:
    """x^exponent, by squaring."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square, exponent = _times(square, square), exponent >> 1
    return result


def combine(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of a + b from those of a and of b; `second_length` is b's length in bytes."""
    return _times(_x_to(8 * second_length), first) ^ second


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of a sequence of parts, each `(crc, length in bytes)`, in order."""
    whole = 0
    for crc, length in parts:
        whole = combine(whole, crc, length)
    return whole
