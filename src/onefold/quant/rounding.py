"""Stochastic rounding: a draw decides to which neighbour a value is rounded. The mean error is 0.

The draw of an element is a hash of (seed, step, its global address). So it does not depend on how a
buffer is cut into pieces, on the device, or on earlier draws. There is no generator state to save
in a checkpoint.

    pair       address >> 1                                    two elements share a hash of 32 bits, each takes half of it
    hash       the finalizer of MurmurHash3 (public domain), with one key before and one key inside
    draw       (int16 + 0.5) / 65536, in (-0.5, 0.5)            added to a value before it is rounded to the nearest integer

A draw has 16 bits. So the error of the mean is at most 2**-17 of a step, and integers are rounded
to themselves.
"""

from __future__ import annotations

import torch

from onefold.comm.codec import Stochastic

HASH_SHIFTS = (16, 13, 16)
HASH_FACTORS = (0x85EBCA6B, 0xC2B2AE35)
#: Spreads the bits of an address above its lowest 33.
HIGH_FACTOR = 0x9E3779B1
DRAW_STEP = 2.0**-16


class Draws:
    """The draws of up to `most` elements at a time. It allocates its memory once: 8 bytes per
    element.
    """

    def __init__(self, rounding: Stochastic, most: int, device: torch.device) -> None:
        self.rounding, self.keys = rounding, rounding.keys
        pairs = most // 2 + 1  # one more in case the first address is odd
        self._count = torch.arange(pairs, dtype=torch.int32, device=device)
        self._hash, self._shifted = torch.empty_like(self._count), torch.empty_like(self._count)
        self._drawn = torch.empty(most, dtype=torch.float32, device=device)

    def of(self, start: int, numel: int) -> torch.Tensor:
        """Return the draws of elements `[start, start + numel)` of the encoded interval: fp32 in
        (-0.5, 0.5). The next call overwrites them.
        """
        first = self.rounding.address + start
        pair, pairs = first >> 1, (first + numel + 1 >> 1) - (first >> 1)
        done = 0
        while done < pairs:  # one pass, unless the low 32 bits of the pair's number wrap
            high, low = pair + done >> 32, pair + done & 0xFFFFFFFF
            count = min(pairs - done, (1 << 32) - low)
            self._fill(done, count, low, high)
            done += count
        halves = self._hash[:pairs].view(torch.int16)[first & 1 :]
        return self._drawn[:numel].copy_(halves[:numel]).add_(0.5).mul_(DRAW_STEP)

    def _fill(self, begin: int, count: int, low: int, high: int) -> None:
        """Compute `self._hash[begin : begin + count]` for the pairs from `low` on. 32-bit integers
        wrap, as in the kernels.
        """
        x, shifted = self._hash[begin : begin + count], self._shifted[:count]
        torch.add(self._count[:count], signed(low), out=x)
        x.bitwise_xor_(signed(self.keys[0] ^ high * HIGH_FACTOR))
        self._shift(x, shifted, HASH_SHIFTS[0])
        x.mul_(signed(HASH_FACTORS[0])).bitwise_xor_(self.keys[1])
        self._shift(x, shifted, HASH_SHIFTS[1])
        x.mul_(signed(HASH_FACTORS[1]))
        self._shift(x, shifted, HASH_SHIFTS[2])

    @staticmethod
    def _shift(x: torch.Tensor, shifted: torch.Tensor, by: int) -> None:
        torch.bitwise_right_shift(x, by, out=shifted)
        # The shift is arithmetic: clear the copies of the sign bit
        x.bitwise_xor_(shifted.bitwise_and_((1 << 32 - by) - 1))


def signed(n: int) -> int:
    """Return the low 32 bits of `n` as a signed integer."""
    n &= 0xFFFFFFFF
    return n - (1 << 32) if n >> 31 else n
