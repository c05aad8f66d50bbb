"""A parameter of a flat buffer: the optimizer's object, the one that a forward pass sees, and who
refers to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.layout import Slot, overlap
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.units import Found

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.parameters.owning_engine import OwningEngine


def declared_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter was given to `shard()` in. Inside `onefold.unsharded` it is in
    master precision for a while.
    """
    handed_out, declared = param.__dict__.get("_onefold_dtypes", (None, param.dtype))
    return declared if param.dtype == handed_out else param.dtype


class Whole(nn.Parameter):
    """A whole parameter as its module sees it in a forward pass. What is written through `.data`
    leaves no other trace, so from the first look at it on, the end of each forward pass compares
    (runtime/forward_writes.py).
    """

    @property
    def data(self) -> torch.Tensor:
        seen = self.__dict__.get("_onefold_entry")
        if seen is not None and (entry := seen()) is not None:
            entry.flat.written_in_forward = True
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        seen = self.__dict__.get("_onefold_entry")
        if seen is not None and (entry := seen()) is not None:
            entry.flat.written_in_forward = True
        _DATA.__set__(self, value)

    def set_(self, source: Any = None, *place: Any, **options: Any) -> Any:
        """Set to itself it stays as it is, and its version counter too: torch's parametrizations do
        that to what they wrap, and peft's adapters of experts wrap it anew in every forward pass.
        """
        if source is self and not place and not options:
            return self
        return super().set_(*(() if source is None else (source,)), *place, **options)


_DATA: Any = torch.Tensor.data
point: Any = _DATA.__set__  # (whole, tensor): the engine's own way, which is no write


class Entry:
    """One parameter: `param` is the optimizer's object, `compute` the one that the forward pass
    sees, `places` who refers to it.
    """

    __slots__ = (
        "__weakref__",
        "active",
        "compute",
        "declared",
        "engine",
        "filled",
        "flat",
        "graded_elsewhere",
        "hooked",
        "index",
        "last_write",
        "names",
        "number",
        "only_place",
        "param",
        "part",
        "places",
        "post_hooks",
        "released",
        "seen_version",
        "slot",
        "small",
        "unreduced",
    )  # fmt: skip

    def __init__(
        self, found: Found, slot: Slot, index: int, flat: Flat, engine: OwningEngine
    ) -> None:
        self.slot, self.index, self.names = slot, index, found.names
        # What it is of the parameter that leaves the process: all of it, or the elements of one
        # tile
        self.part = found.part
        # The modules' own dictionaries rather than the modules: a model must not be kept alive by
        # its engine.
        self.places = [
            (m._parameters, a, weakref.ref(m) if isinstance(m, nn.RNNBase) else None)
            for m, a in found.places
        ]
        one = len(self.places) == 1 and self.places[0][2] is None
        # The common case: one module refers to it, and keeps no list besides
        self.only_place = self.places[0][:2] if one else None
        self.flat, self.engine = flat, weakref.ref(engine)
        self.param = found.param
        self.compute: nn.Parameter = found.param
        self.released: torch.Tensor | None = None
        self.active, self.declared = found.param.requires_grad, declared_dtype(found.param)
        self.filled = self.hooked = False
        self.post_hooks: Any = None  # the user's, as a backward pass found them
        self.small = 0  # bytes of a gradient that is small (runtime/reduce.py)
        self.seen_version = 0  # of `compute`, see runtime/forward_writes.py
        # This rank owns nothing of it, and those that do have a gradient
        self.graded_elsewhere = False
        # What `.grad` shows of a gradient that is not reduced yet
        self.unreduced: torch.Tensor | None = None
        self.number = 0  # among all entries of the engine
        self.last_write = (
            0  # the last write to its master, see runtime/parameters/write_counters.py
        )

    def accounted(self, position: int | None = None) -> tuple[int, int]:
        """The elements, counted from the first, that this rank (or that at `position`) answers
        for: each element of the model on exactly one rank.
        """
        flat = self.flat
        a, b = flat.layout.local(self.slot, flat.rank if position is None else position)
        return a - self.slot.start, b - self.slot.start

    def held(self, position: int | None = None) -> tuple[int, int]:
        """The elements, counted from the first, that the optimizer of this rank (or of that at
        `position`) steps; also what other ranks' optimizers step as well.
        """
        flat = self.flat
        owned = flat.owned if position is None else flat.owned_by(position)
        a, b = overlap((self.slot.start, self.slot.end), owned)
        return a - self.slot.start, b - self.slot.start

    def outside(self, x: int, y: int, key: str = "") -> tuple[tuple[int, ...], int, int]:
        """Elements [x, y) as the parameter is known outside, of which a tile is a part: the whole
        shape of it (or of its state `key`), and the interval.
        """
        grain, part = grain_of(key), self.part
        shape = part.shape if packed(key) is None else (-(-part.numel // grain),)
        return shape, *items_of(part.first + x, part.first + y, grain)
