"""What autograd saves of gathered buffers.

[Note: saved tensors are handles] In a forward pass of a model with sharded parameters, autograd
saves tensors that lie in gathered buffers as handles (unit, offset, sizes). Unpacking a handle in
backward gathers the unit if it is not gathered. So a unit can be released after its forward pass
whatever the model's outputs look like, and backward finds its parameters by whatever path it comes
to them. A unit whose backward reads no parameter (an embedding) is not gathered again.

Casts that torch.autocast makes of gathered parameters are saved as handles too: see [Note: casts
are handles] in runtime/autocast.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.memory import storage_of
from onefold.runtime.autocast import CASTS, cast_of, in_autocast
from onefold.runtime.differentiate import (
    is_checkpoint,
    keep_from_compiler,
    keep_hooks_from_compiler,
)
from onefold.runtime.parameters.in_pass import lent, lent_buffer
from onefold.runtime.parameters.outside import Place
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.gather import Gatherer


class Handle:
    """What autograd keeps instead of a view into a gathered buffer, [size]."""

    __slots__ = ("flat", "gatherer", "offset", "size", "stride", "unit")

    def __init__(self, gatherer: Gatherer, unit: Unit, flat: Flat, t: torch.Tensor) -> None:
        self.gatherer, self.unit, self.flat = gatherer, unit, flat
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()
        unit.handles += 1
        unit.handles_apart += not unit.depth

    def __del__(self) -> None:
        self.unit.handles -= 1
        if self.unit.handles == 0 or self.unit.looks_up_only:
            self.gatherer.maybe_release(self.unit)

    def read(self) -> torch.Tensor:
        self.gatherer.backward_event()
        self.gatherer.acquire(self.unit, backward=True)
        full = self.flat.full
        assert full is not None
        return full.as_strided(self.size, self.stride, self.offset)


class CastHandle(Handle):
    """What autograd keeps instead of a view, [cast_size], of a cast of a view into a gathered
    buffer. It is cast again when it is read.
    """

    __slots__ = ("cast_offset", "cast_size", "cast_stride", "dtype")

    def __init__(
        self, gatherer: Gatherer, unit: Unit, flat: Flat, source: torch.Tensor, cast: torch.Tensor
    ) -> None:
        super().__init__(gatherer, unit, flat, source)
        self.dtype, self.cast_offset = cast.dtype, cast.storage_offset()
        self.cast_size, self.cast_stride = cast.size(), cast.stride()

    def read(self) -> torch.Tensor:
        cast = super().read().to(self.dtype)
        return cast.as_strided(self.cast_size, self.cast_stride, self.cast_offset)


def saving(gather: Gatherer, recomputed_alike: bool = False) -> saved_tensors_hooks:
    """Inside this context, autograd saves tensors in gathered buffers as handles, and others as
    before.

    `recomputed_alike`: whether a recomputation of the code inside enters this context again. If it
    does not, a checkpoint around this code must see the gathered buffers themselves, see [Note: a
    checkpoint around a pass].
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    outer_pack, outer_unpack = top if top else (None, None)
    by_storage = gather.by_storage
    recomputed = is_checkpoint(outer_pack) and not recomputed_alike
    casts = None if recomputed else gather.casts

    def pack(t: torch.Tensor) -> Any:
        hit = by_storage.get(storage_of(t)) if t.layout is torch.strided else None
        if hit is not None and t.dtype == hit[1].dtypes.compute and not recomputed:
            return Handle(gather, *hit, t)
        if casts is not None and t.dtype in CASTS and t.layout is torch.strided and in_autocast():
            cast = cast_of(t)
            if cast is not None and (of := by_storage.get(storage_of(cast.source))) is not None:
                casts.saw(of[0], cast)
                return CastHandle(gather, *of, cast.source, t)
            if not t.requires_grad:
                casts.saw_constant(t)
        if lent and t.layout is torch.strided and not recomputed:
            other = lent_buffer(storage_of(t))
            if other is not None and t.dtype == other[2].dtypes.compute:
                return Place(*other, t)
        if outer_pack:
            return outer_pack(t)
        # A node that saves its own output must not keep alive the tensor that refers to the node.
        return t if t.grad_fn is None else t.detach()

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, (Handle, Place)):
            return saved.read()
        return outer_unpack(saved) if outer_unpack else saved

    return saved_tensors_hooks(pack, unpack)


keep_hooks_from_compiler(saving)
keep_from_compiler(Handle.__del__)
