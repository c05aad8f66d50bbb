"""Block-wise codecs: each block of neighbouring elements shares a scale, and each element becomes a
small number.

An interval of 5 blocks, the last one shorter, and its bytes:

    elements   |0 ...    |block     |2 block  |3 block  |4 block ..numel
    bytes      |p0       |p1        |p2       |p3       |p4 ..|.|m0 m1 m2 m3 m4|
                payload: 8 or 4 bits an element               ^ a byte to even  one bf16 a block, its largest magnitude

1. The bytes of a block depend only on its own elements. If an interval is cut at a block boundary,
   the parts have the same payload and magnitudes as the whole.
2. Each rank's interval is encoded separately, so a block never straddles two ranks, whatever the
   interval's length.
3. decoded = number * scale in fp32, rounded once if the target is narrower. The scale is the
   magnitude divided by the codec's largest number. scales.py has the details, also for infinity and
   NaN, and for encoding again.

With 4 bits, a byte holds two elements of one block. The codec decides which two: see `integers.py`
and `nf4.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from onefold.comm.codec import Codec
from onefold.quant.scales import Scales, reach

_KEPT_BYTES = 2
#: Bound on the error of the few fp32 operations, as a fraction of a block's largest magnitude.
ARITHMETIC = 2.0**-22


@dataclass(frozen=True)
class Blockwise(Codec):
    """Base of block-wise codecs: loops over slabs, magnitudes and payload. A codec adds the
    conversion between numbers and bytes.

    Args:
        block: elements that share a scale, a power of two from 16 to 4096.
    """

    #: The largest number that a payload can hold.
    top: ClassVar[float]
    #: (elements, bytes): so many neighbours are packed into so many bytes. `elements` divides 16, so
    #: that they are of one block.
    packed: ClassVar[tuple[int, int]] = (1, 1)

    block: int = 256

    @property
    def shared(self) -> int:
        return self.block

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 16 <= self.block <= 4096 or self.block & self.block - 1:
            raise ValueError(
                f"codec {self.name!r} was given a block of {self.block} elements, expected a power"
                " of two from 16 to 4096"
            )

    @cached_property
    def scales(self) -> Scales:
        return Scales(self.top)

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of the numbers of `numel` elements, without magnitudes and padding."""
        elements, nbytes = self.packed
        return -(-numel // elements) * nbytes

    def encoded_bytes(self, numel: int) -> int:
        return self._even(numel) + _KEPT_BYTES * -(-numel // self.block)

    def split(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two views of `encoded`: the payload of `numel` elements (uint8) and the blocks'
        largest magnitudes (bf16, one per block).
        """
        if encoded.storage_offset() % _KEPT_BYTES:
            raise ValueError(
                f"the encoded bytes start at byte {encoded.storage_offset()} of their storage,"
                " expected an even one"
            )
        return encoded[: self.payload_bytes(numel)], encoded[self._even(numel) :].view(
            torch.bfloat16
        )

    def bound(self, magnitudes: torch.Tensor) -> torch.Tensor:
        sizes = magnitudes.double()
        rows = torch.nn.functional.pad(sizes, (0, -sizes.numel() % self.block)).view(-1, self.block)
        largest = rows.amax(1).repeat_interleave(self.block)[: sizes.numel()]
        return self._off(sizes, self.scales.at_most(largest)) + largest * ARITHMETIC

    def _even(self, numel: int) -> int:
        return -(-self.payload_bytes(numel) // _KEPT_BYTES) * _KEPT_BYTES

    def _encode(self, source: torch.Tensor, into: torch.Tensor) -> None:
        payload, kept = self.split(into, source.numel())
        into[payload.numel() : self._even(source.numel())] = 0
        scratch = None
        for start, stop, width in self._pieces(source.numel(), source.device):
            if scratch is None:
                scratch = self._scratch(stop - start, source.device)
            rows, given = (
                self._rows(scratch, stop - start, width),
                source[start:stop].view(-1, width),
            )
            numbers = rows[:, :width]
            rows[:, width:] = 0
            inverse, mask = self.scales.of(
                _largest(given, scratch), self._kept_of(kept, start, stop)
            )
            if source.dtype != torch.float32:
                given = numbers.copy_(given)
            torch.mul(given, inverse[:, None], out=numbers)
            packed = self._bytes_of(payload, start, stop).view(rows.shape[0], -1)
            self._pack(rows, packed)
            packed.bitwise_and_(mask[:, None])

    def _decode(self, encoded: torch.Tensor, into: torch.Tensor, sign: int) -> None:
        payload, kept = self.split(encoded, into.numel())
        scratch = None
        for start, stop, width in self._pieces(into.numel(), into.device):
            if scratch is None:
                scratch = self._scratch(stop - start, into.device)
            rows, target = (
                self._rows(scratch, stop - start, width),
                into[start:stop].view(-1, width),
            )
            self._unpack(self._bytes_of(payload, start, stop).view(rows.shape[0], -1), rows)
            largest = self._kept_of(kept, start, stop)[:, None]
            scale, numbers = self.scales.read(largest), rows[:, :width]
            if not sign and into.dtype == torch.float32:
                torch.mul(numbers, scale, out=target)
                continue
            numbers.mul_(scale)
            if sign:
                target.add_(numbers, alpha=sign)
            else:
                self._saturate(numbers, largest.float(), into.dtype)
                target.copy_(numbers)

    def _saturate(self, numbers: torch.Tensor, kept: torch.Tensor, dtype: torch.dtype) -> None:
        """Clamp blocks whose values fitted `dtype` to its range. Rounding may have raised their
        largest element above it.

        If the kept magnitude exceeds `reach(dtype)`, the source had larger values. These become
        infinite, as in any conversion.
        """
        largest = torch.finfo(dtype).max
        if numbers.device.type == "cpu" and not bool((kept > largest).any()):
            return  # on the CPU only: elsewhere this check would wait for the device
        limit = torch.where(kept <= reach(dtype), largest, torch.inf)
        torch.clamp(numbers, -limit, limit, out=numbers)

    def _pieces(self, numel: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
        """Yield `(start, stop, width)`: rows of `width` elements. Whole blocks come first, then a
        shorter last block by itself.
        """
        slab = max(self._slab(device) // self.block, 1) * self.block
        whole = numel // self.block * self.block
        for start in range(0, whole, slab):
            yield start, min(start + slab, whole), self.block
        if whole < numel:
            yield whole, numel, numel - whole

    def _scratch(self, numel: int, device: torch.device) -> torch.Tensor:
        return torch.empty(numel + self.packed[0] - 1, dtype=torch.float32, device=device)

    def _rows(self, scratch: torch.Tensor, numel: int, width: int) -> torch.Tensor:
        """Return rows of scratch for `numel` elements, their width rounded up to what is packed."""
        rows, wide = numel // width, -(-width // self.packed[0]) * self.packed[0]
        return scratch[: rows * wide].view(rows, wide)

    def _bytes_of(self, payload: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return payload[self.payload_bytes(start) : self.payload_bytes(stop)]

    def _kept_of(self, kept: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return kept[start // self.block : -(-stop // self.block)]

    # -- defined by each codec ---------------------------------------------------------------------

    def numbers(self) -> torch.Tensor:
        """Return the numbers that a payload can hold, on the CPU: the integers up to `top`, unless a
        codec has others.
        """
        return torch.arange(-self.top, self.top + 1, device="cpu")

    @abstractmethod
    def _pack(self, numbers: torch.Tensor, payload: torch.Tensor) -> None:
        """Write rows of `numbers` (fp32 in [-top, top], up to rounding) as rows of bytes. `numbers`
        may be overwritten. NaN may become any byte.
        """

    @abstractmethod
    def _unpack(self, payload: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write the numbers of rows of bytes to rows of fp32."""

    @abstractmethod
    def _off(self, sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the largest error of numbers of these sizes and scales (fp64): half the gap between
        the two nearest numbers.
        """


def _largest(rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row as fp32: NaN or infinity if the row has one.

    Magnitudes are compared by their bits, which have the same order.
    """
    bits = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int16)
    magnitudes = scratch.view(bits.dtype)[: bits.numel()].view(bits.shape)
    return (
        torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=magnitudes)
        .amax(1)
        .view(rows.dtype)
        .float()
    )
