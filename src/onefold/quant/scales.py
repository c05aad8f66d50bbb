"""The scale of a block: what its numbers are multiplied with when they are decoded. A block keeps
its largest magnitude, in bf16.

    scale = largest * (1 / top)     in fp32, cut off to 16 bits; top: the largest number that the codec writes

With 16 bits the product of a number and its scale is exact in fp32, and top * scale is no more than
what is kept.

[Note: the largest in bf16]  bf16 has the exponents of fp32, so nothing overflows or underflows that
fp32 would hold, at half its bytes: see docs/decisions.md, "Codecs", for what block and largest
weigh. Rounded to the nearest it is off by one part in 256 at most, of which no codec's largest
number makes half a step (127 * (1 + 2**-8) = 127.496): an element above it is off by less. Where
rounding of numbers is stochastic it is rounded up instead, since what is cut off at the end would
not be unbiased.

    largest magnitude     what is kept             the block decodes to
    0                     top * 2**-125            zeros
    under top * 2**-125   top * 2**-125            multiples of 2**-125: off by 2**-126 at most, and no scale is subnormal
    ordinary              the nearest bf16         at most that
    near fp32's end       bf16's largest           finite numbers, off by less than half a step
    infinite or NaN       NaN                      NaN throughout

[Note: encoding again]  What a block decodes to encodes to the same bytes, in fp32 and through bf16
alike: its largest element decodes to the bf16 that is kept, and every other one to less than half a
step from its number. So weights that rest encoded are saved as ordinary ones and lose nothing on
their way back. Where the steps of the dtype they are kept in are coarser than a block's (in fp16 a
whole block below 2**-17, in the others next to their smallest numbers), other bytes may come, which
decode to the same values.

[Note: what is not finite]  One infinity or NaN makes what its block keeps NaN and its payload zero
bytes: all elements of the block decode to NaN, in every dtype, and NaN plus anything is NaN. The
other blocks are as they are.

[Note: the same on every device]  The arithmetic is a handful of exact or correctly rounded fp32
operations in a set order, none of which sees a subnormal number that matters; kernels repeat it bit
for bit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

#: The smallest scale.
SMALLEST = 2.0**-125
#: The largest bf16: nothing that is kept is larger.
MOST = torch.finfo(torch.bfloat16).max
#: Added to a positive fp32's bits before the lower half is cut off.
NEAREST, UP = 0x8000, 0xFFFF
#: Leaves 16 of fp32's 24 bits.
CUT = -0x100


@dataclass(frozen=True)
class Scales:
    """The scales of a codec whose largest number is `top`."""

    top: float

    @cached_property
    def portion(self) -> float:
        """1 / top as fp32."""
        return struct.unpack("<f", struct.pack("<f", 1.0 / self.top))[0]

    def of(
        self, largest: torch.Tensor, into: torch.Tensor, up: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what blocks of the `largest` magnitudes (fp32, one a block; overwritten) keep into
        `into` (bf16).

        Args:
            up: round it up, see [Note: the largest in bf16].

        Returns:
            fp32, 1 / scale or NaN where the block is not finite; and uint8, all ones or 0 where the
            block is not finite: what its payload bytes are masked with.
        """
        finite = largest < torch.inf
        raw = largest.clamp_(SMALLEST * self.top, MOST)
        raw.view(torch.int32).add_(UP if up else NEAREST).bitwise_and_(-0x10000)
        raw.masked_fill_(finite.logical_not(), torch.nan)
        # torch's own conversion has more than one NaN
        into.view(torch.int16).copy_(raw.view(torch.int32) >> 16)
        return self._cut(raw).reciprocal_(), finite.view(torch.uint8).mul_(255)

    def read(self, kept: torch.Tensor) -> torch.Tensor:
        """The scales, fp32, of blocks that keep `kept` (bf16)."""
        return self._cut(kept.to(torch.float32, copy=True))

    def _cut(self, kept: torch.Tensor) -> torch.Tensor:
        """Scales in place of what is kept, fp32."""
        scales = kept.mul_(self.portion)
        scales.view(torch.int32).bitwise_and_(CUT)
        return scales

    def at_most(self, largest: torch.Tensor, up: bool) -> torch.Tensor:
        """How large the scale of a block with no larger magnitude than `largest` may be; fp64."""
        return largest.double().clamp(min=SMALLEST * self.top) * (
            (1.0 + (2.0**-7 if up else 2.0**-8)) * self.portion
        )


def reach(dtype: torch.dtype) -> float:
    """No block of a tensor of `dtype` keeps more than this, however it was rounded."""
    return {torch.float16: 65536.0}.get(dtype, MOST)
