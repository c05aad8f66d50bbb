"""A rank's interval of a tensor as a leaf that torch.distributed.checkpoint (DCP) saves and loads.

    tensor [4, 6], elements [4, 21)      .  .  .  .  4  5      box at (0, 4), of [1, 2]
                                         6  7  8  9 10 11      box at (1, 0), of [2, 6]
                                        12 13 14 15 16 17
                                        18 19 20  .  .  .      box at (3, 0), of [1, 3]

DCP supports n-dimensional boxes only, so an interval is stored as one or more boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from onefold.checkpoint.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split elements [start, stop) of a flattened tensor of n dims into at most 2n - 1 boxes
    (offsets, sizes).
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,), (stop - start,))] if len(shape) else [((), ())]
    row, rest = prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)

    def inside(index: int, a: int, b: int) -> list[Box]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(rest, a, b)]

    if first == last:
        return inside(first, head, tail)
    out = inside(first, head, row) if head else []
    first += head > 0
    if first < last:
        out.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    return out + inside(last, 0, tail)


class _IntervalMemory:
    """The interval's tensor, in a wrapper that deep-copies only these elements. DCP's staging would
    otherwise copy the whole storage of which the tensor is a view.
    """

    __slots__ = ("data",)

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __deepcopy__(self, memo: Any) -> _IntervalMemory:
        return _IntervalMemory(self.data.to("cpu", copy=True))


class DCPInterval(torch.Tensor):
    """Elements [start, start + len(local)) of a flattened tensor of `shape`. It has the shape of
    the whole tensor, but holds only `local`.

    It is a tensor subclass because DCP looks for shards in tensors only. It cannot be computed
    with.

    Args:
        local: [stop - start], contiguous. DCP saves from it and loads into it in place.
        shape: shape of the whole tensor.
        start: index of the first element in the flattened whole tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _held: _IntervalMemory
    start: int

    @staticmethod
    def __new__(
        cls: type[DCPInterval], local: torch.Tensor, shape: Sequence[int], start: int
    ) -> DCPInterval:
        return torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )

    def __init__(self, local: torch.Tensor, shape: Sequence[int], start: int) -> None:
        self._held, self.start = _IntervalMemory(local), start

    @property
    def local(self) -> torch.Tensor:
        """The memory of the interval, [stop - start]."""
        return self._held.data

    def _boxes(self) -> list[Box]:
        return boxes(self.size(), self.start, self.start + self.local.numel())

    # -- what DCP's planners call ------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for offsets, sizes in self._boxes():
            if index.offset is not None and tuple(index.offset) == offsets:
                return self.local[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)
        raise CheckpointError(
            f"the planner asked for the part of {index.fqn!r} at {index.offset}; this rank holds"
            f" {self!r}, whose parts begin at {[list(offsets) for offsets, _ in self._boxes()]}. A"
            " planner of your own must plan with the chunks that __create_chunk_list__ of the"
            " tensor names."
        )

    # -- what DCP's stagers call -------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        me, device = args[0], (kwargs or {}).get("device")
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return me._like(me.local)
        if func in (aten.new_empty.default, aten.empty_like.default, aten.zeros_like.default):
            return me._like(torch.zeros_like(me.local, device=device))
        if func is aten.clone.default:
            return me._like(me.local.clone())
        if func is aten.copy_.default and isinstance(args[1], DCPInterval):
            me.local.copy_(args[1].local)
            return me
        raise CheckpointError(
            f"{func} was called on {me!r}. It stands for a part of a tensor, for"
            " torch.distributed.checkpoint to save and to load; nothing can be computed with it."
            " `.local` is the part itself, one-dimensional."
        )

    def _like(self, local: torch.Tensor) -> DCPInterval:
        return DCPInterval(local, self.size(), self.start)

    def __deepcopy__(self, memo: Any) -> DCPInterval:
        return self._like(self.local.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"elements {self.start} to {self.start + self.local.numel()} of a tensor of shape"
            f" {tuple(self.size())}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            f"{self!r} was to be pickled, which would save this rank's part under the name of the"
            " whole. Save it by torch.distributed.checkpoint.save, with a planner that flattens"
            " state dicts (the default)."
        )


def _between_processes(leaf: DCPInterval) -> Any:
    """Pickle `leaf` for another process on this host, with its memory shared. Needed by
    `async_save(async_checkpointer_type=PROCESS)`.
    """
    return DCPInterval, (leaf.local, tuple(leaf.size()), leaf.start)


ForkingPickler.register(DCPInterval, _between_processes)
