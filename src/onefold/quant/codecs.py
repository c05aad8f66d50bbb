"""Codecs: flat intervals of floats as fewer bytes. Each block of neighbouring elements shares a scale,
and each element becomes a small number.

| name | bits an element, scales included | largest error of an element               | meant for               |
|------|----------------------------------|-------------------------------------------|-------------------------|
| int8 | 8.06 (block 256)                 | half a step, 1/254 of the block's largest | gathers, stored weights |
| int4 | 4.25 (block 64)                  | half a step, 1/14 of the block's largest  | reductions              |
| nf4  | 4.25 (block 64)                  | 0.152 of the block's largest              | stored weights          |

An interval of 5 blocks, the last one shorter, and its bytes:

    elements   |0 ...    |block     |2 block  |3 block  |4 block ..numel
    bytes      |p0       |p1        |p2       |p3       |p4 ..|.|m0 m1 m2 m3 m4|
                payload: 8 or 4 bits an element               ^ a byte to even  one bf16 a block, its largest magnitude

The bytes of a block depend only on its own elements. Each rank's interval is encoded separately, so a
block never straddles two ranks, whatever the interval's length.

    scale   = largest * (1 / top)   in fp32, truncated to 16 bits; top: the largest number that the codec writes
    decoded = number * scale        in fp32, rounded once if the target is narrower

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

[Note: on CUDA]  The functions of a block are compiled there, and a product and a sum may be fused into
one operation. So an element in the middle between two numbers may be encoded as the other of them
than on a CPU. The ranks of a run agree, since all run the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import ClassVar

import torch
from torch.nn.functional import pad

from onefold.quant.compiled import compiled

#: Elements processed at a time. On a CPU a slab and its scratch fit the second-level cache; a device
#: needs larger slabs, since each call costs the host some 100 microseconds. A call uses at most SCRATCH_BYTES for each element of a slab.
CPU_SLAB, DEVICE_SLAB, SCRATCH_BYTES = 1 << 18, 1 << 24, 24
SMALLEST_SCALE, LARGEST_MAGNITUDE = 2.0**-125, torch.finfo(torch.bfloat16).max
#: Added to a number below 2**22 in magnitude, it leaves the nearest integer (ties to even) in the low
#: bits of the sum: one pass instead of rounding and converting.
MAGIC = 1.5 * 2.0**23


@dataclass(frozen=True)
class Codec(ABC):
    """An encoding of rows of floats (fp32, bf16 or fp16), each row an interval of its own.

    Elements of a row lie next to each other, and so do its bytes, which begin at an even address. No
    method makes a second copy of the rows. On CUDA the host does not wait for the device.
    """

    name: ClassVar[str]
    top: ClassVar[float]
    block: ClassVar[int]
    bits: ClassVar[int]

    def encoded_bytes(self, numel: int) -> int:
        """Return the bytes of a row of `numel` elements: payload, scales and padding."""
        return _even(self._payload_bytes(numel)) + 2 * -(-numel // self.block)

    @torch.no_grad()
    def encode(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Encode `source`, [rows, numel], over all of `into`, uint8, [rows, encoded_bytes(numel)]."""
        if not source.numel():
            return
        payload, kept = self._split(into, source.shape[1])
        into[:, payload.shape[1] : _even(payload.shape[1])] = 0
        tables = self._tables(source.device)
        for floats, numbers, magnitudes in self._slabs(source, payload, kept.view(torch.int16)):
            _encode(self, floats, numbers, magnitudes, *tables)

    @torch.no_grad()
    def decode(self, encoded: torch.Tensor, into: torch.Tensor, add: bool = False) -> None:
        """Decode `encoded`, [rows, encoded_bytes(numel)], over all of `into`, [rows, numel], or add the
        values to it. Sums are never kept in 16 bits: with `add`, `into` must be fp32.
        """
        assert into.dtype == torch.float32 or not add
        if not into.numel():
            return
        payload, kept = self._split(encoded, into.shape[1])
        tables = self._tables(into.device)
        for floats, numbers, magnitudes in self._slabs(into, payload, kept):
            _decode(self, floats, numbers, magnitudes, add, *tables)

    @torch.no_grad()
    def decode_sum(
        self, encoded: torch.Tensor, own: torch.Tensor, rank: int, into: torch.Tensor
    ) -> None:
        """Write the sum of all rows of `encoded`, decoded, to `into` (fp32, [numel]). They are
        added in order, beginning with +0; `own`, [numel], takes the place of row `rank`.
        """
        into.zero_()
        for i in range(len(encoded)):
            if i == rank:
                into.add_(own)
            else:
                self.decode(encoded[i : i + 1], into[None], add=True)

    def _payload_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _split(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of rows of bytes: the payloads, and the blocks' largest magnitudes (bf16)."""
        assert encoded.dtype == torch.uint8 and encoded.shape[1] == self.encoded_bytes(numel)
        used = self._payload_bytes(numel)
        return encoded[:, :used], encoded[:, _even(used) :].view(torch.bfloat16)

    def _slabs(
        self, floats: torch.Tensor, payload: torch.Tensor, kept: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield views of whole blocks, [rows, blocks, ...], and then of the rows' shorter last blocks."""
        (rows, numel), block = floats.shape, self.block
        slab = CPU_SLAB if floats.device.type == "cpu" else DEVICE_SLAB
        whole = numel // block * block
        cuts = [(a, min(a + slab, whole), block) for a in range(0, whole, slab)]
        cuts += [(whole, numel, numel - whole)] if whole < numel else []
        together = max(slab // max(whole, block), 1)
        for row in range(0, rows, together):
            some = slice(row, row + together)
            for a, b, width in cuts:
                found = payload[some, self._payload_bytes(a) : self._payload_bytes(b)]
                yield (
                    floats[some, a:b].unflatten(1, (-1, width)),
                    found.unflatten(1, (-1, self._payload_bytes(width))),
                    kept[some, a // block : -(-b // block)],
                )

    def _scales(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the scales of blocks with these stored magnitudes, fp32."""
        return ((kept * (1.0 / self.top)).view(torch.int32) & -0x100).view(torch.float32)

    # -- defined by each codec ---------------------------------------------------------------------

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return tables, on the device, that `_pack` and `_unpack` need."""
        return ()

    @abstractmethod
    def _pack(self, numbers: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        """Return the bytes of blocks of `numbers`, fp32, [..., width], in [-top, top] up to rounding.
        `numbers` may be overwritten. NaN may become any byte.
        """

    @abstractmethod
    def _unpack(self, payload: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        """Return the numbers, fp32, of blocks of bytes, and of the padding of a last byte."""


def _even(nbytes: int) -> int:
    return nbytes + nbytes % 2


@compiled
def _encode(
    by: Codec,
    floats: torch.Tensor,
    payload: torch.Tensor,
    kept: torch.Tensor,
    *tables: torch.Tensor,
) -> None:
    """Write the payload and the largest magnitudes, the bits of bf16, of blocks of `floats`."""
    numbers = floats.abs().float()  # reused below: new memory costs a CPU as much as the arithmetic
    largest = numbers.amax(-1)
    finite = largest < torch.inf
    raw = largest.clamp(SMALLEST_SCALE * by.top, LARGEST_MAGNITUDE).view(torch.int32)
    raw = ((raw + 0x8000) & -0x10000).view(torch.float32)  # to the nearest bf16
    raw = raw.masked_fill(~finite, torch.nan)
    torch.mul(floats.float(), by._scales(raw).reciprocal()[..., None], out=numbers)
    # Not by torch's conversion to bf16, which gives more than one NaN
    payload.copy_(by._pack(numbers, *tables).mul_(finite[..., None]))
    kept.copy_(raw.view(torch.int32) >> 16)


@compiled
def _decode(
    by: Codec,
    floats: torch.Tensor,
    payload: torch.Tensor,
    kept: torch.Tensor,
    add: bool,
    *tables: torch.Tensor,
) -> None:
    magnitudes = kept.float()
    values = by._unpack(payload, *tables)[..., : floats.shape[-1]]
    values = values.mul_(by._scales(magnitudes)[..., None])
    if add:
        floats.add_(values)
        return
    if floats.dtype == torch.float16:
        # Rounding to bf16 may have raised the largest element of a block above fp16's range. If the
        # source had larger values, these become infinite, as in any conversion.
        limit = torch.where(magnitudes <= 65536.0, 65504.0, torch.inf)[..., None]
        values = values.clamp(-limit, limit)
    floats.copy_(values)


class Int8(Codec):
    """Two's complement. -128 is not used: with a symmetric range, rounding stays unbiased under a
    change of sign.
    """

    name, top, block, bits = "int8", 127.0, 256, 8

    def _pack(self, numbers: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return numbers.add_(MAGIC).view(torch.int32).to(torch.int8).view(torch.uint8)

    def _unpack(self, payload: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return payload.view(torch.int8).float()


class Int4(Codec):
    """The number plus 8; -8 is not used. Byte i of a block holds element i of its first half in the low
    bits and element i of its second half in the high bits, so each half is one contiguous piece.
    """

    name, top, block, bits = "int4", 7.0, 64, 4

    def _pack(self, numbers: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        low, high = _to_even(numbers).round_().chunk(2, -1)
        return torch.add(low, high, alpha=16.0).add_(8.0 + 16.0 * 8.0).to(torch.uint8)

    def _unpack(self, payload: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return torch.cat([payload & 15, payload >> 4], -1).float().sub_(8.0)


class Nf4(Codec):
    """16 levels at quantiles of a normal distribution (NormalFloat: Dettmers et al., QLoRA, 2023,
    appendix E). A byte holds the levels of two neighbours, the earlier one in the low bits.

    The largest error is half the gap between two levels: 0.152 of the scale at the ends, 0.04 in the
    middle. For normally distributed weights the error is 15 % smaller than with int4 at the same bits;
    for others it may be larger.
    """

    name, top, block, bits = "nf4", 1.0, 64, 4

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return _tables_of_nf4(device)

    def _pack(self, numbers: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        numbers = _to_even(numbers)
        level = nearest(numbers.flatten(), *tables[:2]).view(*numbers.shape[:-1], -1, 2)
        return level[..., 0] + level[..., 1] * 16

    def _unpack(self, payload: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        pairs = tables[2].index_select(0, payload.flatten().int())
        return pairs.view(torch.float32).view(*payload.shape[:-1], -1)


def nearest_tables(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables for `nearest`. All floats with the same upper half of their bits must have at
    most two nearest `values`, which are ascending.

    By the upper half of a float's bits: the lower of these two, by its place in `values`, uint8; and
    the border between the two, infinity if there is only one.
    """
    middle = (values[1:] + values[:-1]) / 2
    upper = torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32).nan_to_num(0.0)
    low, high = (torch.bucketize(end, middle) for end in (ends.amin(0), ends.amax(0)))
    border = torch.where(high > low, middle[low.clamp(max=len(middle) - 1)], torch.inf)
    return low.to(torch.uint8), border


def nearest(numbers: torch.Tensor, lower: torch.Tensor, border: torch.Tensor) -> torch.Tensor:
    """Return the places of the nearest values, or of the lower of two that are equally near, uint8, of
    `numbers`, fp32, [n]. About 5 ns an element, where a binary search takes 100.
    """
    upper = (numbers.view(torch.int32) >> 16) & 0xFFFF
    return lower.index_select(0, upper).add_(numbers > border.index_select(0, upper))


def _to_even(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers` with a zero behind each block of odd length."""
    return pad(numbers, (0, 1)) if numbers.shape[-1] % 2 else numbers


@cache
def levels() -> torch.Tensor:
    """Return the 16 levels from -1 to 1, fp32.

    Quantiles of the normal distribution at equal steps of probability from the middle to 1 - delta,
    8 above zero and 7 below it, divided by the largest. delta is the mean of half a step with 15
    and with 16 levels.
    """
    end, normal = 1.0 - (1 / 32 + 1 / 30) / 2, NormalDist()
    above = [normal.inv_cdf(0.5 + (end - 0.5) * i / 8) for i in range(1, 9)]
    below = [-normal.inv_cdf(0.5 + (end - 0.5) * i / 7) for i in range(1, 8)]
    found = [x / above[-1] for x in sorted([*below, 0.0, *above])]
    return torch.tensor(found, dtype=torch.float32, device="cpu")


@cache
def _tables_of_nf4(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tables to find the nearest level; and the two numbers of each byte, as the bits of
    one float64: one look-up gives both.
    """
    pairs = torch.stack([levels().repeat(16), levels().repeat_interleave(16)], 1)
    tables = *nearest_tables(levels()), pairs.view(torch.float64).flatten()
    return tuple(table.to(device) for table in tables)


CODECS: dict[str, Codec] = {kind.name: kind() for kind in (Int8, Int4, Nf4)}
