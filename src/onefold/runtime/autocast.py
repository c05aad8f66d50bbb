"""Weights that torch.autocast casts.

[Note: casts are handles] Under torch.autocast, a matrix product computes with a cast of its fp32
weight. Two things keep that cast alive, and with it the memory that stage 3 has freed:

    autograd                 saves the cast for the backward pass              a handle takes its place: the cast of what is gathered then
    autocast's cache         until the outermost autocast context is left      the cast has no memory while its unit is not gathered

The cache itself stays. All uses of a weight share the cast, a node of the graph: there autograd adds
the gradients of the uses, in the autocast's dtype. So the sums have the same bits as under DDP.

A frozen weight is cast again in each use, and the result is no node of the graph. Nothing tells
whose cast it is, so autograd keeps it. A warning says so.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from onefold.runtime.entry import point

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.unit import Unit

logger = logging.getLogger("onefold")

#: The dtypes that autocast casts to.
CASTS = frozenset((torch.bfloat16, torch.float16))


# -- saved for the backward pass -------------------------------------------------------------------


def cast_source(saved: torch.Tensor) -> torch.Tensor | None:
    """Return what `saved` is a cast of, or a view of a cast of: a parameter, or a view of one,
    detached. None if it is neither.

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
        if view.name() == "ViewBackward0" and at < len(views):
            return None  # the node does not know the shape that it makes
        source = _VIEWS[view.name()](source, view, output, base.shape)
    return source if source.shape == base.shape and source.stride() == base.stride() else None


def _signed(number: int) -> int:
    """Return an attribute of a node as it was given: torch shows some negative ones as unsigned."""
    return number - (1 << 64) if number >> 63 == 1 else number


#: How nodes of the graph make views: (tensor, node, number of the output, shape of the last view).
_VIEWS: dict[str, Callable[[torch.Tensor, Any, int, torch.Size], torch.Tensor]] = {
    "SelectBackward0": lambda t, n, _, __: t.select(
        _signed(n._saved_dim), _signed(n._saved_index)
    ),
    "SliceBackward0": lambda t, n, _, __: torch.ops.aten.slice.Tensor(
        t, _signed(n._saved_dim), _signed(n._saved_start), _signed(n._saved_end), n._saved_step
    ),
    "SplitBackward0": lambda t, n, output, _: t.split(n._saved_split_size, _signed(n._saved_dim))[
        output
    ],
    "UnbindBackward0": lambda t, n, output, _: t.unbind(_signed(n._saved_dim))[output],
    "TBackward0": lambda t, _, __, ___: t.t(),
    "TransposeBackward0": lambda t, n, _, __: t.transpose(
        _signed(n._saved_dim0), _signed(n._saved_dim1)
    ),
    "ViewBackward0": lambda t, _, __, shape: t.view(shape),
}


# -- autocast's cache ------------------------------------------------------------------------------


class _Found(Exception):  # noqa: N818: it reports no error
    """Ends the search for a cast in autocast's cache."""


class _Search(TorchDispatchMode):
    """Stops the operation that autocast has prepared, and keeps the tensor that it was to compute
    with; None if autocast began to make a new cast.
    """

    found: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = args[0] if func is torch.ops.aten.mm.default else None
        raise _Found


def cached_cast(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return the cast of `leaf` in autocast's cache; None if there is none."""
    search = _Search()
    try:
        with torch.no_grad(), search:
            torch.mm(leaf, leaf)  # of any shape: no kernel comes to see it
    except _Found:
        pass
    found, search.found = search.found, None
    return None if found is leaf else found


def _references(cast: torch.Tensor) -> int:
    return sys.getrefcount(cast)


@cache
def _alone(device_type: str, dtype: torch.dtype) -> int:
    """Return how many references Python counts of a cast that only the cache and one variable
    hold.
    """
    leaf = torch.zeros(1, 1, device=device_type, requires_grad=True)
    with torch.enable_grad(), torch.autocast(device_type, dtype=dtype):
        torch.mm(leaf, leaf)
        cast = cached_cast(leaf)
        return 0 if cast is None else _references(cast)


class CachedCasts:
    """Takes the memory from casts in autocast's cache while their unit is not gathered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, list[tuple[Entry, TensorWeakRef]]] = {}
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        self._warned = False

    def drop(self, unit: Unit) -> None:
        """Take the memory of the casts of a unit that is released."""
        kind = self.device.type
        if not torch.is_autocast_enabled(kind):
            return
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in CASTS:
            return
        candidates = list(_weights(unit))
        self._warn_of_frozen(candidates, dtype)
        if not torch.is_autocast_cache_enabled():
            return
        kept = self._kept[unit.index] = []
        alone = _alone(kind, dtype)
        for entry in candidates:
            cast = cached_cast(entry.compute) if entry.active else None
            # Hooks on saved tensors that the model's own code sets may keep the cast itself
            if cast is None or _references(cast) > alone:
                continue
            kept.append((entry, TensorWeakRef(cast)))
            point(cast, self._no_memory(dtype).expand(entry.slot.shape))

    def fill(self, unit: Unit) -> None:
        """Give the casts of a unit that was gathered their values again, if they still exist."""
        for entry, known in self._kept.pop(unit.index, ()):
            if (cast := known()) is not None:
                point(cast, entry.compute.detach().to(cast.dtype))

    def _no_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the element that a cast without memory shows. Whoever reads it gets NaN."""
        if dtype not in self._nothing:
            self._nothing[dtype] = torch.full((), torch.nan, dtype=dtype, device=self.device)
        return self._nothing[dtype]

    def _warn_of_frozen(self, candidates: Iterable[Entry], dtype: torch.dtype) -> None:
        if self._warned or not torch.is_grad_enabled():
            return
        frozen = [entry.slot.name for entry in candidates if not entry.active]
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
