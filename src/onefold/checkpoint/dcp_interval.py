"""A rank's interval of a tensor as a leaf that torch.distributed.checkpoint (DCP) saves and loads.

    tensor [4, 6], elements [4, 21)      .  .  .  .  4  5      box at (0, 4), of [1, 2]
                                         6  7  8  9 10 11      box at (1, 0), of [2, 6]
                                        12 13 14 15 16 17
                                        18 19 20  .  .  .      box at (3, 0), of [1, 3]

DCP supports n-dimensional boxes only, so an interval is stored as one or more boxes. An interval of
a box of the tensor, as tensor parallelism leaves it to a rank, consists of boxes too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from onefold.checkpoint.errors import CheckpointError
from onefold.layout.holders import BoxInterval, TensorBox, whole_region

SAFETENSORS = SerializationFormat.SAFETENSORS


def from_dcp(name: str) -> Any:
    """Return a local variable of the save or load of torch.distributed.checkpoint that is under way in
    this thread; None if there is none. It gives leaves and `Stateful` values neither writer nor reader.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in _CALLS and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


_CALLS = (state_dict_loader.__file__, state_dict_saver.__file__)


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
    """Elements [start, start + len(local)) of a flattened tensor of `shape`, or of a flattened box
    of it. It has the shape of the whole tensor, but holds only `local`.

    It is a tensor subclass because DCP looks for shards in tensors only. It cannot be computed
    with.

    Args:
        local: [stop - start], contiguous. DCP saves from it and loads into it in place.
        shape: shape of the whole tensor.
        start: index of the first element in the flattened whole tensor, or box.
        region: the box; None for the whole tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _held: _IntervalMemory
    start: int
    region: TensorBox | None

    @staticmethod
    def __new__(
        cls: type[DCPInterval],
        local: torch.Tensor,
        shape: Sequence[int],
        start: int,
        region: TensorBox | None = None,
    ) -> DCPInterval:
        return torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )

    def __init__(
        self, local: torch.Tensor, shape: Sequence[int], start: int, region: TensorBox | None = None
    ) -> None:
        self._held, self.start, self.region = _IntervalMemory(local), start, region

    @property
    def local(self) -> torch.Tensor:
        """The memory of the interval, [stop - start]."""
        return self._held.data

    def _boxes(self) -> list[TensorBox]:
        region = self.region or whole_region(self.size())
        return BoxInterval(region, self.start, self.start + self.local.numel()).boxes()

    # -- what DCP's planners call ------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunks = self.__create_chunk_list__()
        writer = from_dcp("storage_writer")
        if len(chunks) > 1 and getattr(writer, "serialization_format", None) is SAFETENSORS:
            raise CheckpointError(
                f"{type(writer).__name__} writes safetensors, of which torch keeps one piece of a tensor"
                f" for each file and drops the others without an error; {fqn!r} has {len(chunks)} on this"
                " rank. Use the default writer of torch.distributed.checkpoint, or onefold.export."
            )
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        at = 0
        for box in self._boxes():
            if index.offset is not None and tuple(index.offset) == box.offset:
                return self.local[at : at + box.numel].view(box.shape)
            at += box.numel
        raise CheckpointError(
            f"the planner asked for the part of {index.fqn!r} at {index.offset}; this rank holds"
            f" {self!r}, whose parts begin at {[list(box.offset) for box in self._boxes()]}. A"
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
        return DCPInterval(local, self.size(), self.start, self.region)

    def __deepcopy__(self, memo: Any) -> DCPInterval:
        return self._like(self.local.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        box = self.region
        where = "" if box is None else f"the box at {box.offset} of {box.shape} of "
        return (
            f"elements {self.start} to {self.start + self.local.numel()} of {where}a tensor of shape"
            f" {tuple(self.size())}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CheckpointError(
            f"{self!r} was to be pickled, which would save this rank's part under the name of the"
            " whole. Save it by torch.distributed.checkpoint.save, or async_save in a thread (not"
            " in a process), with a planner that flattens state dicts (the default)."
        )
