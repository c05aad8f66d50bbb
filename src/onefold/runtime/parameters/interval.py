"""Intervals: tensors that show a whole parameter's shape and hold this rank's part of its elements.

    parameter   [4, 6], flattened     0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ... 17 | 18 ... 23
    rank 0      holds [0, 10)         x x x x x x   x x x x
    rank 1      holds [10, 24)                                1 1   1 ... 1     1 ... 1

`p.data`, `p.grad` and `p.detach()` of a sharded parameter are intervals, and so is what
element-wise work makes of them. What an operation on one does is decided in runtime/parameters/operators.py.
Inside `disable_torch_function()` an interval is an ordinary one-dimensional tensor of the local
elements.

[Note: the same cut] Two intervals can be combined element by element without traffic if every rank
holds the same elements of both. That is a question of addresses and owners, never of what this rank
happens to hold: all ranks answer it alike, so all of them communicate, or none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from onefold.comm import CollectiveContext, Group
from onefold.layout import overlap

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.parameters.owning_engine import OwningEngine

# Inside it sharded parameters and intervals are plain tensors over local memory
disable_torch_function = torch._C.DisableTorchFunctionSubclass


class ShardedParameterError(RuntimeError):
    """A sharded parameter, or what was made of one, was used as if it were whole."""


class Owners:
    """Which rank owns which addresses of a flat buffer.

    Attributes:
        bounds: the addresses `(start, stop)` by position in the group whose ranks together own
            everything once.
        position: this rank's in that group.
    """

    __slots__ = ("_engine", "_flat", "bounds", "index", "position")

    def __init__(self, flat: Flat, engine: OwningEngine) -> None:
        group, everybody = flat.owners_group, flat.group
        positions: Sequence[int] = (
            range(everybody.size)
            if group is everybody
            else everybody.topology.intra_group(everybody.rank)
        )
        self.bounds = tuple(flat.owned_by(p) for p in positions)
        self.position, self.index = group.rank, flat.index
        self._engine, self._flat = weakref.ref(engine), weakref.ref(flat)

    def meet(self, subject: str) -> tuple[OwningEngine, Group]:
        """The engine, and the ranks that own the parts.

        Raises:
            ShardedParameterError: the model is gone.
        """
        engine, flat = self._engine(), self._flat()
        if engine is None or flat is None or engine.progress.closed:
            raise ShardedParameterError(
                f"{subject} is one rank's part of a parameter whose model is gone: nothing can make"
                " it whole."
            )
        return engine, flat.owners_group

    def before_write(self) -> None:
        """See `MasterAccess.before_write`."""
        engine, flat = self._engine(), self._flat()
        if engine is not None and flat is not None:
            engine.masters.before_write(flat)


class IntervalSpec:
    """Which elements of a tensor of `shape` this rank holds: [start, stop) of the flattened tensor.

    Attributes:
        name: whose they are, for messages. first: the flat buffer's address of element 0.
        unreduced: a gradient kept under no_sync, of which each rank holds a part of its own
            gradient.
    """

    __slots__ = ("first", "name", "numel", "owners", "shape", "start", "stop", "unreduced")

    def __init__(
        self, owners: Owners, name: str, first: int, shape: Any, unreduced: bool = False
    ) -> None:
        self.owners, self.name, self.first, self.unreduced = owners, name, first, unreduced
        self.shape, self.numel = torch.Size(shape), prod(shape)
        a, b = self._at(owners.position)
        self.start, self.stop = a, b

    def _at(self, position: int) -> tuple[int, int]:
        a, b = overlap((self.first, self.first + self.numel), self.owners.bounds[position])
        return a - self.first, b - self.first

    def same_cut(self, other: IntervalSpec) -> bool:
        """See [Note: the same cut]. Shapes may differ."""
        mine, theirs = self.owners, other.owners
        return (
            self.first == other.first
            and self.numel == other.numel
            and (mine is theirs or mine.bounds == theirs.bounds)
        )

    def within(self, offset: int, shape: Any) -> IntervalSpec:
        """The elements from `offset` on that a tensor of `shape` has."""
        return IntervalSpec(self.owners, self.name, self.first + offset, shape, self.unreduced)

    # -- collectives: every rank of the group calls them -------------------------------------------

    def gather(self, local: torch.Tensor, what: str) -> torch.Tensor:
        """The whole, of `shape`, on every rank, on the device of `local`: this rank's elements.
        `what` is being done, for messages.
        """
        engine, group = self.owners.meet(f"{self.name!r}")
        context = CollectiveContext(
            "state",
            f"{what} of {self.name!r}, which every rank must call",
            engine.progress.step,
            engine.progress.phase,
        )
        full = torch.empty(self.numel, dtype=local.dtype, device=engine.device)
        raw, parts = full.view(torch.uint8), [self._at(p) for p in range(group.size)]
        width = local.element_size()
        with torch.no_grad():
            full[self.start : self.stop].copy_(local)
            mine = raw[self.start * width : self.stop * width]
            sends = [(p, mine) for p in range(group.size) if p != group.rank]
            recvs = [
                (p, raw[a * width : b * width]) for p, (a, b) in enumerate(parts) if p != group.rank
            ]
            group.exchange(sends, recvs, context, self.owners.index, move="state").wait()
        return full.view(self.shape).to(local.device)

    def exchange(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """`values`, [k], of every rank of the group: [ranks, k], in rank order, on the engine's
        device.
        """
        engine, group = self.owners.meet(f"{self.name!r}")
        context = CollectiveContext(
            "control",
            f"{what} of {self.name!r}, which every rank must call",
            engine.progress.step,
            engine.progress.phase,
        )
        return group.gather_values(values.to(engine.device), context)


def spec_of(value: Any) -> IntervalSpec | None:
    """What a sharded parameter or an interval holds; None for anything else, also for parameters
    that are whole here.
    """
    return (
        value.__dict__.get("_onefold_spec")
        if getattr(type(value), "_onefold_faced", False)
        else None
    )


#: What an operation on an interval does: (function, arguments, keyword arguments).
#: runtime/parameters/parameter.py, which makes intervals, sets it.
dispatched_by: list[Any] = [None]


class Interval(torch.Tensor):
    """See this module. Made by `dress`."""

    _onefold_faced = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched_by[0](func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return (
            self.__dict__["_onefold_spec"].shape
            if torch._C._is_torch_function_enabled()
            else _shape(self)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.__dict__["_onefold_spec"]
        with disable_torch_function():
            local = self.detach().as_subclass(torch.Tensor)
            return (
                f"Interval({spec.name!r}: elements {spec.start} to {spec.stop} of shape"
                f" {tuple(spec.shape)}, local={local!r})"
            )

    def __deepcopy__(self, memo: Any) -> Interval:
        with disable_torch_function(), torch.no_grad():
            memo[id(self)] = out = dress(self.detach().clone(), self.__dict__["_onefold_spec"])
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        spec = self.__dict__["_onefold_spec"]
        raise ShardedParameterError(
            f"pickling one rank's part of {spec.name!r}, as torch.save does, would save elements"
            f" {spec.start} to {spec.stop} only. Save onefold.full_state_dict(model),"
            " optimizer.state_dict() or onefold.save(folder, model=model, optimizer=optimizer):"
            " every rank calls it, rank 0 has the whole."
        )


class GivenOut:
    """The tensors that were given out over a parameter's memory, as far as they live: `.data`,
    `detach()`, rows of them.

    [Note: old data] In PyTorch `old = p.data; p.data = other` leaves `old` as it was: it has the
    memory that was the parameter's. Here a parameter keeps its memory, and takes over the values.
    So what was given out before moves to a copy of the old ones. Scripts that put averages in place
    to evaluate, and `old` back behind it, rely on that.
    """

    __slots__ = ("_refs", "_room")

    def __init__(self) -> None:
        self._refs: list[weakref.ref[torch.Tensor]] = []
        self._room = 8

    def add(self, view: torch.Tensor) -> None:
        # A whole tensor leaves no trace: it may be pickled, and its own views are torch's
        if spec_of(view) is not None:
            view.__dict__["_onefold_given_out"] = self
        self._refs.append(weakref.ref(view))
        if len(self._refs) > self._room:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._room = 2 * len(self._refs) + 8

    def move_away(self, memory: torch.Tensor) -> None:
        """Before other values are written to `memory`, plain, as `p.data = value` does. Inside
        `disable_torch_function`.
        """
        views = [view for ref in self._refs if (view := ref()) is not None]
        self._refs = []
        if not views:
            return
        kept, storage = memory.detach().clone(), memory.untyped_storage().data_ptr()
        for view in views:
            view.__dict__.pop("_onefold_given_out", None)
            if view.untyped_storage().data_ptr() == storage:
                view.data = kept.as_strided(
                    view.size(), view.stride(), view.storage_offset() - memory.storage_offset()
                )


def note_given_out(view: torch.Tensor, source: torch.Tensor) -> None:
    """`view` lies in the memory of `source`, an interval."""
    given_out = source.__dict__.get("_onefold_given_out")
    if given_out is not None:
        given_out.add(view)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a sharded parameter or an interval as a plain tensor over the same
    memory; any other tensor detached.
    """
    with disable_torch_function():
        return tensor.detach().as_subclass(torch.Tensor)


# torch's own: inside `disable_torch_function` what a parameter holds as `.grad`, without the way
# round by the property of its class.
_base: Any = torch._C.TensorBase
get_grad, set_grad = _base.grad.__get__, _base.grad.__set__
_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]


_over: dict[tuple[type, type], type] = {}


def dispatches(kind: type) -> bool:
    """Whether tensors of class `kind` compute in a way of their own, as fake ones do
    (simulation/simulate.py): they have to keep their class.
    """
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def over(face: type, own: type) -> type:
    """The class of a tensor of class `own` that gets the class `face`."""
    if not dispatches(own):
        return face
    if (face, own) not in _over:
        _over[face, own] = type(f"{face.__name__}Over{own.__name__}", (face, own), {})
    return _over[face, own]


def dress(local: torch.Tensor, spec: IntervalSpec) -> Interval:
    """A fresh tensor of this rank's elements, [stop - start], as an interval of `spec`. The object
    itself changes its class.
    """
    kind = type(local)
    local.__class__ = Interval if kind is torch.Tensor else over(Interval, kind)
    local.__dict__["_onefold_spec"] = spec
    return local  # type: ignore[return-value]
