"""Uninitialized parameters and buffers: they were on the meta device when the model was sharded, and have
no value yet. They may be loaded later, and must not be used before.

    shard()      notes parameters and buffers that nothing initialized
    a load       gives some of them, or all, a value (onefold.load, load_full_state_dict, load_pretrained, full_params(write=True), ...)
    a use        of an uninitialized one raises, with its name: a forward pass, whole parameters to read, a save

[Note: marks of what is uninitialized] Uninitialized memory is filled with NaN (integers with the largest number),
so that a value shows however it came: by a load, in place, or through `.data`. Weights that are stored
encoded are zeros, since a NaN would spoil its neighbours there: of these, the names that a load brings tell.
All ranks check together when a pass begins, and what is blank on any rank has no value, so all ranks raise
alike. Once everything is loaded the list is empty, and nothing is checked any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts, master_items
from onefold.wording import few

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.runtime.flat import Entry


T = TypeVar("T", bound=torch.Tensor)

#: The end of an error message: what to do.
_HOW = (
    "Load it on every rank: onefold.load(path, model=model), onefold.load_full_state_dict(model,"
    " state_dict), onefold.load_pretrained(model, folder), or write it inside `with"
    " onefold.full_params(model, write=True):`. Or give shard() an init=function or weights=folder."
)
_CONTEXT = CollectiveContext("control", "(uninitialized)", 0, "state")


class UninitializedError(RuntimeError):
    """Something was used that was built on the meta device and never given a value."""


# -- marks -----------------------------------------------------------------------------------------


def fill_blank(values: torch.Tensor) -> torch.Tensor:
    """Fill memory that has no value yet. See [Note: marks of what is uninitialized]."""
    dtype = values.dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    number = math.nan if not whole else dtype == torch.bool or torch.iinfo(dtype).max
    return values.detach().fill_(number)


def _is_blank(values: torch.Tensor) -> bool:
    blank = fill_blank(values.new_empty(1))
    return bool(torch.isclose(values, blank, rtol=0, atol=0, equal_nan=True).all())


def mark(tensor: T) -> T:
    """Fill a parameter or buffer that has no value yet."""
    fill_blank(tensor)
    tensor._onefold_blank = True  # type: ignore[attr-defined]
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether nobody has written a value to `tensor` since `mark`."""
    if not hasattr(tensor, "_onefold_blank") or not tensor.numel():
        return False
    row = tensor.detach().reshape(-1)
    return _is_blank(row[:1]) and _is_blank(row)  # the first element tells as a rule


def value_of(entry: Entry) -> torch.Tensor | None:
    """Return a parameter as the modules have it before it is laid out: from the first place that
    has a value. None if no place has one.
    """
    for parameters, attribute in entry.places:
        source = parameters[attribute]
        if source is not None and not source.is_meta and not is_marked(source):
            return source
    return None


# -- what has no value -----------------------------------------------------------------------------


#: Something without a value: its names, and whether this rank's part of it is still blank.
_Unset = tuple[Sequence[str], Callable[[], bool]]


class Uninitialized:
    """What is uninitialized of one engine. The list is the same on every rank.

    Attributes:
        encoded: names of parameters without a value that are stored encoded, on one rank that has them.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._left: list[_Unset] = []
        self.encoded: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, entries: Iterable[Entry], root: nn.Module) -> None:
        """Note all parameters, and all buffers of a model."""
        self._left = [(e.names, partial(self._is_blank, e)) for e in entries]
        for name, module in root.named_modules():
            for key in module._buffers:
                names = [f"{name}.{key}" if name else key]
                self._left.append((names, partial(_buffer_is_blank, module._buffers, key)))

    def _is_blank(self, entry: Entry) -> bool:
        """Whether this rank has elements of a parameter, and none has a value."""
        if entry.flat.spec.stored:
            return entry.name in self.encoded
        parts, (item,), (a, b) = MasterParts(), master_items([entry]), entry.owned()
        return a < b and all(_is_blank(parts.read(item, a, end)) for end in (a + 1, b))

    def notes(self) -> list[str]:
        """Return a sentence for the start of the run, if anything is uninitialized."""
        if not self:
            return []
        some = _some(self._left)
        return [f"{some}: built on the meta device, without a value yet. Load before use."]

    def given(self, names: Collection[str]) -> None:
        """Remove from the list the parameters and buffers that a load has brought. `names` are
        those in the model, the same on every rank.
        """
        self._left = [u for u in self._left if not any(n in names for n in u[0])]

    def look(self) -> None:
        """Remove from the list what got a value otherwise. Collective while anything is uninitialized."""
        if self:
            blank = self._group.any_of(bytes(_blank(self._left)), _CONTEXT)
            self._left = [*compress(self._left, blank)]

    def refuse(self, doing: str, among: Collection[str] | None = None, here: bool = False) -> None:
        """Raise UninitializedError if anything is uninitialized; `among`: of these names. Collective
        while anything is; `here`: looks at what is blank on this rank, which may be the only one to ask.
        """
        if not here:
            self.look()
        found = [u for u in self._left if among is None or any(n in among for n in u[0])]
        if here:
            found = [*compress(found, _blank(found))]
        if found:
            raise UninitializedError(
                f"{doing} {_some(found)}, built on the meta device and never given a value. {_HOW}"
            )


def _blank(found: list[_Unset]) -> list[bool]:
    """Return of each whether it is blank on this rank."""
    with disable_torch_function(), torch.no_grad():
        return [is_blank() for _, is_blank in found]


def _buffer_is_blank(table: dict[str, torch.Tensor | None], key: str) -> bool:
    buffer = table.get(key)
    return buffer is not None and is_marked(buffer)


def _some(found: list[_Unset]) -> str:
    return few(repr(names[0]) for names, _ in found)
