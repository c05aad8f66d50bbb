"""Parameters that are boxes of global tensors: DTensors, as tensor and expert parallelism make them.

The engine works on this rank's local part as on any plain parameter. Only its module sees a DTensor,
and only in a pass. It is one object for good, the leaf of the graph:

    entry.local          plain, [local shape]     a view of the gathered buffer
        │ its local tensor while it is gathered
        ▼
    entry.compute        DTensor, [global shape]  what the module sees; autograd gives it the gradient, and
                                                  `Box.settle` leaves this rank's part of the gradient there

[Note: gradients of DTensors] A gradient may come with other placements than its parameter has. In
each dimension of the parameter's mesh:

| parameter | gradient  | becomes                                                                      |
|-----------|-----------|------------------------------------------------------------------------------|
| Shard     | the same  | its local part                                                               |
| Shard     | other     | redistributed to the same (a row-wise embedding's gradient arrives whole)    |
| Replicate | Replicate | its local part: every rank has the same                                      |
| Replicate | Partial   | its local part, multiplied by the ranks of the dimension: the sum over the   |
|           |           | holders counts each part once and divides by the copies (layout/holders.py)  |
| Replicate | Shard     | redistributed to Replicate                                                   |

So a partial gradient is summed over `tp` in the same message as over the data axes.

[Note: packed parts] `_StridedShard(d, f)` divides a weight that packs f weights along dimension d, such
as gate_up_proj: a rank has its part of each, one behind the other. It is a box of the same memory with
that dimension unfolded:

    [f * n, k] over 2 ranks, f = 2        unfolded: [f, n, k], divided along n
    gate  rows 0 .. n      rank 0: the first halves of both, [2, n / 2, k] = [n, k]
    up    rows n .. 2n     rank 1: the second halves

The engine needs no more than this. What asks for the box in the global tensor itself (`Box.here`:
checkpoints) is refused.

[Note: a DTensor follows its buffer] Code may keep the DTensor longer than its unit is gathered: a
closure, the arguments of a checkpoint. While its unit is not gathered, a `Freed` takes the place of its
memory; when it is gathered again, the DTensor gets it back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.comm import CollectiveContext, Group
from onefold.layout.holders import AxisCut, Holders, Mesh, TensorBox, region_of

if TYPE_CHECKING:
    from onefold.runtime.units import UnitSpec


@dataclass(frozen=True)
class BoxKind:
    """What DTensors of one device mesh and the same placements have in common.

    Attributes:
        mesh: their DeviceMesh. placements: one for each of its dimensions.
        coordinates: of every global rank in its own such mesh.
        holders: the ranks that hold the same boxes.
    """

    mesh: Any
    placements: tuple[Any, ...]
    coordinates: dict[int, tuple[int, ...]]
    holders: Holders

    @property
    def divided(self) -> bool:
        """Whether ranks hold different parts."""
        return len(self.holders.groups) > 1

    def describe(self) -> str:
        """Return the placements in words: "Shard(dim=0) over tp"."""
        names = self.mesh.mesh_dim_names or [f"axis {i}" for i in range(self.mesh.ndim)]
        return ", ".join(f"{p} over {n}" for p, n in zip(self.placements, names, strict=True))


class Box:
    """The box of one parameter.

    Attributes:
        kind: see `BoxKind`. shape, stride: of the global tensor.
        local_shape, numel: of what this rank holds. largest: elements of the largest part that any
            rank holds.
        came_partial: of the last gradient, ranks that hold the same had parts.
        on_meta: when `shard()` was called it had no value; rank 0 makes one for the global tensor.
    """

    def __init__(self, kind: BoxKind, param: Any) -> None:
        self.kind, self.shape, self.stride = kind, param.shape, tuple(param.stride())
        self.local_shape, self.numel = param._local_tensor.shape, param._local_tensor.numel()
        #: {dimension: weights packed along it}, see [Note: packed parts]
        self.packed = {p.dim: p.split_factor for p in kind.placements if _is_packed(p)}
        self.unfolded: list[int] = []
        for dim, size in enumerate(self.shape):
            pieces = self.packed.get(dim)
            self.unfolded += [size] if pieces is None else [pieces, size // pieces]
        self.largest = self._region([0] * kind.mesh.ndim).numel  # the first ranks have it
        self.came_partial = self.on_meta = False

    @property
    def divided(self) -> bool:
        return self.kind.divided

    @property
    def here(self) -> TensorBox:
        """What this rank holds of the global tensor.

        Raises:
            ValueError: these are parts of packed weights.
        """
        if self.packed:
            raise ValueError(
                f"a weight of shape {tuple(self.shape)} is placed as {self.kind.describe()}: a rank's"
                " part is no box of it, so it cannot be saved in a checkpoint. Read the whole by"
                " onefold.full_state_dict(), or divide the experts by expert parallelism."
            )
        return self._region(self.kind.mesh.get_coordinate())

    def _region(self, at: Sequence[int]) -> TensorBox:
        """Return the box of the unfolded tensor at some coordinates of its mesh."""
        return region_of(
            self.unfolded,
            [
                AxisCut(p.dim + sum(d <= p.dim for d in self.packed), self.kind.mesh.size(i), at[i])
                for i, p in enumerate(self.kind.placements)
                if divides(p)
            ],
        )

    def part(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the part of a global tensor that this rank (or that global rank) holds: a view,
        whose elements are in the order of the local tensor.
        """
        kind = self.kind
        at = kind.mesh.get_coordinate() if rank is None else kind.coordinates[rank]
        return whole.view(self.unfolded)[self._region(at).slices]

    def parts(self, whole: torch.Tensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the parts of a global tensor, each by the place of its first holder in `ranks`."""
        return {at: self.part(whole, ranks[at]) for at in self.firsts(ranks)}

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the global tensor, from each rank's box of it. Collective over the box's own mesh,
        by DTensor.
        """
        whole: torch.Tensor = self.over(local.to(self.kind.mesh.device_type)).full_tensor()  # type: ignore[attr-defined]
        return whole

    def over(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor over `local`, outside the graph."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(self.shape, self.stride, local.dtype)
        return dtensor_over(
            local, DTensorSpec(self.kind.mesh, self.kind.placements, tensor_meta=meta)
        )

    def leaf(self, local: torch.Tensor, offset: int, trained: bool) -> nn.Parameter:
        """Return the parameter that a pass sees: a DTensor over what lies at `offset` in a buffer.
        (It has that offset itself, or torch.compile cannot imitate it.)
        """
        self.freed = Freed(local, offset)
        return nn.Parameter(self.over(self.freed), requires_grad=trained)

    def firsts(self, ranks: Sequence[int]) -> list[int]:
        """Return the place, in `ranks`, of one holder of each box: the one that is first there."""
        return [min(map(ranks.index, group)) for group in self.kind.holders.groups]

    def settle(self, leaf: torch.Tensor) -> None:
        """Bring the gradient that has come to `leaf` into the placements of the parameter, by the
        table of [Note: gradients of DTensors].
        """
        from torch.distributed.tensor import Replicate

        grad: Any = leaf.grad
        if grad is None:
            return
        wanted, factor = list[Any](), 1
        for i, (own, came) in enumerate(zip(self.kind.placements, grad.placements, strict=True)):
            if divides(own):
                wanted.append(own)
            elif came.is_partial("sum"):
                wanted.append(came)
                factor *= self.kind.mesh.size(i)
            else:
                wanted.append(Replicate())
        self.came_partial = factor > 1
        if tuple(wanted) != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        local = grad._local_tensor
        if type(local).__name__ == "AsyncCollectiveTensor":  # a collective under way
            local = local.wait()
        if factor > 1:
            local = local * factor
        if local is not leaf.grad._local_tensor:  # type: ignore[union-attr]
            leaf.grad = self.over(local)


class Freed(torch.Tensor):
    """The local tensor of a DTensor whose unit is not gathered: it has a shape and no memory."""

    def __new__(cls, local: torch.Tensor, offset: int) -> Any:
        return cls._make_wrapper_subclass(
            cls, local.shape, local.stride(), offset, dtype=local.dtype, device=local.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Autograd asks for views of a leaf to find its node
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            return cls(args[0], args[0].storage_offset())
        raise RuntimeError(
            f"{func} was given a DTensor parameter that is not gathered: code has kept it from an"
            " earlier pass, or from another module's. Read it from its module again."
        )


def dtensor_over(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return a DTensor over `local`, outside the graph."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return made


# -- at the start ----------------------------------------------------------------------------------


def is_dtensor(t: Any) -> bool:
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # not imported: there is none
    return tensors is not None and isinstance(t, tensors.DTensor)


def local_of(t: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, over the same memory; any other tensor itself."""
    local: torch.Tensor = getattr(t, "_local_tensor", t)
    return local


def find_boxes(specs: Sequence[UnitSpec], group: Group, mesh: Mesh) -> Holders:
    """Set `Found.box` of the parameters that are DTensors. Returns the holders of all others: every
    rank of the mesh. Collective.

    Raises:
        ValueError: on every rank that sees it: a DTensor lies on other ranks than the mesh, its
            placements cannot be divided further, or ranks have different ones.
    """
    whole = Holders.of(dict.fromkeys(mesh.ranks), mesh.data_of)
    if mesh.plain:
        return whole
    kinds: dict[Any, list[Any]] = {}
    said = []
    for f in (found for spec in specs for found in spec.found if is_dtensor(found.param)):
        param: Any = f.param
        _refuse(f.names[0], param, mesh)
        kinds.setdefault((param.device_mesh, param.placements), []).append(f)
        said.append((f.names[0], str(param.placements), tuple(param.device_mesh.shape)))
    context = CollectiveContext("control", "(axes)", 0, "state")
    told = group.tell((said, [device_mesh.get_coordinate() for device_mesh, _ in kinds]), context)
    if any(theirs != said for theirs, _ in told):
        raise ValueError(
            "ranks of the mesh have different DTensors among their parameters, other placements of"
            " them, or device meshes of other shapes. Every rank must parallelize the same model by"
            " the same plan."
        )
    for number, ((device_mesh, placements), of_kind) in enumerate(kinds.items()):
        coordinates = {
            rank: tuple(at[number]) for rank, (_, at) in zip(group.ranks, told, strict=True)
        }
        if group.stands_for_all:  # nobody answers
            coordinates = mesh.along(device_mesh.mesh_dim_names)
        keys = {
            rank: tuple(c for c, p in zip(at, placements, strict=True) if divides(p))
            for rank, at in coordinates.items()
        }
        try:
            holders = Holders.of(keys, mesh.data_of)
        except ValueError as error:
            raise ValueError(f"parameter {of_kind[0].names[0]!r}: {error}") from None
        kind = BoxKind(device_mesh, tuple(placements), coordinates, holders)
        for f in of_kind:
            f.box = Box(kind, f.param)
    return whole


def _ranks_in(device_mesh: Any) -> list[int]:
    """Return the global ranks of a device mesh."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():  # of a simulation: fake tensors have no values
        ranks: list[int] = device_mesh.mesh.flatten().tolist()
    return ranks


def _refuse(name: str, param: Any, mesh: Mesh) -> None:
    outside = sorted(set(_ranks_in(param.device_mesh)) - set(mesh.ranks))
    if outside:
        raise ValueError(
            f"parameter {name!r} is a DTensor over ranks that the given mesh lacks"
            f" ({', '.join(map(str, outside[:8]))}). Give shard() the mesh of all ranks that run this"
            " module: all axes but that of the pipeline."
        )
    for placement in param.placements:
        if not (placement.is_replicate() or divides(placement)):
            raise ValueError(
                f"parameter {name!r} is placed as {placement}: shard() divides what is Shard or"
                " Replicate. Redistribute it to Replicate() first."
            )
    for i, packed in enumerate(param.placements):
        if not _is_packed(packed):
            continue
        size, parts = param.shape[packed.dim], param.device_mesh.size(i)
        others = [p for p in param.placements if p is not packed and divides(p)]
        if size % (packed.split_factor * parts) or any(p.dim == packed.dim for p in others):
            raise ValueError(
                f"parameter {name!r} of shape {tuple(param.shape)} is placed as {packed} over"
                f" {parts} ranks: shard() divides {packed.split_factor} packed weights if each has a"
                f" multiple of {parts} rows, and nothing else divides them. Keep them as weights of"
                " their own, or redistribute it to Shard."
            )


def divides(placement: Any) -> bool:
    """Whether ranks hold different parts by this placement."""
    return placement.is_shard() or _is_packed(placement)


def _is_packed(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"  # is_shard() does not know it
