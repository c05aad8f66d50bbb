"""The scale of a block: what its numbers are multiplied with when they are decoded.

[Note: a scale is bf16, rounded up]  A block's largest magnitude divided by the largest number that the codec can write, rounded up to
the next bf16, so that no number of the block is too large to write. bf16 has the exponents of fp32, so nothing overflows or
underflows that fp32 would hold, at half its bytes: see docs/decisions.md, "Codecs", for what block and scale weigh.

    largest magnitude     scale                                            the block decodes to
    0                     2**-126                                          zeros
    under top * 2**-126   2**-126, the smallest normal number              multiples of it: off by 2**-127 at most
    ordinary              up(largest / top)                                at most top * scale
    near fp32's end       `most`, the largest with top * scale finite      finite numbers, off by less than half a step
    infinite or NaN       NaN                                              NaN throughout

[Note: what is not finite]  One infinity or NaN makes the scale of its block NaN and its payload zero bytes: all elements of the block
decode to NaN, in every dtype, and NaN plus anything is NaN. The other blocks are as they are.

[Note: the same on every device]  The arithmetic is a handful of exact or correctly rounded fp32 operations in a set order, none of
which sees a subnormal number that matters; kernels repeat it bit for bit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

SMALLEST = 2.0**-126
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Scales:
    """The scales of a codec whose largest number is `top`."""

    top: float

    @cached_property
    def portion(self) -> float:
        """1 / top as fp32."""
        return struct.unpack("<f", struct.pack("<f", 1.0 / self.top))[0]

    @cached_property
    def most(self) -> float:
        """The largest bf16 whose product with `top` is a finite fp32."""
        return _bf16_below(FP32_MAX / self.top)

    def reach(self, dtype: torch.dtype) -> float:
        """No block of a tensor of `dtype` has a scale above this; it allows for rounding up, which adds less than one part in 128."""
        above = _bf16_below(torch.finfo(dtype).max * self.portion * (1.0 + 2.0**-7))
        return min(above, self.most)

    def of(self, largest: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the scales of blocks of the `largest` magnitudes (fp32, one a block; overwritten) into `into` (bf16).

        Returns:
            fp32, 1 / scale or NaN where the block is not finite; and uint8, all ones or 0 where the block is not finite: what its
            payload bytes are masked with.
        """
        finite = largest < torch.inf
        raw = _up(largest.mul_(self.portion).clamp_(SMALLEST, self.most)).masked_fill_(finite.logical_not(), torch.nan)
        into.view(torch.int16).copy_(raw.view(torch.int32) >> 16)  # torch's own conversion has more than one NaN
        return raw.reciprocal_(), finite.view(torch.uint8).mul_(255)


def _up(raw: torch.Tensor) -> torch.Tensor:
    """fp32 rounded up to bf16's grid, in place; positive and not above bf16's largest."""
    raw.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return raw


def _bf16_below(value: float) -> float:
    """The largest bf16 that is not above `value`."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF0000
    found = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found if found <= value else struct.unpack("<f", struct.pack("<I", bits - 0x10000))[0]
