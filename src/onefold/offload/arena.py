"""Host memory for copies of device memory: slabs, cut into blocks, within a budget.

    slab 0   [a    ][b ][c        ][hole       ]        take: the first hole that is large enough, from the front
    slab 1   [d            ][hole              ]        give: the hole grows together with its neighbours

Slabs stay allocated from step to step. A buffer for each tensor would be slow: sequence lengths
change from step to step, and pinning new memory takes longer than copying it. With a CUDA device
the slabs are pinned in place, and the ledger counts exactly the bytes taken from the system.
(PyTorch's cache of pinned buffers rounds each one up to a power of two, and never frees one.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from onefold.device.pinned import HUGE_PAGE
from onefold.memory import LARGE, MemoryLedger, empty

ALIGNMENT = 512  # bytes: where blocks begin
SLAB = 256 << 20  # bytes asked of the system at once, as far as the budget goes
IDLE_SLABS = "idle slabs"


class Slab:
    """One piece of host memory.

    `holes`: its free intervals as (start, stop) in bytes, in order; no two touch.
    """

    def __init__(self, nbytes: int, pinned: torch.device | None) -> None:
        self.nbytes = nbytes
        try:
            # A page cannot be pinned twice, so a pinned slab shares no page with other memory.
            self.memory = empty(
                nbytes, torch.uint8, torch.device("cpu"), paged=pinned is not None, pinned=pinned
            )
        except (OSError, RuntimeError) as error:
            raise RuntimeError(_REFUSED.format(nbytes=nbytes, what=error)) from error
        self.holes = [(0, nbytes)]

    def cut(self, nbytes: int) -> int | None:
        """Take `nbytes` from the first hole that has room and return where they begin; None if no
        hole has room.
        """
        for i, (start, stop) in enumerate(self.holes):
            if stop - start >= nbytes:
                self.holes[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def put_back(self, start: int, nbytes: int) -> None:
        stop = start + nbytes
        i = bisect_left(self.holes, (start, stop))
        if i < len(self.holes) and self.holes[i][0] == stop:
            stop = self.holes.pop(i)[1]
        if i and self.holes[i - 1][1] == start:
            i -= 1
            start = self.holes.pop(i)[0]
        self.holes.insert(i, (start, stop))

    @property
    def idle(self) -> bool:
        return self.holes == [(0, self.nbytes)]


class Block(NamedTuple):
    """`nbytes` bytes of a slab from byte `start` on; `room`: the same with alignment."""

    slab: Slab
    start: int
    nbytes: int
    room: int

    @property
    def bytes(self) -> torch.Tensor:
        """uint8, [nbytes]"""
        return self.slab.memory[self.start : self.start + self.nbytes]


class Arena:
    """Blocks of host memory; all slabs together never exceed `budget` bytes.

    Attributes:
        used: bytes in blocks, alignment included. reserved: bytes of all slabs.
    """

    def __init__(
        self,
        budget: int,
        category: str,
        ledger: MemoryLedger,
        *,
        pinned: torch.device | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            category: the name under which `ledger` counts blocks. It counts the free part of the
                slabs as "idle slabs".
            pinned: the device that copies directly from and to the slabs; None: not pinned.
            settle: waits for copies under way; called before memory goes back to the system.
        """
        self.budget, self.category, self.ledger, self.pinned, self.settle = (
            budget,
            category,
            ledger,
            pinned,
            settle,
        )
        self.slabs: list[Slab] = []
        self.used = self.reserved = 0

    def take(self, nbytes: int) -> Block | None:
        """Return a block with undefined contents, or None if the budget has no room for it.

        Raises:
            RuntimeError: the budget has room, but the system has no memory.
        """
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if room > self.budget:
            return None
        for slab in self.slabs:
            if (start := slab.cut(room)) is not None:
                break
        else:
            grown = self._grow(room)
            if grown is None:
                return None
            slab, start = grown, grown.cut(room)
        assert start is not None
        self._count(room)
        return Block(slab, start, nbytes, room)

    def give(self, block: Block) -> None:
        block.slab.put_back(block.start, block.room)
        self._count(-block.room)
        if not self.budget and block.slab.idle:
            self.trim()

    def trim(self) -> None:
        """Give slabs without blocks back to the system."""
        gone = [slab for slab in self.slabs if slab.idle]
        if gone and self.settle is not None:
            self.settle()
        self.slabs = [slab for slab in self.slabs if not slab.idle]
        self._reserve(-sum(slab.nbytes for slab in gone))

    def close(self) -> None:
        """Give out no more blocks. A slab is freed when its last block has come back."""
        self.budget = 0
        self.trim()

    def _grow(self, room: int) -> Slab | None:
        left = self.budget - self.reserved
        if left < room <= left + sum(slab.nbytes for slab in self.slabs if slab.idle):
            self.trim()  # idle slabs are each too small for this block
            left = self.budget - self.reserved
        if left < room:
            return None
        nbytes = min(max(room, SLAB), left)
        # Large slabs are whole huge pages. Otherwise the system would map more than is counted.
        unit = HUGE_PAGE if nbytes // HUGE_PAGE * HUGE_PAGE >= max(room, LARGE) else ALIGNMENT
        slab = Slab(nbytes // unit * unit, self.pinned)
        self.slabs.append(slab)
        self._reserve(slab.nbytes)
        return slab

    def _count(self, nbytes: int) -> None:
        self.used += nbytes
        changes = [(IDLE_SLABS, -nbytes), (self.category, nbytes)]
        # The decrease is recorded first, so the sum has no false peak in between
        for name, change in changes if nbytes > 0 else reversed(changes):
            self.ledger.add(name, change)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.ledger.add(IDLE_SLABS, nbytes)


_REFUSED = (
    "the system gave no {nbytes:,} bytes of host memory, although the budget for activations has"
    " room for them: {what}. Give a smaller budget, or free memory on this machine."
)
