"""Two levels of ranks: `outer` groups of `inner` consecutive ranks (usually a node) each.

Six ranks in groups of three, on the left by their numbers, on the right by their positions in the
address space:

    group 0    rank 0   rank 1   rank 2         group 0    0   2   4        intra-group: 0 2 4  |  1 3 5
    group 1    rank 3   rank 4   rank 5         group 1    1   3   5        inter-group: 0 1  |  2 3  |  4 5

[Note: positions] A rank's position says which interval of a flat buffer it owns. Positions count
across the groups first. So the ranks of an `inter_group`, one of each group, own adjacent
intervals, and together these are one shard, the part of one rank in the division among an
`intra_group`. A gather between groups and then inside them therefore needs no reordering.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """`size` ranks in groups of `inner`.

    Raises:
        ValueError: the groups do not divide the ranks.
    """

    size: int
    inner: int

    def __post_init__(self) -> None:
        if self.inner < 1 or self.size % self.inner:
            fitting = [n for n in range(1, self.size + 1) if self.size % n == 0]
            raise ValueError(
                f"groups of {self.inner} ranks do not divide {self.size}"
                f" rank{'s' if self.size > 1 else ''}: choose a size of"
                f" {', '.join(map(str, fitting))}."
            )

    @property
    def outer(self) -> int:
        """The number of groups."""
        return self.size // self.inner

    @property
    def order(self) -> list[int]:
        """The rank number, 0 to size − 1, of each position."""
        return [(p % self.outer) * self.inner + p // self.outer for p in range(self.size)]

    def intra_group(self, position: int) -> list[int]:
        """Return the positions in the group of `position`, which is one of them."""
        return list(range(position % self.outer, self.size, self.outer))

    def inter_group(self, position: int) -> list[int]:
        """Return the positions, one of each group, that hold the same shard as `position`, which is
        one of them.
        """
        first = position // self.outer * self.outer
        return list(range(first, first + self.outer))

    @property
    def two_levels(self) -> bool:
        """Whether there are several groups of several ranks: moves run inside and between them."""
        return 1 not in (self.inner, self.outer)

    def position_of(self, rank: int) -> int:
        """Return the position of the rank with this number, 0 to size − 1."""
        return rank % self.inner * self.outer + rank // self.inner
