"""A parameter of a flat buffer: the optimizer's object, the object that a forward pass sees, and
the places that refer to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from onefold.layout import Slot, overlap
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.differentiate import CALLS
from onefold.runtime.parameters.in_pass import follow_reads
from onefold.runtime.parameters.interval import disable_torch_function, get_grad, set_grad
from onefold.runtime.parameters.storageless import NEEDS_NO_ELEMENTS
from onefold.runtime.parameters.values import give_grad, seen_grad
from onefold.runtime.units import Found

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.parameters.owning_engine import OwningEngine


def declared_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter had when `shard()` got it. (Inside `onefold.unsharded` the
    parameter is in master precision.)
    """
    handed_out, declared = param.__dict__.get("_onefold_dtypes", (None, param.dtype))
    return declared if param.dtype == handed_out else param.dtype


def declare(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Let `shard()` take `param` for one of `dtype`, as long as it has the dtype that it has now."""
    param.__dict__["_onefold_dtypes"] = param.dtype, dtype


class Whole(nn.Parameter):
    """A whole parameter as its module sees it in a forward pass.

    No version counter shows writes through `.data`. So once a module has read `.data`, the end of
    each forward pass compares values (runtime/stale.py).
    """

    @property
    def data(self) -> torch.Tensor:
        value: torch.Tensor = _DATA.__get__(self)
        seen = self.__dict__.get("_onefold_entry")
        if seen is not None and (entry := seen()) is not None:
            entry.flat.data_is_read(entry)
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        seen = self.__dict__.get("_onefold_entry")
        if seen is not None and (entry := seen()) is not None:
            entry.flat.written_in_forward = True
        _DATA.__set__(self, value)

    # `.grad` and `requires_grad` of the object that the optimizer has. Autograd does not come here: it
    # accumulates into the whole, and the reducer takes it from there at once.

    @property
    def grad(self) -> torch.Tensor | None:
        own: torch.Tensor | None = get_grad(self)
        if own is not None or (param := _param_of(self)) is None:
            return own
        return seen_grad(param)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (param := _param_of(self)) is None:
            set_grad(self, value)
        else:
            give_grad(param, value)

    @property
    def requires_grad(self) -> bool:
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set it on the optimizer's object too. The reductions follow at the next pass."""
        if (param := _param_of(self)) is not None:
            _REQUIRES_GRAD.__set__(param, requires_grad)
        _REQUIRES_GRAD.__set__(self, requires_grad)
        return self

    def set_(self, source: Any = None, *place: Any, **options: Any) -> Any:
        """Set the tensor; do nothing, not even count a write, if `source` is the tensor itself.

        torch's parametrizations set what they wrap to itself, and peft's adapters of experts wrap
        anew in every forward pass.
        """
        if source is self and not place and not options:
            return self
        return super().set_(*(() if source is None else (source,)), *place, **options)


class Released(Whole):
    """A whole parameter while its unit is not gathered: it has a shape and no memory, and a kernel
    that is given it may read address 0.

    Code may have kept it from an earlier moment, where it was whole: a hook's closure, `ctx.weight`
    of a Function, a list. At its first use it is gathered again, and then is a `Whole`. Code that
    does not ask a tensor's class (TorchScript, custom operators) must read `module.weight` anew.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NEEDS_NO_ELEMENTS or func in CALLS:  # autograd knows them by their nodes
            with disable_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Released, _gathered_again, (args, kwargs or {}))
        return func(*args, **kwargs)


def _gathered_again(whole: Released) -> nn.Parameter:
    """Return `whole` with memory; outside passes, the optimizer's object, which serves code there.
    Collective, as reading `module.weight`.
    """
    seen = whole.__dict__.get("_onefold_entry")
    entry = seen() if seen is not None else None
    engine = entry.engine() if entry is not None else None
    if entry is None or engine is None or entry.compute is not whole:
        raise RuntimeError(
            f"a whole parameter of shape {tuple(whole.shape)} was used after the model that it"
            " belongs to was sharded anew or has gone. Read it from its module again."
        )
    if not engine.computing:
        return entry.param
    with disable_torch_function():
        return engine.use(entry, keeps=True)


def _param_of(whole: Whole) -> nn.Parameter | None:
    """Return the optimizer's object of a whole parameter; None if its engine is closed."""
    seen = whole.__dict__.get("_onefold_entry")
    entry = seen() if seen is not None else None
    return entry.param if entry is not None and entry.compute is whole else None


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
set_requires_grad: Any = _REQUIRES_GRAD.__set__  # (whole, bool): of the whole alone
_DATA: Any = torch.Tensor.data
point: Any = _DATA.__set__  # (whole, tensor): for the engine itself; does not count as a write


class Entry:
    """One parameter: `param` is the optimizer's object, `compute` is the object that the forward
    pass sees, `places` are where modules refer to it.
    """

    __slots__ = (
        "__weakref__",
        "accumulates",
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
        "pending_grad",
        "places",
        "post_hooks",
        "released",
        "seen_version",
        "slot",
        "small",
    )  # fmt: skip

    def __init__(
        self, found: Found, slot: Slot, index: int, flat: Flat, engine: OwningEngine
    ) -> None:
        self.slot, self.index, self.names = slot, index, found.names
        # The part that it is of the parameter as users and checkpoints know it: all of it, or the
        # elements of one tile
        self.part = found.part
        # The modules' own dictionaries rather than the modules: an engine must not keep its model
        # alive.
        self.places = [
            (
                m._parameters if flat.unsharded else follow_reads(m),
                a,
                weakref.ref(m) if isinstance(m, nn.RNNBase) else None,
            )
            for m, a in found.places
        ]
        one = len(self.places) == 1 and self.places[0][2] is None
        # The common case: one module refers to it, and is not a recurrent layer with its own list
        self.only_place = self.places[0][:2] if one else None
        self.flat, self.engine = flat, weakref.ref(engine)
        self.param = found.param
        self.compute: nn.Parameter = found.param
        self.released: torch.Tensor | None = None
        self.active, self.declared = found.param.requires_grad, declared_dtype(found.param)
        self.filled = self.hooked = False
        self.accumulates: Any = None  # the node of autograd of `param`, see runtime/trained.py
        self.post_hooks: Any = None  # the user's hooks, as they were when a backward pass began
        self.small = 0  # bytes of a gradient that is small (runtime/reduce.py)
        self.seen_version = 0  # of `compute`, see runtime/stale.py
        # This rank owns nothing of it, and the ranks that do have a gradient for it
        self.graded_elsewhere = False
        # What `.grad` shows of a gradient that is not reduced yet
        self.pending_grad: torch.Tensor | None = None
        self.number = 0  # among all entries of the engine
        self.last_write = (
            0  # the last write to its master, see runtime/parameters/write_counters.py
        )

    def accounted(self, position: int | None = None) -> tuple[int, int]:
        """Return the elements, counted from the first, that this rank (or that at `position`)
        accounts for. Exactly one rank accounts for each element of the model.
        """
        flat = self.flat
        a, b = flat.layout.local(self.slot, flat.rank if position is None else position)
        return a - self.slot.start, b - self.slot.start

    def owned(self, position: int | None = None) -> tuple[int, int]:
        """Return the elements, counted from the first, that the optimizer of this rank (or of that
        at `position`) steps. Optimizers of other ranks may step them too.
        """
        flat = self.flat
        owned = flat.owned if position is None else flat.owned_by(position)
        a, b = overlap((self.slot.start, self.slot.end), owned)
        return a - self.slot.start, b - self.slot.start

    def outside(self, x: int, y: int, key: str = "") -> tuple[tuple[int, ...], int, int]:
        """Return where elements [x, y) are in the parameter as users know it, of which a tile is
        only a part: the shape of the whole (or of its state `key`), and the interval.
        """
        grain, part = grain_of(key), self.part
        shape = part.shape if packed(key) is None else (-(-part.numel // grain),)
        return shape, *items_of(part.first + x, part.first + y, grain)
