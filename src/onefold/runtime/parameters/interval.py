"""Intervals: tensors that show a whole parameter's shape and hold this rank's part of its elements.

    parameter   [4, 6], flattened     0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 ... 17 | 18 ... 23
    rank 0      holds [0, 10)         x x x x x x   x x x x
    rank 1      holds [10, 24)                                1 1   1 ... 1     1 ... 1

`p.data`, `p.grad` and `p.detach()` of a sharded parameter are intervals, and so are the results of
element-wise operations on them. operators.py decides what each operation does.
Inside `disable_torch_function()` an interval is an ordinary one-dimensional tensor of the local
elements.

[Note: the same question] Collectives of the user's own (a norm, a sum, a read of the whole) say what
they ask for: the operation, the parameter and the part of it, and whether they mean its values, its
gradient or an optimizer state. A number is sent with a digest of that. If the ranks ask for
different numbers, all raise. Reads of the whole have the digest in their tags, so that they never
match, and end in a `StallError`.

[Note: the same cut] Two intervals can be combined element by element without traffic if every rank
holds the same elements of both. Whether that is so is decided from addresses and owners alone,
never from the elements that this rank holds. So all ranks decide alike: either all communicate or
none.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._foreach_utils import _foreach_supported_types

from onefold.comm import CollectiveContext, as_bytes
from onefold.layout import overlap

if TYPE_CHECKING:
    from onefold.runtime.boxes import Box
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat

# Inside it sharded parameters and intervals are plain tensors over local memory
disable_torch_function = torch._C.DisableTorchFunctionSubclass


class ShardedParameterError(RuntimeError):
    """A sharded parameter, or an interval of one, was used as if it were whole."""


@dataclass(eq=False)
class IntervalSpec:
    """Which elements of a tensor of `shape` this rank holds: [start, stop) of the flattened tensor.

    Attributes:
        flat: its flat buffer, weak: tensors may outlive their model.
        bounds: the addresses `(start, stop)` of each rank, by its position in `Flat.owners_group`,
            whose ranks together own every address once; of one rank, if each owns every address.
        position: this rank's position in that group.
        name: the parameter's name, for messages.
        first: the address of element 0 in the flat buffer.
        role: what it is of the parameter: "" for its values, "grad", or an optimizer state's key.
        held: elements that the holders of this box have.
        box: the box that its holders have of the whole, [start, stop) being elements of it; None if
            they have all of it.
    """

    flat: weakref.ref[Flat]
    bounds: tuple[tuple[int, int], ...]
    position: int
    name: str
    first: int
    shape: Any  # a torch.Size from there on
    role: str = ""
    box: Box | None = None

    def __post_init__(self) -> None:
        self.shape = torch.Size(self.shape)
        self.numel = prod(self.shape)
        self.held = self.numel if self.box is None else self.box.numel
        self.start, self.stop = self._at(self.position)
        self._roles: dict[str, IntervalSpec] = {}

    def _at(self, position: int) -> tuple[int, int]:
        """Return what the owner at a position holds of what the holders of this box have."""
        a, b = overlap((self.first, self.first + self.held), self.bounds[position])
        return a - self.first, b - self.first

    @property
    def cut(self) -> Any:
        """The same as that of another: see [Note: the same cut]. Shapes may differ."""
        box = self.box and (self.box.kind, self.box.shape)
        return self.first, self.numel, self.bounds, box

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, [stop - start], of a tensor that broadcasts to `shape`."""
        try:
            whole = whole.expand(self.shape or (1,))
        except RuntimeError:
            raise self.mismatch(whole) from None
        if self.box is not None:
            return self.box.part(whole).reshape(-1)[self.start : self.stop]
        row = max(prod(self.shape[1:]), 1)  # copy only the rows that this rank has elements of
        first = self.start // row
        held = whole[first : -(-self.stop // row)].reshape(-1)
        return held[self.start - first * row : self.stop - first * row]

    def mismatch(self, given: torch.Tensor) -> ShardedParameterError:
        return ShardedParameterError(
            f"{self.said} of shape {tuple(self.shape)} was given a tensor of shape"
            f" {tuple(shape_of(given))}, {given.dtype}: expected a number, or a tensor of the whole's"
            " shape, or one that broadcasts to it (each rank takes its slice)."
        )

    def within(self, offset: int, shape: Any) -> IntervalSpec:
        """Return the spec of a tensor of `shape` that begins `offset` elements into this one."""
        return replace(self, first=self.first + offset, shape=shape, box=None)

    def of(self, role: str) -> IntervalSpec:
        """Return the spec of the parameter's gradient ("grad"), or of an optimizer state."""
        if role not in self._roles:
            self._roles[role] = replace(self, role=role)
        return self._roles[role]

    def stand_in(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the whole's shape without memory."""
        return torch.empty(self.shape, dtype=dtype, device="meta")

    @cached_property
    def token(self) -> bytes:
        """What tells it from any other interval, in a few bytes: for digests."""
        said = f"{self.name} {self.role} {self.first} {tuple(self.shape)}"
        return zlib.crc32(said.encode()).to_bytes(4, "little")

    @property
    def said(self) -> str:
        """What messages call it."""
        if self.role in ("", "grad"):
            return repr(f"{self.name}.{self.role}" if self.role else self.name)
        return f"the state {self.role!r} of {self.name!r}"

    # -- collectives: every rank of the group calls them -------------------------------------------

    def gather(self, local: torch.Tensor, what: str) -> torch.Tensor:
        """Return the whole tensor, of `shape`, on every rank and on the device of `local`.

        `local` has this rank's elements. `what` names the operation, for messages.
        """
        flat, _, context = self._begin("state", what)
        group, held = flat.owners_group, local
        if len(self.bounds) > 1:
            held = torch.empty(self.held, dtype=local.dtype, device=group.device)
            with torch.no_grad():
                held[self.start : self.stop].copy_(local)
            parts = [(p, as_bytes(held[slice(*self._at(p))])) for p in range(group.size)]
            _, mine = parts.pop(group.rank)
            # See [Note: the same question]
            context.about = zlib.crc32(f"{what} {self.said}".encode()), self.first
            sends = [(p, mine) for p, _ in parts]
            group.exchange(sends, parts, context, flat.index).wait()
        if self.box is None:
            return held.view(self.shape).to(local.device)
        return self.box.gather(held.view(self.box.local_shape)).to(local.device)

    def exchange(
        self, values: torch.Tensor, what: str, others: Sequence[IntervalSpec] = ()
    ) -> torch.Tensor:
        """Return the `values`, [k], of every rank of the group as [ranks, k], in rank order, on the
        group's device. `others`: the further intervals that the values are of.

        Raises:
            RuntimeError: on every rank, if another rank asked for something else. See [Note: the
                same question].
        """
        flat, engine, context = self._begin("control", what)
        digest = zlib.crc32(what.encode())
        for spec in (self, *others):
            digest = zlib.crc32(spec.token, digest)
        more = f" and of {len(others)} others" if others else ""
        asked = f"{what} of {self.said}{more}"
        group, everyone, values = flat.owners_group, engine.group, values.to(engine.device)
        # One row, or the rows of one group of owners, for each box
        alone = len(self.bounds) == 1
        values = values[None] if alone else group.gather_asked(values, digest, asked, context)
        if self.box is None:
            return values
        every = everyone.gather_asked(values, digest, asked, context)
        return every[self.box.firsts(everyone.ranks)].flatten(0, 1)

    def home(self) -> tuple[Flat, Engine]:
        """Return its flat buffer and the engine.

        Raises:
            ShardedParameterError: the model is gone.
        """
        flat = self.flat()
        engine = None if flat is None else flat.engine()
        if flat is None or engine is None:
            raise ShardedParameterError(
                f"{self.said} is one rank's part of a parameter whose model is gone. Keep the model as"
                " long as its parts are read."
            )
        return flat, engine

    def _begin(self, move: str, what: str) -> tuple[Flat, Engine, CollectiveContext]:
        """Return `home`, and what the ledger and messages say of a collective."""
        flat, engine = self.home()
        subject = f"{what} of {self.said}, which every rank must call"
        return flat, engine, engine.context(move, subject)


def spec_of(value: Any) -> IntervalSpec | None:
    """Return the spec of a sharded parameter or an interval. None for anything else, and for
    parameters of which every rank holds the whole.
    """
    return (
        value.__dict__.get("_onefold_spec")
        if getattr(type(value), "_onefold_faced", False)
        else None
    )


def shape_of(t: torch.Tensor) -> torch.Size:
    """Return the shape that user code sees."""
    return t.shape if (spec := spec_of(t)) is None else spec.shape


def entry_of(param: Any) -> Entry | None:
    """Return the entry of a sharded parameter; None for another tensor, and if its model is gone."""
    entry: Entry | None = owner_of(param)[0]
    return entry


def owner_of(param: Any) -> tuple[Any, Any]:
    """Return the entry of a sharded parameter and its engine; (None, None) for another tensor, and if
    its model is gone.
    """
    info = getattr(param, "__dict__", {}).get("onefold")
    entry = None if info is None else info.entry()
    return (None, None) if entry is None else (entry, entry.engine())


class Interval(torch.Tensor):
    """See the docstring of this module. `dress` makes intervals; parameter.py gives them its dispatch."""

    _onefold_faced = True

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return (
            self.__dict__["_onefold_spec"].shape
            if torch._C._is_torch_function_enabled()
            else get_shape(self)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.__dict__["_onefold_spec"]
        return (
            f"Interval({spec.name!r}: elements {spec.start} to {spec.stop} of shape"
            f" {tuple(spec.shape)}, local={local_part(self)!r})"
        )

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        memo[id(self)] = out = self.clone()
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        spec = self.__dict__["_onefold_spec"]
        raise ShardedParameterError(
            f"pickling one rank's part of {spec.name!r}, as torch.save does, would save elements"
            f" {spec.start} to {spec.stop} only. Save onefold.full_state_dict(model),"
            " optimizer.state_dict() or onefold.save(folder, model=model, optimizer=optimizer):"
            " every rank calls it, rank 0 has the whole."
        )


# torch.nn.utils.clip_grad_norm_ and its like take one call for all tensors of these classes, and one
# call (here, an exchange) for each tensor of others. DTensor is added likewise by torch itself.
_foreach_supported_types.append(Interval)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a sharded parameter or an interval as a plain tensor over the
    same memory. Any other tensor is returned detached.
    """
    with disable_torch_function():
        return tensor.detach().as_subclass(torch.Tensor)


# torch's own accessors. Inside `disable_torch_function` they read and write the `.grad` that the
# parameter holds, without the property of its class.
_base: Any = torch._C.TensorBase
get_grad, set_grad = _base.grad.__get__, _base.grad.__set__
get_shape = _base.shape.__get__


def dispatches(kind: type) -> bool:
    """Whether tensors of class `kind` have a `__torch_dispatch__` of their own and therefore must
    keep their class, as fake tensors do (simulation/simulate.py).
    """
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


@cache
def over(face: type, own: type) -> type:
    """Return the class that makes a tensor of class `own` a `face`: `face` itself, or a subclass of
    both if `own` has a dispatch of its own.
    """
    return type(f"{face.__name__}Over{own.__name__}", (face, own), {}) if dispatches(own) else face


def dress(local: torch.Tensor, spec: IntervalSpec) -> Interval:
    """Make `local`, a fresh tensor of this rank's elements [stop - start], an interval of `spec`.
    Changes the class of `local` itself, and returns it.
    """
    local.__class__ = over(Interval, type(local))
    local.__dict__["_onefold_spec"] = spec
    return local  # type: ignore[return-value]
