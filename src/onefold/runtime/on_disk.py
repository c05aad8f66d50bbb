"""Elements that are stored in files: read and written in pieces, never whole in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

#: Elements moved to or from the disk at a time.
CHUNK = 4 << 20


class Regions(Protocol):
    """A storage that has a region on disk for each kind of value, see offload/nvme_storage.py."""

    def dtype_of(self, kind: str) -> torch.dtype: ...

    def part(self, kind: str, start: int, stop: int) -> torch.Tensor: ...

    def write_part(self, kind: str, start: int, values: torch.Tensor) -> None: ...

    def chunks(self) -> Iterator[tuple[int, int]]: ...


@dataclass(frozen=True)
class OnDisk:
    """Stands for a one-dimensional tensor: elements [start, stop) of the region `kind` of
    `storage`, or items that stand for some elements each. Elements are counted from the first that
    this rank owns.
    """

    storage: Regions
    kind: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype_of(self.kind)

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the elements in order, in host tensors."""
        for a in range(self.start, self.stop, CHUNK):
            yield self.storage.part(self.kind, a, min(self.stop, a + CHUNK))

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read elements [start, stop), counted from the first of these, into new host memory."""
        end = self.stop if stop is None else self.start + stop
        return self.storage.part(self.kind, self.start + start, end)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the elements from `start` on, counted from the first of these."""
        self.storage.write_part(self.kind, self.start + start, values.to("cpu", self.dtype))
