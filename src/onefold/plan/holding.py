"""What an engine holds, in integers: its ledger of memory (memory/pool.py) and its pool, of which
buffers are taken and given back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from onefold.memory import IDLE


@dataclass
class Buffer:
    """`numel` elements of a dtype, entered under a category; `pooled`: it goes back to the pool."""

    numel: int
    dtype: torch.dtype
    category: str
    pooled: bool = True

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Holding:
    """Bytes by category `now`; `best` when their sum was largest, over all and since somebody last
    looked.
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = 0
        self.best: dict[str, int] = {}
        self.best_total = 0
        self.free: dict[tuple[int, torch.dtype], int] = defaultdict(int)
        self._high: tuple[int, dict[str, int]] = (0, {})

    def _add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        self.total += nbytes
        if self.total > self.best_total:
            self.best_total, self.best = self.total, dict(self.now)
        if self.total > self._high[0]:
            self._high = self.total, dict(self.now)

    def _take(self, numel: int, dtype: torch.dtype, category: str) -> Buffer:
        buffer = Buffer(numel, dtype, category)
        if self.free[numel, dtype]:
            self.free[numel, dtype] -= 1
            self._add(IDLE, -buffer.nbytes)
        else:
            self._drain()
        self._add(category, buffer.nbytes)
        return buffer

    def _give(self, buffer: Buffer) -> None:
        self._add(buffer.category, -buffer.nbytes)
        self.free[buffer.numel, buffer.dtype] += 1
        self._add(IDLE, buffer.nbytes)

    def _drain(self) -> None:
        self._add(IDLE, -self.now[IDLE])
        self.free.clear()

    @property
    def peak(self) -> dict[str, int]:
        return {k: v for k, v in self.best.items() if v}
