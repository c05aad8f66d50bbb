"""What autograd saves of gathered buffers and of their casts."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from onefold.memory import storage_of
from onefold.runtime.boxes import dtensor_over, is_dtensor, local_of
from onefold.runtime.differentiate import (
    is_checkpoint,
    keep_from_compiler,
    keep_hooks_from_compiler,
)
from onefold.runtime.parameters.in_pass import lent_buffer
from onefold.runtime.parameters.open_passes import here
from onefold.runtime.parameters.outside import Place
from onefold.runtime.parameters.whole import point
from onefold.runtime.unit import Unit

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat
    from onefold.runtime.gather import Gatherer


# -- casts -----------------------------------------------------------------------------------------
#
# Weights that torch.autocast casts.
#
# [Note: casts are handles] Under torch.autocast, a matrix product computes with a cast of its fp32
# weight. Two things keep that cast alive, and with it the memory that stage 3 has freed:
#
#     autograd                 saves the cast for the backward pass              a handle takes its place: the cast of what is gathered then
#     autocast's cache         until the outermost autocast context is left      the cast has no memory while its unit is not gathered
#
# The cache itself stays. All uses of a weight share the cast, a node of the graph: there autograd adds
# the gradients of the uses, in the autocast's dtype. So the sums have the same bits as under DDP.
#
# A frozen weight is cast again in each use, and the result is no node of the graph. Nothing tells
# whose cast it is, so autograd keeps it. A warning says so.


logger = logging.getLogger("onefold")

#: The dtypes that autocast casts to.
CASTS = frozenset((torch.bfloat16, torch.float16))


# -- saved for the backward pass -------------------------------------------------------------------


def in_autocast() -> bool:
    """Whether this code runs inside torch.autocast. `torch.is_autocast_enabled` says False inside
    the operation that autocast has prepared.
    """
    around: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return around > 0


class Cast(NamedTuple):
    """A cast of a parameter, or of a view of one.

    Attributes:
        source: what was cast, detached. tensor: the cast.
        leaf: the parameter if the whole of it was cast, else None.
    """

    source: torch.Tensor
    tensor: torch.Tensor
    leaf: torch.Tensor | None


def cast_of(saved: torch.Tensor) -> Cast | None:
    """Return the cast of a parameter that `saved` is, or is a view of; None if it is none.

    A cast that was written to is none any more.
    """
    base = saved if saved._base is None else saved._base
    node: Any = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or base._version:
        return None
    views: list[tuple[Any, int]] = []
    below, output = node.next_functions[0]
    while (leaf := getattr(below, "variable", None)) is None:
        if below is None or below.name() not in _VIEWS:
            return None
        views.append((below, output))
        below, output = below.next_functions[0]
    source: torch.Tensor = leaf.detach()
    for at, (view, output) in enumerate(reversed(views), 1):
        if view.name() in _RESHAPED and at < len(views):
            return None  # the node does not know the shape that it makes
        source = _VIEWS[view.name()](source, view, output, base.shape)
    if source.shape != base.shape or source.stride() != base.stride():
        return None
    return Cast(source, base, None if views else leaf)


def _signed(number: int) -> int:
    """Return an attribute of a node as it was given: torch shows some negative ones as unsigned."""
    return number - (1 << 64) if number >> 63 == 1 else number


_RESHAPED = ("ViewBackward0", "ReshapeAliasBackward0")
#: How nodes of the graph make views: (tensor, node, number of the output, shape of the last view).
_VIEWS: dict[str, Callable[[torch.Tensor, Any, int, torch.Size], torch.Tensor]] = {
    "SelectBackward0": lambda t, n, _, __: t.select(_signed(n._saved_dim), _signed(n._saved_index)),
    "SliceBackward0": lambda t, n, _, __: torch.ops.aten.slice.Tensor(
        t, _signed(n._saved_dim), _signed(n._saved_start), _signed(n._saved_end), n._saved_step
    ),
    "SplitBackward0": lambda t, n, output, _: t.split(n._saved_split_size, _signed(n._saved_dim))[
        output
    ],
    "SplitWithSizesBackward0": lambda t, n, output, _: t.split(
        list(n._saved_split_sizes), _signed(n._saved_dim)
    )[output],
    "UnbindBackward0": lambda t, n, output, _: t.unbind(_signed(n._saved_dim))[output],
    "TBackward0": lambda t, _, __, ___: t.t(),
    "TransposeBackward0": lambda t, n, _, __: t.transpose(
        _signed(n._saved_dim0), _signed(n._saved_dim1)
    ),
    "PermuteBackward0": lambda t, n, _, __: t.permute([_signed(dim) for dim in n._saved_dims]),
    "UnsqueezeBackward0": lambda t, n, _, __: t.unsqueeze(_signed(n._saved_dim)),
    "ViewBackward0": lambda t, _, __, shape: t.view(shape),
    "ReshapeAliasBackward0": lambda t, _, __, shape: t.reshape(shape),
}


# -- autocast's cache ------------------------------------------------------------------------------


class _Miss(Exception):
    """Ends an operation for which autocast begins to make a cast."""


class _Search(TorchDispatchMode):
    """Keeps the tensor that autocast has prepared for a product, and computes nothing."""

    found: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default:
            raise _Miss
        self.found = args[0]
        return args[1]


def cached_casts(leaves: Iterable[torch.Tensor]) -> Iterator[torch.Tensor | None]:
    """Yield the cast of each of `leaves` that is in autocast's cache; None for those that have
    none. It takes some 20 µs for each.
    """
    search = _Search()
    for leaf in leaves:
        # A released leaf would otherwise be gathered again for the question
        plain = torch._C.DisableTorchFunctionSubclass()
        with torch.no_grad(), plain, search, contextlib.suppress(_Miss):
            torch.mm(leaf, leaf)  # of any shape: no kernel comes to see it
        found, search.found = search.found, None
        yield None if found is leaf else found


def _references(cast: torch.Tensor) -> int:
    return sys.getrefcount(cast)


@cache
def _alone(device_type: str, dtype: torch.dtype) -> int:
    """Return how many references Python counts of a cast that only the cache and one variable
    hold.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device_type, dtype=dtype):
        leaf = torch.zeros(1, 1, device=device_type, requires_grad=True)
        torch.mm(leaf, leaf)
        (cast,) = cached_casts([leaf])
        return 0 if cast is None else _references(cast)


class CachedCasts:
    """Takes the memory from casts in autocast's cache while their unit is not gathered.

    Casts that autograd saves are known from there (`saw`). Where it saves none (in a recomputed
    part, or without gradients), the cache is searched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._kind = device, device.type
        # By unit: {number of an entry: (the entry, its cast)}
        self._seen: dict[int, dict[int, tuple[Entry, TensorWeakRef]]] = {}
        self._kept: dict[int, dict[int, tuple[Entry, TensorWeakRef]]] = {}
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        self._constants: set[int] = set()  # numbers of elements, see `saw_constant`
        self._warned = False

    def saw(self, unit: Unit, cast: Cast) -> None:
        """Remember a cast that autograd would have saved."""
        known = getattr(cast.leaf, "__dict__", {}).get("_onefold_entry")
        if known is not None and (entry := known()) is not None:
            seen = self._seen.setdefault(unit.index, {})
            seen[entry.number] = entry, TensorWeakRef(cast.tensor)

    def saw_constant(self, saved: torch.Tensor) -> None:
        """Remember a tensor without gradient that autograd saves: it may be the cast of a frozen
        weight.
        """
        self._constants.add(saved.numel())

    def drop(self, unit: Unit) -> None:
        """Take the memory of the casts of a unit that is released."""
        seen = self._seen.pop(unit.index, {}) if self._seen else {}
        kind = self._kind
        if not torch.is_autocast_enabled(kind):
            return
        dtype = torch.get_autocast_dtype(kind)
        weights = list(_weights(unit)) if dtype in CASTS else []
        self._warn_of_frozen(weights, dtype)
        if not weights or not torch.is_autocast_cache_enabled():
            return
        found = [(e, known()) for e, known in seen.values()]
        there = {e.number for e, cast in found if cast is not None}
        others = [e for e in weights if e.active and e.number not in there]
        found += zip(others, cached_casts(e.compute for e in others), strict=True)
        kept, alone = self._kept.setdefault(unit.index, {}), _alone(kind, dtype)
        while found:
            entry, cast = found.pop()
            # Hooks on saved tensors that the model's own code sets may keep the cast itself
            if cast is not None and cast.dtype == dtype and _references(cast) <= alone:
                kept[entry.number] = entry, TensorWeakRef(cast)
                point(cast, self._no_memory(dtype).expand(entry.slot.shape))

    def fill(self, unit: Unit) -> None:
        """Give the casts of a unit that was gathered their values again, if they still exist."""
        if not self._kept:
            return
        for entry, known in self._kept.pop(unit.index, {}).values():
            if (cast := known()) is not None:
                point(cast, entry.compute.detach().to(cast.dtype))
                self._seen.setdefault(unit.index, {})[entry.number] = entry, known

    def _no_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the element that a cast without memory shows. Whoever reads it gets NaN."""
        if dtype not in self._nothing:
            with torch.inference_mode(False):
                nothing = torch.full((), torch.nan, dtype=dtype, device=self.device)
            self._nothing[dtype] = nothing
        return self._nothing[dtype]

    def _warn_of_frozen(self, candidates: Iterable[Entry], dtype: torch.dtype) -> None:
        constants, self._constants = self._constants, set()
        if self._warned or not constants:
            return
        frozen = [e.slot.name for e in candidates if not e.active and e.slot.numel in constants]
        if not frozen:
            return
        self._warned = True
        shown = str(dtype).removeprefix("torch.")
        logger.warning(
            "parameter %r is frozen, in float32, and used under torch.autocast: autograd keeps a copy"
            " of it in %s for the backward pass, as under DDP, so that stage 3 saves less memory."
            " Cast frozen parameters before shard(): parameter.data = parameter.to(torch.%s).",
            frozen[0],
            shown,
            shown,
        )


def _weights(unit: Unit) -> Iterable[Entry]:
    """Yield the parameters of `unit` that products may cast."""
    for flat in unit.flats:
        if not flat.resident and flat.dtypes.compute == torch.float32:
            yield from (entry for entry in flat.entries if len(entry.slot.shape) > 1)


# -- handles ---------------------------------------------------------------------------------------
#
# What autograd saves of gathered buffers.
#
# [Note: saved tensors are handles] In a forward pass of a model with sharded parameters, autograd
# saves tensors that lie in gathered buffers as handles (unit, offset, sizes). Unpacking a handle in
# backward gathers the unit if it is not gathered. So a unit can be released after its forward pass
# whatever the model's outputs look like, and backward finds its parameters by whatever path it comes
# to them. A unit whose backward reads no parameter (an embedding) is not gathered again.
#
# Casts that torch.autocast makes of gathered parameters are saved as handles too: see [Note: casts
# are handles] below.


class Handle:
    """What autograd keeps instead of a view into a gathered buffer, [size]."""

    __slots__ = ("flat", "gatherer", "offset", "size", "stride", "unit")

    def __init__(self, gatherer: Gatherer, unit: Unit, flat: Flat, t: torch.Tensor) -> None:
        self.gatherer, self.unit, self.flat = gatherer, unit, flat
        self.size, self.stride, self.offset = t.size(), t.stride(), t.storage_offset()
        unit.leases.saved += 1
        unit.saved_apart += not unit.leases.in_use

    def __del__(self) -> None:
        self.unit.leases.saved -= 1
        if not self.unit.leases.saved or self.unit.looks_up_only:
            self.gatherer.maybe_release(self.unit)

    def read(self) -> torch.Tensor:
        self.gatherer.backward_event()
        self.gatherer.acquire(self.unit, backward=True)
        full = self.flat.full
        assert full is not None
        return full.as_strided(self.size, self.stride, self.offset)


class BoxHandle(Handle):
    """What autograd keeps instead of a DTensor over a view of a gathered buffer."""

    __slots__ = ("spec",)

    def __init__(
        self, gatherer: Gatherer, unit: Unit, flat: Flat, local: torch.Tensor, spec: Any
    ) -> None:
        super().__init__(gatherer, unit, flat, local)
        self.spec = spec

    def read(self) -> torch.Tensor:
        return dtensor_over(super().read(), self.spec)


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


def saving(gather: Gatherer) -> saved_tensors_hooks:
    """Inside this context, autograd saves tensors in gathered buffers as handles, and others as
    before. A checkpoint around this code must see the gathered buffers themselves, see [Note: a
    checkpoint around a pass].
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    outer_pack, outer_unpack = top if top else (None, None)
    by_storage = gather.by_storage
    recomputed = is_checkpoint(outer_pack)
    casts = None if recomputed else gather.casts
    boxed = gather.boxed

    def pack(t: torch.Tensor) -> Any:
        hit = by_storage.get(storage_of(t)) if t.layout is torch.strided else None
        if hit is not None and t.dtype == hit[1].dtypes.compute and not recomputed:
            return Handle(gather, *hit, t)
        if boxed and not recomputed and is_dtensor(t):
            local = local_of(t)
            hit = by_storage.get(storage_of(local))
            if hit is not None and t.dtype == hit[1].dtypes.compute:
                return BoxHandle(gather, *hit, local, t._spec)  # type: ignore[attr-defined]
        if casts is not None and t.dtype in CASTS and t.layout is torch.strided and in_autocast():
            cast = cast_of(t)
            if cast is not None and (of := by_storage.get(storage_of(cast.source))) is not None:
                casts.saw(of[0], cast)
                return CastHandle(gather, *of, cast.source, t)
            if not t.requires_grad:
                casts.saw_constant(t)
        if here.lent and t.layout is torch.strided and not recomputed:
            other = lent_buffer(storage_of(local_of(t)))
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
