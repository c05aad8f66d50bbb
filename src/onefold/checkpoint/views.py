"""Sources that wrap another source: `Recoded` converts moments to the format of this run, and `Local`
shows this rank's boxes.

`Recoded` reads moments as if they had been saved in another format:

    stored                             asked for                         result
    exp_avg.int8, exp_avg.int8.scale   the same                          bit-equal: not unpacked
    exp_avg.int8, exp_avg.int8.scale   exp_avg, fp32                     decoded values
    exp_avg, fp32 or bf16              exp_avg.int4, exp_avg.int4.scale  packed, as an optimizer step packs them

Blocks begin at the parameter's first element, or at that of this rank's box. Every rank therefore
makes the same codes for a block, whichever part of the block it reads.

`Local` is what a load reads from if ranks hold boxes of parameters:

    source           w [8, 6]                     exp_avg of w [8, 6]
      Recoded        moments that are packed in blocks of the whole, as fp32
      Local          w [8, 3], this rank's box    exp_avg [8, 3]; codes and scales, if they are of this very box
      Recoded        moments packed in blocks of the box, if the recipe asks for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onefold.checkpoint.source import Item, Source, Stored, View
from onefold.checkpoint.tensorfile import numel_of
from onefold.layout.holders import TensorBox
from onefold.quant.moment_packing import decode, encode
from onefold.recipe.moments import BLOCK, FORMATS, SIGNED, Format, items_of, packed
from onefold.runtime.engine import Engine

#: Elements unpacked at a time; a multiple of BLOCK.
CHUNK = 1 << 20
_CPU = torch.device("cpu")


class Recoded(View):
    """`source` with moments converted to the format that `wanted(name, elements)` returns; None
    leaves them as they are.
    """

    def __init__(self, source: Source, wanted: Callable[[str, int], Format | None]) -> None:
        super().__init__(source)
        self._items = dict(source.items())
        # {item asked for: (the unpacked moment's item, its stored format, number of elements)}
        self._made: dict[Item, tuple[Item, Format, int]] = {}
        shapes = {
            item.name: stored.shape
            for item, stored in self._items.items()
            if item.kind == "parameter"
        }
        for item in [
            i
            for i in self._items
            if i.kind == "state" and (packed(i.state) or i.state in SIGNED) and i.name in shapes
        ]:
            part, shape = packed(item.state), shapes[item.name]
            there = part.format if part is not None else FORMATS["fp32"]
            asked = wanted(item.name, numel_of(shape))
            if asked is None or there.keys("") == asked.keys(""):
                continue
            stored = self._items.pop(item)
            if part is None and stored.shape != shape:  # another kind of state with that name
                self._items[item] = stored
                continue
            plain = Item("state", item.name, part.key if part is not None else item.state)
            for key in asked.keys(plain.state):
                made = packed(key)
                shown = Stored(torch.float32, shape)
                if made is not None:
                    shown = Stored(made.dtype, (-(-numel_of(shape) // made.grain),))
                self._items[Item("state", item.name, key)] = shown
                self._made[Item("state", item.name, key)] = plain, there, numel_of(shape)

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        if item not in self._made:
            self.source.read(item, start, stop, out)
            return
        part, (plain, there, numel) = packed(item.state), self._made[item]
        grain = part.grain if part is not None else 1
        first, last = start * grain // BLOCK * BLOCK, min(numel, -(-stop * grain // BLOCK) * BLOCK)
        for a in range(first, last, CHUNK):
            b = min(last, a + CHUNK)
            values = self._values(plain, there, a, b)
            if part is not None:
                values = self._packed(part.format, SIGNED[part.key], values)[part.scale]
            i, j = items_of(a, b, grain)  # the items of the requested tensor that `values` hold
            low, high = max(i, start), min(j, stop)
            out[low - start : high - start].copy_(values[low - i : high - i])

    def read_box(
        self, item: Item, region: TensorBox, start: int, stop: int, out: torch.Tensor
    ) -> None:
        if item in self._made:
            super().read_box(item, region, start, stop, out)
        else:
            self.source.read_box(item, region, start, stop, out)

    def _values(self, plain: Item, there: Format, a: int, b: int) -> torch.Tensor:
        """Return elements [a, b) of a moment in fp32. The range begins and ends with a block."""
        if not there.packed:
            out = torch.empty(b - a, dtype=torch.float32, device=_CPU)
            self.source.read(plain, a, b, out)
            return out
        parts = []
        for key in there.keys(plain.state):
            part = packed(key)
            assert part is not None
            i, j = items_of(a, b, part.grain)
            parts.append(torch.empty(j - i, dtype=part.dtype, device=_CPU))
            self.source.read(Item("state", plain.name, key), i, j, parts[-1])
        return decode(there, parts[0], parts[1], b - a, SIGNED[plain.state])

    def _packed(
        self, format: Format, signed: bool, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(-(-values.numel() // format.grain), dtype=format.dtype, device=_CPU)
        scales = torch.empty(-(-values.numel() // format.block), dtype=torch.float32, device=_CPU)
        encode(format, values, signed, codes, scales)
        return codes, scales


class Local(View):
    """`source` as a rank sees it that holds boxes of parameters: these, and their states, have the
    shape of the box.

    Attributes:
        odd: states of such parameters that have a shape of their own, and are left out.
    """

    @classmethod
    def of(cls, engine: Engine, source: Source) -> Source:
        """Return the view; `source` itself if this engine's ranks hold no boxes."""
        regions = {
            name: entry.region
            for entry in engine.entries
            if entry.region is not None
            for name in {source.stored_name(name) for name in entry.names}
        }
        if not regions:
            return source
        plain = FORMATS["fp32"]
        return cls(Recoded(source, lambda name, _: plain if name in regions else None), regions)

    def __init__(self, source: Source, regions: Mapping[str, TensorBox]) -> None:
        super().__init__(source)
        self._regions = regions
        self._items = dict(source.items())
        self.odd: list[Item] = []
        shapes = {
            item.name: stored.shape
            for item, stored in self._items.items()
            if item.kind == "parameter"
        }
        for item, stored in list(self._items.items()):
            if item.kind not in ("parameter", "state") or item.name not in regions:
                continue
            if stored.shape == shapes.get(item.name):
                self._items[item] = Stored(stored.dtype, regions[item.name].shape)
            else:
                self.odd.append(item)
                del self._items[item]
        for name, region in regions.items():
            for item, stored in source.packed_in(name, region).items():
                self._items.pop(_moment_of(item), None)
                self._items[item] = stored

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        region = self._regions.get(item.name) if item.kind in ("parameter", "state") else None
        if region is None:
            self.source.read(item, start, stop, out)
        else:
            self.source.read_box(item, region, start, stop, out)


def _moment_of(item: Item) -> Item:
    """Return the moment of which `item` is the codes or the scales."""
    part = packed(item.state)
    assert part is not None
    return Item(item.kind, item.name, part.key)
