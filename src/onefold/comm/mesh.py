"""The ranks that `shard()` is called on: those of a process group, or of a mesh of several axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from onefold.layout.holders import Axes

#: Outer replicas of a hybrid division, as torchtitan and transformers name that axis.
REPLICATE = "dp_replicate"


@dataclass(frozen=True)
class Mesh:
    """Ranks by their coordinates.

    Attributes:
        axes: the axes, and which of them carry different data.
        ranks: the global rank of each number in the mesh, the last axis fastest.
        group: the process group of these ranks; None for the default group, or if there is none.
        plain: `shard()` was given no mesh: one data axis.
    """

    axes: Axes
    ranks: tuple[int, ...]
    group: Any = None
    plain: bool = False

    @cached_property
    def at(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each global rank."""
        return dict(zip(self.ranks, self.axes.coordinates, strict=True))

    @property
    def data_of(self) -> dict[int, tuple[int, ...]]:
        """The data coordinate of each global rank."""
        return dict(zip(self.ranks, self.axes.along(self.axes.data), strict=True))

    @property
    def places(self) -> dict[int, str]:
        """The place of each global rank, in words: "dp 1, tp 0"; none if there is one axis."""
        names = self.axes.names
        return {
            rank: ", ".join(f"{n} {i}" for n, i in zip(names, at, strict=True))
            for rank, at in self.at.items()
            if len(names) > 1
        }

    def axes_of(self, ranks: Sequence[int]) -> list[str]:
        """Return the axes along which some of `ranks` are apart."""
        along = zip(*(self.at[rank] for rank in ranks), strict=True)
        return [n for n, at in zip(self.axes.names, along, strict=True) if len({*at}) > 1]

    @property
    def several(self) -> bool:
        """Whether ranks along some axis compute with the same data."""
        return self.axes.data_size < self.axes.size

    @property
    def copies(self) -> tuple[int, ...]:
        """The global ranks that compute with the same data as this one, with it; none if every axis
        carries different data.
        """
        data_of = self.data_of
        mine = data_of[dist.get_rank()] if self.several else None
        return tuple(rank for rank, at in data_of.items() if at == mine)

    def ranks_of(self, inner: int, ranks: Sequence[int]) -> int:
        """Return how many of `ranks` (all of the mesh, or the holders of a box) are in a group of
        `inner` data ranks of the mesh. Experts have fewer holders in each group.

        Raises:
            ValueError: these are not neighbours among `ranks`: the axes stand in another order.
        """
        data_of = self.data_of
        places = {at: i for i, at in enumerate(sorted(set(data_of.values())))}
        blocks = [places[data_of[rank]] // inner for rank in sorted(ranks)]
        if blocks != sorted(blocks) or len(set(Counter(blocks).values())) > 1:
            raise ValueError(
                f"groups of {inner} data ranks are not neighbours in a mesh {self.describe()} with"
                f" data={self.axes.data}. Name the axes from the slowest link to the fastest: replicas"
                " first, tensor parallelism last; and choose groups that divide the data ranks."
            )
        return blocks.count(blocks[0])

    def describe(self) -> str:
        """Return the axes in words: "dp 2 × tp 4"."""
        return " × ".join(f"{n} {s}" for n, s in zip(self.axes.names, self.axes.sizes, strict=True))


def mesh_of(mesh: Any, data: Sequence[str] | str | None) -> Mesh:
    """Return the ranks of a DeviceMesh, by the arguments of `shard()`.

    Raises:
        ValueError: `mesh` is no DeviceMesh with names, this rank is not in it, or `data` does not
            name axes of it.
    """
    if isinstance(mesh, Mesh):  # of a simulation, which reads it before tensors are fake
        return mesh
    if (names := getattr(mesh, "mesh_dim_names", None)) is None:
        raise ValueError(
            f"mesh={mesh!r}: expected a DeviceMesh with names, so that `data` can name the axes that"
            " carry different data, such as"
            " init_device_mesh('cuda', (4, 2), mesh_dim_names=('dp', 'tp'))."
        )
    found = tuple(mesh.mesh.flatten().tolist())
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the given mesh (ranks {', '.join(map(str, found))}):"
            " only its members call shard()."
        )
    if data is None and len(names) > 1:
        raise ValueError(
            f"the mesh has the axes {', '.join(map(repr, names))}: give data=(...) the names of"
            " those whose ranks compute with different samples or tokens, such as"
            f" data=({names[0]!r},). The others (tensor parallelism) are then known to compute with"
            " the same."
        )
    chosen = names if data is None else (data,) if isinstance(data, str) else tuple(data)
    axes = Axes(tuple(names), tuple(mesh.shape), chosen)
    every = len(found) == dist.get_world_size()
    return Mesh(axes, found, None if every else mesh.get_group() if len(names) == 1 else None)


def one_axis(ranks: Sequence[int], group: Any = None) -> Mesh:
    """Return a mesh of one data axis."""
    return Mesh(Axes(("data",), (len(ranks),), ("data",)), tuple(ranks), group, plain=True)
