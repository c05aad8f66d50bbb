"""What autograd saves of gathered buffers, and of casts of them.

[Note: saved tensors are handles] Where autograd saves a tensor that lies in a gathered buffer, it keeps
a `Handle`: the place in the flat buffer, no elements. Reading it in the backward pass gathers the unit.
So a unit can be released after its forward pass whatever the model's outputs look like, and the
backward pass finds its parameters by whatever path it comes to them. A unit whose backward pass reads
no parameter (an embedding) is not gathered again.

[Note: casts are handles] A cast of a whole fp32 parameter, as torch.autocast makes one, is saved as a
handle too: the cast of what is gathered then. Autocast keeps its casts in a cache until its outermost
context is left, so the cache is emptied whenever a unit is released. A unit that is used again in that
context is cast again: the gradients of its uses are added in fp32, under DDP in the autocast's dtype.
Casts of parts of a parameter, and of frozen ones, stay with autograd, as under DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.memory import storage_of
from onefold.runtime.boxes import dtensor_over, local_of
from onefold.runtime.differentiate import (
    keep_from_compiler,
    keep_hooks_from_compiler,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from onefold.runtime.flat import Flat, Unit
    from onefold.runtime.gather import Gatherer

#: The dtypes that autocast casts to.
CASTS = frozenset((torch.bfloat16, torch.float16))


class Handle:
    """What autograd keeps in place of `t`, which lies in a gathered buffer from `offset` on, or is a
    cast of what lies there.

    `spec`: of the DTensor whose local tensor it is. `stays`: the unit that is gathered to read it
    stays as long as the backward pass needs it. Otherwise it is released at once, and the reader
    gets a copy.
    """

    __slots__ = ("dtype", "flat", "gather", "place", "spec", "stays", "unit")

    def __init__(
        self,
        gather: Gatherer,
        found: tuple[Unit, Flat],
        t: torch.Tensor,
        offset: Any,
        spec: Any,
        stays: bool,
    ) -> None:
        self.gather, (self.unit, self.flat), self.stays = gather, found, stays
        self.place, self.dtype, self.spec = (t.size(), t.stride(), offset), t.dtype, spec
        if stays:
            self.unit.saved += 1
            self.unit.saved_apart += not self.unit.in_use

    def __del__(self) -> None:
        if self.stays:
            self.unit.saved -= 1
            if not self.unit.saved or self.unit.looks_up_only:
                self.gather.maybe_release(self.unit)

    def read(self) -> torch.Tensor:
        gather, unit = self.gather, self.unit
        if gather.engine.closed or not gather.engine.backward_open:  # asked once per tensor
            gather.engine.refuse_if_closed()
            gather.engine.passes.event()
        if self.stays:
            gather.acquire(unit, backward=True)
        alone = not self.stays and gather.gather_alone(unit)
        full = self.flat.full
        assert full is not None
        out = full.as_strided(*self.place)
        if out.dtype != self.dtype:
            out = out.to(self.dtype)
        out = out if self.stays else out.clone()
        if alone:
            gather.release(unit)
        return out if self.spec is None else dtensor_over(out, self.spec)


class Kept:
    """What autograd keeps in place of a tensor that stays as it is: it checks the version of no tensor
    that a hook has packed, so that a write in place would give a wrong gradient in silence.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, t: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            # A node may save its own output. Without detach() the node and the tensor would form a
            # reference cycle.
            self.tensor = t if t.grad_fn is None else t.detach()
            self.version = t._version

    def read(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            refuse_other_version(self.tensor, self.version, self.tensor.size())
            return self.tensor


def refuse_other_version(watch: torch.Tensor, version: int, size: torch.Size) -> None:
    """Raise RuntimeError if the version counter of `watch` has left `version`."""
    if watch._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(size)}, {watch.dtype}, that a gradient is computed from has"
            " been modified by an inplace operation since it was saved: it is at version"
            f" {watch._version}, the gradient needs version {version}. Write `x = x + 1` instead of"
            " `x += 1`, or change a clone(); torch.autograd.set_detect_anomaly(True) shows which"
            " operation saved it."
        )


def is_in(buffers: Mapping[int, Any], t: torch.Tensor) -> bool:
    """Whether `t` lies in one of `buffers`, which are by storage."""
    t = local_of(t)
    return t.layout is torch.strided and storage_of(t) in buffers


def _cast_from(t: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf whose cast `t` is, or is a view of; None if it is none, or was written to."""
    if t.dtype not in CASTS:
        return None
    cast = t if t._base is None else t._base
    node: Any = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or cast._version or cast.dtype != t.dtype:
        return None
    leaf: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return leaf if leaf is not None and leaf.stride() == cast.stride() else None


def saving(gathers: Iterable[Gatherer], stays: bool = True) -> saved_tensors_hooks:
    """Inside this context, autograd saves tensors in buffers of `gathers` as handles, and others as
    before.

    [Note: a checkpoint around a pass] torch compares how many tensors a checkpointed pass saves with how
    many its recomputation saves. So its hook has to see gathered parameters in the forward pass as it
    sees them in the recomputation: they are not taken before.
    """
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    outer_pack, outer_unpack = top or (Kept, Kept.read)
    recomputed = getattr(outer_pack, "__module__", None) == "torch.utils.checkpoint"

    def pack(t: torch.Tensor) -> Any:
        # Of every tensor that a pass saves, of which few are weights
        if t.layout is torch.strided and not recomputed:
            local = t if type(t) is torch.Tensor else local_of(t)
            storage = local.untyped_storage()._cdata
            for gather in gathers:
                found, base = gather.by_storage.get(storage), 0
                if found is None or t.dtype != found[1].dtypes.compute:
                    if not gather.holds_fp32 or (leaf := _cast_from(t)) is None:
                        continue
                    found, base = (
                        gather.by_storage.get(storage_of(leaf)),
                        int(leaf.storage_offset()),
                    )
                if found is not None:
                    offset = base + local.storage_offset()
                    spec = None if local is t else t._spec  # type: ignore[attr-defined]
                    return Handle(gather, found, local, offset, spec, stays)
        return outer_pack(t)

    def unpack(saved: Any) -> torch.Tensor:
        t: torch.Tensor = saved.read() if isinstance(saved, Handle) else outer_unpack(saved)
        return t

    return saved_tensors_hooks(pack, unpack)


keep_hooks_from_compiler(saving)
keep_from_compiler(Handle.__del__)
