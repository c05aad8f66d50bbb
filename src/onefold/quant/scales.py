"""The scale of a block: the factor from the codec's numbers to values. A block stores its largest
magnitude, in bf16.

    scale = largest * (1 / top)     in fp32, truncated to 16 bits; top: the largest number that the codec writes

With 16 bits the product of a number and its scale is exact in fp32, and top * scale is at most the
stored magnitude.

[Note: the largest in bf16]  bf16 has the exponent range of fp32 at half the bytes, so it adds no
overflow or underflow. (docs/decisions.md, "Codecs", compares the bytes of block sizes and
magnitudes.) Rounding the magnitude to the nearest bf16 changes it by at most one part in 256. Even
for the largest number of a codec this is less than half a step (127 * (1 + 2**-8) = 127.496), so an
element above the stored magnitude has an error of less than half a step.

    largest magnitude     stored magnitude         the block decodes to
    0                     top * 2**-125            zeros
    under top * 2**-125   top * 2**-125            multiples of 2**-125: error at most 2**-126, and no scale is subnormal
    ordinary              the nearest bf16         at most that
    near fp32's end       bf16's largest           finite numbers, error less than half a step
    infinite or NaN       NaN                      NaN throughout

[Note: encoding again]  The decoded values of a block encode to the same bytes, in fp32 and also
after rounding to bf16. The largest element decodes to the stored bf16, and every other element to
less than half a step from its number. So weights that are stored encoded can be saved as ordinary
values and loaded without loss. There is one exception: if the dtype of the decoded values has
coarser steps than the block, other bytes may result, which decode to the same values. (In fp16 that
is a block with all elements below 2**-17, in other dtypes one near their smallest numbers.)

[Note: what is not finite]  If a block has an infinity or NaN, its stored magnitude is NaN and its
payload is zero bytes. All elements of the block decode to NaN, in every dtype, and a sum with them
is NaN. Other blocks are not affected.

[Note: the same on every device]  The arithmetic is a few exact or correctly rounded fp32 operations
in a fixed order. No subnormal number affects the result.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

#: The smallest scale.
SMALLEST = 2.0**-125
#: The largest bf16, and the largest stored magnitude.
MOST = torch.finfo(torch.bfloat16).max
#: Added to a positive fp32's bits before the lower half is cleared: rounds to the nearest.
NEAREST = 0x8000
#: Mask that leaves 16 of fp32's 24 bits of significand.
CUT = -0x100


@dataclass(frozen=True)
class Scales:
    """The scales of a codec whose largest number is `top`."""

    top: float

    @cached_property
    def portion(self) -> float:
        """1 / top as fp32."""
        return struct.unpack("<f", struct.pack("<f", 1.0 / self.top))[0]

    def of(self, largest: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the stored magnitudes of blocks to `into` (bf16).

        Args:
            largest: the largest magnitudes, fp32, one per block; overwritten.

        Returns:
            fp32: 1 / scale, NaN for a block that is not finite. uint8: the mask for the payload
            bytes, 255, or 0 for a block that is not finite.
        """
        finite = largest < torch.inf
        raw = largest.clamp_(SMALLEST * self.top, MOST)
        raw.view(torch.int32).add_(NEAREST).bitwise_and_(-0x10000)
        raw.masked_fill_(finite.logical_not(), torch.nan)
        # Not by torch's conversion, which gives more than one NaN
        into.view(torch.int16).copy_(raw.view(torch.int32) >> 16)
        return self._cut(raw).reciprocal_(), finite.view(torch.uint8).mul_(255)

    def read(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the scales, fp32, of blocks with the stored magnitudes `kept` (bf16)."""
        return self._cut(kept.to(torch.float32, copy=True))

    def _cut(self, kept: torch.Tensor) -> torch.Tensor:
        """Turn stored magnitudes, fp32, into scales, in place."""
        scales = kept.mul_(self.portion)
        scales.view(torch.int32).bitwise_and_(CUT)
        return scales

    def at_most(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the largest possible scale, fp64, of a block with magnitudes up to `largest`."""
        return largest.double().clamp(min=SMALLEST * self.top) * ((1.0 + 2.0**-8) * self.portion)


def reach(dtype: torch.dtype) -> float:
    """Return the largest magnitude that a block of `dtype` can store, however it was rounded."""
    return {torch.float16: 65536.0}.get(dtype, MOST)
