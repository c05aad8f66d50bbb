"""A row of elements on disk, striped over the folders.

    region, bytes      | 0: S | 1: S | 2: S | 3: S | 4: rest |        S bytes a stripe, capacity a multiple of PAGE
    lane 0, file a     | 0: S | 2: S | 4: rest |
    lane 1, file b     | 1: S | 3: S |

A lane is one extent of one file; its stripes are contiguous. With one folder the region has one
lane.

[Note: what overlaps waits] If two transfers of one region share bytes and one of them is a write,
the later one begins after the earlier one has ended. A well written pipeline never runs into this
wait. Another one still never reads half-written bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onefold.device import new_lock
from onefold.offload.nvme.buffer import PAGE, bytes_of, rounded
from onefold.offload.nvme.datafile import READ, WRITE, DataFile
from onefold.offload.nvme.io import Io, Piece, Transfer


@dataclass(frozen=True)
class Lane:
    """Bytes [begin, begin + nbytes) of `file`."""

    file: DataFile
    begin: int
    nbytes: int


def lane_lengths(capacity: int, lanes: int, stripe: int) -> list[int]:
    """Return the bytes of a region on each of its lanes, in order."""
    full, rest = divmod(capacity, stripe)
    return [
        stripe * (full // lanes + (i < full % lanes)) + (rest if i == full % lanes else 0)
        for i in range(lanes)
    ]


def cut(
    lo: int, hi: int, lanes: int, stripe: int, block: int
) -> Iterator[tuple[int, int, int, int]]:
    """Cut bytes [lo, hi) of a region into pieces of at most `block` bytes. Yield (lane, offset in
    the lane, offset in the region, length).
    """
    while lo < hi:
        end = min(hi, lo + block)
        lane, offset = 0, lo
        if lanes > 1:
            row, inside = divmod(lo, stripe)
            end = min(end, lo - inside + stripe)
            lane, offset = row % lanes, row // lanes * stripe + inside
        yield lane, offset, lo, end - lo
        lo = end


@dataclass(frozen=True)
class _UnderWay:
    lo: int
    hi: int
    op: str
    transfer: Transfer


class Region:
    """`numel` elements of `dtype` on disk. Made by `Nvme.region`.

    Attributes:
        name: for messages.
        nbytes: numel × bytes of an element.
        capacity: bytes on disk: nbytes rounded up to a multiple of PAGE.
    """

    def __init__(
        self,
        io: Io,
        name: str,
        numel: int,
        dtype: torch.dtype,
        lanes: Sequence[Lane],
        stripe: int,
        block: int,
    ) -> None:
        self.name, self.numel, self.dtype = name, numel, dtype
        self.nbytes = numel * dtype.itemsize
        self.capacity = rounded(self.nbytes)
        self.lanes = tuple(lanes)
        self._io, self._stripe, self._block = io, stripe, block
        self._lock = new_lock()
        self._under_way: list[_UnderWay] = []
        self._freed = False

    def __repr__(self) -> str:
        return (
            f"Region({self.name!r}, {self.numel:,} × {self.dtype}, on"
            f" {', '.join(str(lane.file.path) for lane in self.lanes)})"
        )

    def read(self, start: int, into: torch.Tensor) -> Transfer:
        """Start to read elements [start, start + into.numel()) into `into`, which nobody may use
        until the transfer has ended.

        At the region's end the read also overwrites the bytes behind `into` up to the next page.

        Args:
            start: first element; its byte offset must be a multiple of PAGE.
            into: contiguous host tensor of the region's dtype. Its address must be a multiple of
                PAGE. It must end at a multiple of PAGE bytes or at the region's end. At the
                region's end its storage must reach to the next page (as with views of
                `Nvme.buffer`).

        Raises:
            ValueError: a condition is not met. Data is never copied to make it fit.
            TierError: the store is closed.
        """
        return self._begin(READ, start, into)

    def write(self, start: int, source: torch.Tensor) -> Transfer:
        """Start to write `source` to elements [start, start + source.numel()). Nobody may change
        `source` until the transfer has ended.

        Args and Raises: as for `read`.
        """
        return self._begin(WRITE, start, source)

    def release(self) -> bool:
        """Wait for all transfers, and refuse new ones from now on. For `Nvme.free`.

        Returns: False if the region was released before.
        """
        with self._lock:
            if self._freed:
                return False
            self._freed = True
            for other in self._under_way:
                other.transfer.settle()
            self._under_way.clear()
            return True

    def _begin(self, op: str, start: int, tensor: torch.Tensor) -> Transfer:
        self._check(op, start, tensor)
        if tensor.numel() == 0:
            return Transfer(0)
        lo = start * self.dtype.itemsize
        hi = rounded(lo + tensor.numel() * self.dtype.itemsize)
        pieces = self._pieces(tensor, lo, hi)
        with self._lock:
            if self._freed:
                raise ValueError(self._freed_words(op))
            self._under_way = [other for other in self._under_way if not other.transfer.done()]
            for other in self._under_way:  # [Note: what overlaps waits]
                if other.lo < hi and lo < other.hi and WRITE in (op, other.op):
                    other.transfer.settle()
            transfer = self._io.start(op, self.name, pieces)
            self._under_way.append(_UnderWay(lo, hi, op, transfer))
        return transfer

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether all of the region may be read into `tensor`: it begins on a page, and holds
        whole pages.
        """
        return not tensor.data_ptr() % PAGE and not self.nbytes % PAGE

    def _pieces(self, tensor: torch.Tensor, lo: int, hi: int) -> list[Piece]:
        """Cut the transfer of bytes [lo, hi) to or from the memory of `tensor`."""
        view = bytes_of(
            tensor.untyped_storage(), int(tensor.storage_offset()) * self.dtype.itemsize, hi - lo
        )
        pieces = [
            Piece(
                self.lanes[lane].file,
                self.lanes[lane].begin + offset,
                at,
                view[at - lo : at - lo + length],
            )
            for lane, offset, at, length in cut(lo, hi, len(self.lanes), self._stripe, self._block)
        ]
        view.release()
        return pieces

    def _check(self, op: str, start: int, tensor: torch.Tensor) -> None:
        """Check the arguments. Raises: ValueError: a condition of `read` is not met.
        TierError: the store is closed.
        """
        what = f"{op} of region {self.name!r}"
        size, count = self.dtype.itemsize, tensor.numel()
        if self._freed:
            raise ValueError(self._freed_words(op))
        self._io.check_open()
        if tensor.dtype != self.dtype:
            raise ValueError(
                f"{what}: the tensor holds {tensor.dtype}, the region {self.dtype}. Give a tensor"
                " of the region's dtype."
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what}: the tensor's elements do not lie side by side. Give a contiguous one."
            )
        if start < 0 or start + count > self.numel:
            raise ValueError(
                f"{what}: elements {start:,} to {start + count:,} were asked for; it has 0 to"
                f" {self.numel:,}."
            )
        if count == 0:
            return
        if start * size % PAGE:
            raise ValueError(
                f"{what}: element {start:,} lies at byte {start * size:,}. Start at a multiple of"
                f" {PAGE // size:,} elements."
            )
        if count * size % PAGE and start + count != self.numel:
            raise ValueError(
                f"{what}: it would end at byte {(start + count) * size:,}. "
                f"End at a multiple of {PAGE // size:,} elements, or with the region."
            )
        self._check_memory(what, tensor)

    def _check_memory(self, what: str, tensor: torch.Tensor) -> None:
        """Check where `tensor` lies. Raises: ValueError."""
        size, count = self.dtype.itemsize, tensor.numel()
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{what}: the tensor lies on {tensor.device}. Give one on the host (cpu), such as a"
                " view of Nvme.buffer."
            )
        if tensor.data_ptr() % PAGE:
            raise ValueError(
                f"{what}: the tensor's address is no multiple of {PAGE}. Give a view of Nvme.buffer"
                " that begins on a page."
            )
        behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * size
        if behind < rounded(count * size):
            raise ValueError(
                f"{what}: the tensor's memory ends {behind:,} bytes behind its begin, but the last"
                f" page is moved whole ({rounded(count * size):,} bytes). Give a view of"
                " Nvme.buffer, which holds whole pages."
            )

    def _freed_words(self, op: str) -> str:
        return (
            f"{op} of region {self.name!r}: it was freed, and its space may be another region's by"
            " now."
        )
