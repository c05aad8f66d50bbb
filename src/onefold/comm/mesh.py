"""The ranks that `shard()` is called on: those of a process group, or of a mesh of several axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from onefold.layout.holders import Mesh

#: Outer replicas of a hybrid division, as torchtitan and transformers name that axis.
REPLICATE = "dp_replicate"


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
    own = len(names) == 1 and len(found) < dist.get_world_size()
    group = mesh.get_group() if own else None
    return Mesh(tuple(names), tuple(mesh.shape), chosen, found, group)


def one_axis(ranks: Sequence[int], group: Any = None) -> Mesh:
    """Return a mesh of one data axis."""
    return Mesh(("data",), (len(ranks),), ("data",), tuple(ranks), group, plain=True)
