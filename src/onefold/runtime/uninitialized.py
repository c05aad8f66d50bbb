"""Uninitialized parameters and buffers: they were on the meta device when the model was sharded, and have
no value yet. They may be loaded later, and must not be used before.

    shard()      notes parameters and buffers that nothing initialized
    a load       gives some of them, or all, a value (onefold.load, load_full_state_dict, load_pretrained, full_params(write=True), ...)
    a use        of an uninitialized one raises, with its name: the forward pass of its unit, whole parameters to read, a save

[Note: marks of what is uninitialized] Uninitialized memory is filled with NaN, so that a value shows however it
came: by a load, in place, or through `.data`. For dtypes without NaN, and for weights that are
stored encoded, the names that a load brings tell. All ranks check together when a pass begins, and
a parameter has a value once any rank has seen one, so all ranks raise alike. Once everything is
loaded the list of uninitialized names is empty, and nothing is checked any more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts, StateItem

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.runtime.flat import Entry
    from onefold.runtime.resources import Progress
    from onefold.runtime.unit import Unit


#: The end of an error message: what to do.
_HOW = (
    "Load it on every rank: onefold.load(path, model=model), onefold.load_full_state_dict(model,"
    " state_dict), onefold.load_pretrained(model, folder), or write it inside `with"
    " onefold.full_params(model, write=True):`. Or give shard() an init=function or weights=folder."
)


class UninitializedError(RuntimeError):
    """Something was used that was built on the meta device and never given a value."""


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Fill memory that has no value yet, so that a later write to it shows."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.detach().fill_(math.nan)
    else:
        tensor.detach().zero_()
    tensor._onefold_unset = tensor._version  # type: ignore[attr-defined]
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether nobody has written to `tensor` since `mark`."""
    if not hasattr(tensor, "_onefold_unset") or not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return _all_nan(tensor)
    return bool(tensor._onefold_unset == tensor._version)


def _all_nan(values: torch.Tensor) -> bool:
    values = values.detach().reshape(-1)
    # The first element tells as a rule
    return bool(values[:1].isnan().all()) and bool(values.isnan().all())


class Uninitialized:
    """What is uninitialized of one engine: entries by their number, and buffers by their name in the model,
    with the table that holds each.
    """

    def __init__(self, group: Group, progress: Progress) -> None:
        self._group, self._progress = group, progress
        self._entries: dict[int, Entry] = {}
        # Table, key, number of the unit
        self._buffers: dict[str, tuple[dict[str, torch.Tensor | None], str, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries or self._buffers)

    def add(self, entry: Entry) -> None:
        """Note a parameter that has no value."""
        self._entries[entry.number] = entry

    def add_buffer(self, name: str, module: nn.Module, key: str, unit: Unit) -> None:
        """Note a buffer of a unit's module that has no value."""
        self._buffers[name] = (module._buffers, key, unit.index)

    def names(self) -> list[str]:
        """Return the names of everything uninitialized, parameters first."""
        return list(dict.fromkeys([*(e.name for e in self._entries.values()), *self._buffers]))

    def notes(self) -> list[str]:
        """Return a sentence for the start of the run, if anything is uninitialized."""
        names = self.names()
        if not names:
            return []
        return [f"{_some(names)}: built on the meta device, without a value yet. Load before use."]

    def close(self) -> None:
        self._entries.clear()
        self._buffers.clear()

    # -- values arrive -----------------------------------------------------------------------------

    def given(self, names: Collection[str]) -> None:
        """Remove from the list the parameters and buffers that a load has brought. `names` are
        those in the model, the same on every rank.
        """
        for number, entry in list(self._entries.items()):
            if any(name in names for name in entry.names):
                del self._entries[number]
        for name in [name for name in self._buffers if name in names]:
            del self._buffers[name]

    def look(self) -> None:
        """Remove from the list what got a value otherwise. Collective while anything is uninitialized."""
        if not self:
            return
        mine = self._still()
        if self._group.alone:
            self._keep(mine)
            return
        payload = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        said = self._group.exchange_control(
            payload,
            CollectiveContext("control", "(uninitialized)", self._progress.step_count, "state"),
        )
        together = torch.stack(said).amin(0).tolist()  # a value on any rank is enough
        first = said[0].tolist()  # rank 0's buffers become everybody's
        self._keep([*together[: len(self._entries)], *first[len(self._entries) :]])

    def look_alone(self) -> None:
        """Do the same by what this rank holds alone. Not collective."""
        if self:
            self._keep(self._still())

    def remember(self) -> None:
        """Keep buffers marked that the engine itself has written to: that gave them no value."""
        for table, key, _ in self._buffers.values():
            tensor = table.get(key)
            if tensor is not None and hasattr(tensor, "_onefold_unset"):
                tensor._onefold_unset = tensor._version

    def _still(self) -> list[int]:
        """Return a number for each, in order: 1 if it has no value as far as this rank sees."""
        with disable_torch_function(), torch.no_grad():
            entries = [_entry_is_unset(entry) for entry in self._entries.values()]
            buffers = [
                is_marked(t)
                for table, key, _ in self._buffers.values()
                if (t := table.get(key, _NONE)) is not None
            ]
        return [int(uninitialized) for uninitialized in (*entries, *buffers)]

    def _keep(self, still: Iterable[int]) -> None:
        kept = list(still)
        entries = zip(list(self._entries), kept[: len(self._entries)], strict=True)
        buffers = zip(list(self._buffers), kept[len(self._entries) :], strict=True)
        for number in [number for number, uninitialized in entries if not uninitialized]:
            del self._entries[number]
        for name in [name for name, uninitialized in buffers if not uninitialized]:
            del self._buffers[name]

    # -- use ---------------------------------------------------------------------------------------

    def refuse_in(self, unit: Unit) -> None:
        """Raise UninitializedError if the forward pass of a unit would use something uninitialized."""
        names = [e.name for e in self._entries.values() if e.flat in unit.flats]
        names += [name for name, (_, _, index) in self._buffers.items() if index == unit.index]
        self._refuse(names, f"the forward pass of {unit.name!r} uses")

    def refuse_of(self, module: nn.Module) -> None:
        """Raise UninitializedError if a module's own parameters or buffers are uninitialized."""
        names = [
            e.name
            for e in self._entries.values()
            if any(p is module._parameters for p, *_ in e.places)
        ]
        names += [name for name, (table, _, _) in self._buffers.items() if table is module._buffers]
        self._refuse(names, f"the forward pass of a {type(module).__name__} uses")

    def refuse_entry(self, entry: Entry) -> None:
        """Raise UninitializedError if a parameter is uninitialized."""
        if entry.number in self._entries:
            self._refuse([entry.name], "a forward pass uses")

    def refuse(self, doing: str, among: Collection[str] | None = None) -> None:
        """Raise UninitializedError if anything is uninitialized; `among`: any parameter or buffer of these names."""
        self._refuse([n for n in self.names() if among is None or n in among], doing)

    def _refuse(self, names: list[str], doing: str) -> None:
        names = list(dict.fromkeys(names))
        if names:
            raise UninitializedError(
                f"{doing} {_some(names)}, built on the meta device and never given a value. {_HOW}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


_NONE = torch.empty(0, device="cpu")  # stands for a buffer that is gone: nobody can use it


def _entry_is_unset(entry: Entry) -> bool:
    flat = entry.flat
    if flat.unsharded:
        return (
            is_marked(entry.param)
            if hasattr(entry.param, "_onefold_unset")
            else _all_nan(entry.param)
        )
    if flat.storage.encoded or not flat.dtypes.master.is_floating_point:
        return True  # only a load's names can tell
    a, b = entry.owned()
    item = StateItem(entry, "", flat.dtypes.master)
    return a == b or _all_nan(MasterParts().read(item, entry, a, b))


def without_value(group: Group, unit: Unit, incoming: Collection[str]) -> set[str]:
    """Return the first names of a unit's parameters that have no value on rank 0 and are not among
    `incoming`, the names that a load will bring. Collective.
    """
    mine = [
        int(entry.slot.name not in incoming and entry.slot.numel > 0 and value_of(entry) is None)
        for entry in unit.entries
    ]
    if mine and not group.alone:
        payload = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        mine = group.exchange_control(
            payload, CollectiveContext("control", "(uninitialized)", 0, "state")
        )[0].tolist()
    return {
        entry.slot.name
        for entry, uninitialized in zip(unit.entries, mine, strict=True)
        if uninitialized
    }


def value_of(entry: Entry) -> torch.Tensor | None:
    """Return a parameter as the modules have it before it is laid out: from the first place that
    has a value. None if no place has one.
    """
    for parameters, attribute, _ in entry.places:
        source = parameters[attribute]
        if source is not None and not source.is_meta and not is_marked(source):
            return source
    return None
