"""Pack fp32 moments into 8 and 4 bits, and unpack them. Maps, scales and rounding are torchao's,
but without its slow search.

    values ─► ÷ the block's greatest magnitude ─► nearest value of the map ─► codes, scales           encode
    codes, scales ─► map[code] × scale ─► values                                                      decode

torchao finds the nearest value by a binary search in tensor operations, about 100 ns per element on
one core. Here a table is indexed by the upper 16 bits of the float. All floats with the same upper
bits have at most two codes. The table holds the lower code and the boundary between the two, and
one comparison decides (about 5 ns). The boundaries are computed with torchao's own function, so the
codes equal torchao's exactly.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from onefold.recipe.moments import SIGNED, Format


def require_torchao(what: str) -> None:
    """Raise ValueError unless torchao, which `what` needs, is installed. Does not import it."""
    if find_spec("torchao") is None:
        raise ValueError(
            f"{what} needs torchao, which is not installed: pip install 'onefold[lowbit]', or use"
            " moments='bf16'."
        )


class MomentPacking:
    """Packs and unpacks moments of one format on one device. `format.packed` is true."""

    def __init__(self, format: Format, device: torch.device) -> None:
        self.format = format
        self._tables = {
            signed: tuple(t.to(device) for t in _tables(format.name, signed))
            for signed in set(SIGNED.values())
        }

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, numel: int, signed: bool
    ) -> torch.Tensor:
        """Return the fp32 values, [numel], of codes and scales that start at a block."""
        f = self.format
        out = torch.zeros(scales.numel() * f.block, dtype=torch.float32, device=codes.device)
        if f.name == "fp8":
            out[:numel].copy_(codes)
        else:
            if f.grain == 2:
                codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).view(-1)[:numel]
            torch.index_select(self._tables[signed][0], 0, codes.int(), out=out[:numel])
        out.view(-1, f.block).mul_(scales.view(-1, 1))
        return out[:numel]

    def encode(
        self, values: torch.Tensor, signed: bool, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Pack fp32 `values`, which start at a block, into `codes` and `scales`."""
        f, n = self.format, values.numel()
        # The last block of a parameter may be shorter; zeros do not change its scale
        if n != scales.numel() * f.block:
            padded = torch.zeros(
                scales.numel() * f.block, dtype=torch.float32, device=values.device
            )
            padded[:n].copy_(values)
            values = padded
        if f.name == "fp8":
            from torchao.optim.subclass_fp8 import quantize_fp8

            found, scale = quantize_fp8(values, f.block)
        else:
            from torchao.optim.quant_utils import scale_tensor

            scaled, scale = scale_tensor(values, f.block)
            found = self._nearest(scaled, signed)
            if f.grain == 2:
                found = (found[::2] << 4) | found[1::2]
        codes.copy_(found[: codes.numel()])
        scales.copy_(scale)

    def encode_again(
        self, values: torch.Tensor, signed: bool, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Do what `encode` does, but values that came from `decode` must decode to the same bits.

        The largest magnitude of decoded values may differ from the block's scale: the signed maps
        do not contain -1, and for fp8 the product 448 × scale was rounded. So for each map value
        that the largest element may have had, this tries the scales around magnitude / map value.
        """
        f = self.format
        self.encode(values, signed, codes, scales)
        blocks = torch.nn.functional.pad(
            values, (0, scales.numel() * f.block - values.numel())
        ).view(-1, f.block)
        differ = (self.decode(codes, scales, values.numel(), signed) != values).nonzero().view(
            -1
        ) // f.block
        todo = differ.unique()
        if not todo.numel():
            return
        blocks, greatest = blocks[todo], blocks[todo].abs().amax(-1)
        tops = (
            [torch.finfo(f.dtype).max]
            if f.name == "fp8"
            else self._tables[signed][0].abs().sort(descending=True).values[:3].tolist()
        )
        found, scale = (
            torch.zeros(blocks.shape, dtype=torch.uint8, device=values.device),
            scales[todo],
        )
        done = torch.zeros(len(todo), dtype=torch.bool, device=values.device)
        for top in tops:
            for steps in range(-2, 3):
                tried = (greatest / top).view(torch.int32).add(steps).view(torch.float32)
                divided = (blocks / tried.view(-1, 1)).reshape(-1)
                if f.name == "fp8":
                    new = divided.to(f.dtype).view(torch.uint8).view(blocks.shape)
                    again = new.view(f.dtype).float() * tried.view(-1, 1)
                else:
                    new = self._nearest(divided.clamp(-1, 1), signed).view(blocks.shape)
                    again = self._tables[signed][0][new.int()] * tried.view(-1, 1)
                right = (again == blocks).all(-1) & ~done
                found[right], scale[right], done = new[right], tried[right], done | right
        todo, found = todo[done], found[done]
        scales[todo] = scale[done]
        if f.grain == 2:
            found = (found[:, ::2] << 4) | found[:, 1::2]
        where = (
            todo.view(-1, 1) * (f.block // f.grain)
            + torch.arange(f.block // f.grain, device=values.device)
        ).view(-1)
        inside = where < codes.numel()
        codes.view(torch.uint8)[where[inside]] = found.reshape(-1)[inside]

    def _nearest(self, scaled: torch.Tensor, signed: bool) -> torch.Tensor:
        """Return the codes, uint8, of values from -1 to 1."""
        _, lowest, boundary = self._tables[signed]
        upper = (scaled.view(torch.int32) >> 16) & 0xFFFF
        return torch.index_select(lowest, 0, upper).add_(
            scaled >= torch.index_select(boundary, 0, upper)
        )


def _library(name: str, signed: bool) -> tuple[torch.Tensor, Any]:
    """Return torchao's map of a format, fp32, and its function from values to codes."""
    require_torchao(f"a moment in {name}")
    from torchao.optim import quant_utils, subclass_4bit, subclass_8bit

    module, quantize = {
        "int8": (subclass_8bit, quant_utils.quantize_8bit_with_qmap),
        "int4": (subclass_4bit, quant_utils.quantize_4bit_with_qmap),
    }[name]
    values = module.get_qmap_signed() if signed else module.get_qmap_unsigned()
    return torch.tensor(values, dtype=torch.float32, device="cpu"), quantize


@lru_cache(maxsize=8)
def _tables(name: str, signed: bool) -> tuple[torch.Tensor, ...]:
    """Return the tables of a format; () for fp8, which needs none.

    They are: the map; the lower code, indexed by the upper half of a float's bits; the boundary to
    the next code, indexed likewise.
    """
    if name == "fp8":
        require_torchao("a moment in fp8")
        return ()
    values, quantize = _library(name, signed)
    halves = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    ends = torch.stack([halves << 16, (halves << 16) | 0xFFFF]).view(torch.float32)
    low, high = ends.min(0).values, ends.max(0).values
    # Scaled values are in [-1, 1]. NaN gets code 0, as in torchao.
    usable = ends.abs().amax(0) <= 1
    usable &= ~ends.isnan().any(0)
    first, last = (
        torch.where(usable, quantize(v.nan_to_num(0.0), values).int(), 0) for v in (low, high)
    )
    if (last - first).max() > 1:
        raise AssertionError(
            f"the values of {name} lie too close for the upper halves of floats to tell them apart"
        )
    boundary = torch.full((1 << 16,), torch.inf, dtype=torch.float32, device="cpu")
    divided = (last > first).nonzero().view(-1)
    boundary[divided] = _boundaries(
        low[divided], high[divided], last[divided], lambda v: quantize(v, values)
    )
    # Other floats with the upper bits of 1 or -1 are outside [-1, 1], so set these codes directly
    ones = torch.tensor([1.0, -1.0], device="cpu")
    first[((ones.view(torch.int32) >> 16) & 0xFFFF).long()] = quantize(ones, values).int()
    return values, first.to(torch.uint8), boundary


def _boundaries(
    low: torch.Tensor, high: torch.Tensor, code: torch.Tensor, quantize: Any
) -> torch.Tensor:
    """Return for each range of floats the smallest float with `code`. All floats of a range have
    one sign; `high` has the code, `low` does not.
    """
    sign = torch.where(high.signbit(), -1, 1)
    # Integers in the same order as the floats
    a, b = (v.view(torch.int32).bitwise_and(0x7FFFFFFF).long() * sign for v in (low, high))
    while bool((b - a > 1).any()):
        middle = (a + b) // 2
        value = torch.copysign(middle.abs().int().view(torch.float32), sign.float())
        has = quantize(value).int() >= code
        a, b = torch.where(has, a, middle), torch.where(has, middle, b)
    return torch.copysign(b.abs().int().view(torch.float32), sign.float())
