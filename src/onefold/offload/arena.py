"""Host memory for copies of device memory: a bounded number of bytes in slabs that are cut into
blocks and stay from step to step.

    slab 0   [a    ][b ][c        ][hole       ]        take: the first hole that is large enough, from the front
    slab 1   [d            ][hole              ]        give: the hole grows together with its neighbours

Slabs rather than a buffer for each tensor, since sequences come in other lengths from step to step,
and pinning memory anew takes longer than copying it. Beside a CUDA device they are pinned in place,
so that what is taken from the system is what is counted (the framework's own cache of pinned
buffers rounds each up to a power of two, and never gives one back).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

from onefold.device.pinned import HUGE_PAGE
from onefold.memory.pool import LARGE, MemoryLedger, empty

ALIGNMENT = 512  # bytes: where blocks begin
SLAB = 256 << 20  # bytes asked of the system at once, as far as the budget goes
IDLE_SLABS = "idle slabs"


class Slab:
    """One piece of host memory. `holes` are what is free of it, as (start, stop) in bytes, in
    order, none touching another.
    """

    def __init__(self, nbytes: int, pinned: torch.device | None) -> None:
        self.nbytes = nbytes
        try:
            # A page cannot be pinned twice, so what is pinned shares none with anything else.
            self.memory = empty(
                nbytes, torch.uint8, torch.device("cpu"), paged=pinned is not None, pinned=pinned
            )
        except (OSError, RuntimeError) as error:
            raise RuntimeError(_REFUSED.format(nbytes=nbytes, what=error)) from error
        self.holes = [(0, nbytes)]

    def cut(self, nbytes: int) -> int | None:
        """Where a block of `nbytes` begins that is taken from the first hole with room for it; None
        without one.
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
    """`nbytes` bytes from `start` on in a slab; `room` with what aligns the next one."""

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
            category: under which `ledger` counts blocks; the rest of the slabs is "idle slabs".
            pinned: the device that copies from them and to them by itself.
            settle: waits for copies that are under way; called before memory goes back to the
                system.
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
        """A block with undefined contents, or None where the budget has no room for it.

        Raises:
            RuntimeError: the budget has room, but the system gives no memory.
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
        """Take no more; slabs go as soon as their last block has come back."""
        self.budget = 0
        self.trim()

    def _grow(self, room: int) -> Slab | None:
        left = self.budget - self.reserved
        if left < room <= left + sum(slab.nbytes for slab in self.slabs if slab.idle):
            self.trim()  # each of them is too small for this one
            left = self.budget - self.reserved
        if left < room:
            return None
        nbytes = min(max(room, SLAB), left)
        # Large ones are whole huge pages: more would be mapped than is counted otherwise.
        unit = HUGE_PAGE if nbytes // HUGE_PAGE * HUGE_PAGE >= max(room, LARGE) else ALIGNMENT
        slab = Slab(nbytes // unit * unit, self.pinned)
        self.slabs.append(slab)
        self._reserve(slab.nbytes)
        return slab

    def _count(self, nbytes: int) -> None:
        self.used += nbytes
        changes = [(IDLE_SLABS, -nbytes), (self.category, nbytes)]
        # What goes first: the sum has no peak between the two
        for name, change in changes if nbytes > 0 else reversed(changes):
            self.ledger.add(name, change)

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.ledger.add(IDLE_SLABS, nbytes)


_REFUSED = (
    "the system gave no {nbytes:,} bytes of host memory, although the budget for activations has"
    " room for them: {what}. Give a smaller budget, or free memory on this machine."
)
