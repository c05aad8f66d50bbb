"""What this rank holds of a parameter: elements of its master weights and of its optimizer's
states, read and written wherever they rest.

| a flat buffer's masters are         | `divided` | `shared`              |
|-------------------------------------|-----------|-----------------------|
| whole on every rank (stage 0)       |           | on more than one rank |
| this rank's interval                | yes       |                       |
| an interval that other ranks have   | yes       | yes                   |

| where they rest (`flat.storage`)    | `elements`                                          |
|-------------------------------------|-----------------------------------------------------|
| in memory                           | a view                                              |
| on NVMe                             | `OnDisk`, which is read and written some at a time  |
| encoded                             | what they stand for, decoded all at a time          |

Checkpoints, whole state dicts and averages ask here who holds what, and for elements wherever they
rest. Elements of an entry are counted from its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from onefold.comm import Group
from onefold.offload.nvme_storage import NvmeStorage
from onefold.offload.storage import grain_of_kind, state_kind
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.storageless import StatePlace
from onefold.runtime.stream import held_by

#: Elements moved to or from NVMe at a time.
CHUNK = 4 << 20


def divided(flat: Flat) -> bool:
    """Optimizers of different ranks hold different elements."""
    return not flat.whole_master


def shared(flat: Flat) -> bool:
    """Optimizers of several ranks hold the same elements, of which each accounts for an
    interval.
    """
    return flat.owned != flat.interval


def holders(engine: Engine, flat: Flat) -> Group:
    """The ranks that hold the same elements as this one, where they are `shared`."""
    return engine.group if flat.whole_master else engine.group.inter_group


def follow_masters(flat: Flat) -> None:
    """Masters on NVMe were written to by elements: bring what gathers read up to date."""
    if isinstance(flat.storage, NvmeStorage):
        flat.storage.renew()


@dataclass(frozen=True)
class OnDisk:
    """Elements [start, stop) of what `storage` has on NVMe as `kind`, or items for some elements
    each: stands for a one-dimensional tensor, and is never whole in memory.
    """

    storage: NvmeStorage
    kind: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.regions[self.kind].dtype

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """The elements in order, in host tensors."""
        for a in range(self.start, self.stop, CHUNK):
            yield self.storage.part(self.kind, a, min(self.stop, a + CHUNK))

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Those in [start, stop), counted from the first of these, in host memory of their own."""
        end = self.stop if stop is None else self.start + stop
        return self.storage.part(self.kind, self.start + start, end)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite those from `start` on, counted from the first of these."""
        self.storage.write_part(self.kind, self.start + start, values.to("cpu", self.dtype))


def elements(entry: Entry, kind: str, value: torch.Tensor, x: int, y: int) -> torch.Tensor | OnDisk:
    """Elements [x, y) of `entry` (or the items for them), which this rank holds.

    Args:
        kind: "master", or that of a state (`state_kind`).
        value: the optimizer's parameter, or its state. What is returned is a view of it where it is
            in memory.
    """
    flat, grain = entry.flat, grain_of_kind(kind)
    if isinstance(flat.storage, NvmeStorage) and (kind == "master" or value.device.type == "meta"):
        first = entry.slot.start - flat.owned[0]
        return OnDisk(flat.storage, kind, *items_of(first + x, first + y, grain))
    if kind == "master" and flat.storage.encoded:
        first = entry.slot.start - flat.owned[0]
        return flat.storage.load()[first + x : first + y]
    first, _ = held_by(entry, flat.rank)
    return value.detach().reshape(-1)[slice(*items_of(x - first, y - first, grain))]


def new_state(entry: Entry, key: str, dtype: torch.dtype, disk: bool) -> torch.Tensor:
    """A state of zeros for the elements of `entry` that this rank holds, or its place on NVMe."""
    shape: tuple[int, ...] = tuple(entry.param.shape)
    if packed(key) is not None:
        shape = (-(-entry.param.numel() // grain_of(key)),)
    if not disk:
        return torch.zeros(shape, dtype=dtype, device=entry.param.device)
    assert isinstance(entry.flat.storage, NvmeStorage)
    entry.flat.storage.region(state_kind(key, dtype), dtype)
    return StatePlace.of(shape, dtype)


def outside(entry: Entry, x: int, y: int, key: str = "") -> tuple[tuple[int, ...], int, int]:
    """Elements [x, y) of `entry` as the parameter is known outside, of which a tile is a part: the
    whole shape of it (or of its state `key`), and the interval.
    """
    grain, part = grain_of(key), entry.part
    shape = part.shape if packed(key) is None else (-(-part.numel // grain),)
    return shape, *items_of(part.first + x, part.first + y, grain)
