"""State that rests on NVMe, on its way to and from a checkpoint: a chunk at a time, never whole in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from onefold.checkpoint.pieces import Share
from onefold.checkpoint.source import Item, Source
from onefold.offload.nvme_storage import NvmeStorage
from onefold.offload.storage import grain_of_kind
from onefold.recipe.moments import items_of
from onefold.runtime.flat import Entry

#: Elements moved at a time.
CHUNK = 4 << 20


@dataclass(frozen=True)
class OnDisk:
    """Elements [start, stop) of what `offloaded` has on NVMe as `kind`: stands for a
    one-dimensional tensor in a save.
    """

    offloaded: NvmeStorage
    kind: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.offloaded.regions[self.kind].dtype

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """The elements in order, in host tensors."""
        for a in range(self.start, self.stop, CHUNK):
            yield self.offloaded.part(self.kind, a, min(self.stop, a + CHUNK))


def held_on_disk(entry: Entry, kind: str, start: int, stop: int) -> OnDisk:
    """Elements [start, stop) of the flattened parameter `entry`, of what its home has as `kind`; or
    the items for them.
    """
    offloaded = entry.flat.offloaded
    assert offloaded is not None
    base = entry.slot.start - entry.flat.owned[0]
    return OnDisk(offloaded, kind, *items_of(base + start, base + stop, grain_of_kind(kind)))


def read_to_disk(
    source: Source, item: Item, entry: Entry, kind: str, start: int, stop: int
) -> None:
    """Elements [start, stop) of `entry`, a part of `item`, into what its home has as `kind`; or the
    items for them.
    """
    offloaded, grain = entry.flat.offloaded, grain_of_kind(kind)
    assert offloaded is not None
    base, first = (entry.slot.start - entry.flat.owned[0]) // grain, entry.part.first // grain
    start, stop = items_of(start, stop, grain)
    for a in range(start, stop, CHUNK):
        b = min(stop, a + CHUNK)
        part = torch.empty(b - a, dtype=offloaded.regions[kind].dtype)
        source.read(item, first + a, first + b, part)
        offloaded.write_part(kind, base + a, part)


def held(share: Share, kind: str, value: torch.Tensor) -> torch.Tensor | OnDisk:
    """The share of `value`, the optimizer's object or a state of it; where it is on NVMe, what
    stands for it.
    """
    offloaded = share.flat.offloaded
    if (
        offloaded is not None
        and offloaded.on_disk
        and (kind == "master" or value.device.type == "meta")
    ):
        return held_on_disk(share.entry, kind, share.start, share.stop)
    if kind == "master" and share.flat.route.stored:  # encoded: what it stands for
        a, b = share.flat.local(share.entry)
        return share.of(share.flat.load_master()[a - share.flat.owned[0] : b - share.flat.owned[0]])
    return share.of(value, grain_of_kind(kind))
