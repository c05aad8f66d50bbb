"""Permutations and selections of any number of samples, in memory that does not grow with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
#: Numbers from which on a permutation is computed where it is asked for, and not kept as an array.
LARGE = 1 << 20
#: Of a Feistel network. Four already make a pseudo-random permutation (Luby and Rackoff, 1988).
_ROUNDS = 6


class Numbers(Protocol):
    """What maps positions to numbers: an array, or one of the classes here."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Indices, /) -> Indices: ...


def permutation(count: int, draw: np.random.Generator) -> Numbers:
    """0 to count - 1 in an order that `draw` decides."""
    if count < LARGE:
        return draw.permutation(count).astype(np.int64)
    return Computed(count, draw.integers(0, 1 << 64, _ROUNDS, np.uint64))


@dataclass(frozen=True)
class Computed:
    """A permutation as a Feistel network over the next power of 4, walked on until it leads to a
    number below `count`.
    """

    count: int
    keys: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Indices, /) -> Indices:
        found = self._mixed(positions.astype(np.uint64))
        while (beyond := found >= self.count).any():
            found[beyond] = self._mixed(found[beyond])
        return found.astype(np.int64)

    def _mixed(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(max(1, ((self.count - 1).bit_length() + 1) // 2))
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = numbers >> half, numbers & mask
        for key in self.keys:
            # The finalizer of splitmix64; products overflow on purpose
            said = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            said = (said ^ (said >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((said ^ (said >> np.uint64(31))) & mask)
        return (left << half) | right


@dataclass(frozen=True)
class AllBut:
    """0 to count - 1 without some, in order. `without`: sorted."""

    count: int
    without: Indices
    _before: Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # How many of those that stay stand before each that does not
        object.__setattr__(self, "_before", self.without - np.arange(len(self.without)))

    def __len__(self) -> int:
        return self.count - len(self.without)

    def __getitem__(self, positions: Indices, /) -> Indices:
        return positions + np.searchsorted(self._before, positions, side="right")

    def below(self, number: int) -> int:
        """How many of those that stay are smaller."""
        return int(number - np.searchsorted(self.without, number))
