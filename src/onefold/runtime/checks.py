"""Checks at the beginning of a pass over the model: is the model still the one that was sharded?"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from onefold.memory import storage_of
from onefold.runtime.parameters.parameter import WRAPPED

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.unit import Unit

_MODULES_A_PASS = 64


def check_in_place(units: Iterable[Unit]) -> None:
    """Raise RuntimeError if the model was moved or cast after shard()."""
    for unit in units:
        for flat in unit.flats:
            if flat.unsharded:
                continue
            # The first entry of which this rank owns elements. If it owns none of any, the dtype
            # still tells.
            owned = next((e for e in flat.entries if flat.local(e)[0] < flat.local(e)[1]), None)
            entry = owned or flat.entries[0]
            want = (
                storage_of(flat.master),
                flat.master.storage_offset() + flat.local(entry)[0] - flat.owned[0],
            )
            lies = storage_of(entry.param), entry.param.storage_offset()
            if (owned is not None and lies != want) or entry.param.dtype != flat.master.dtype:
                raise RuntimeError(
                    f"parameter {entry.slot.name!r} no longer lies in its flat buffer: the model"
                    " was moved or cast after shard() (.to(), .half(), .cuda(), assigning .data)."
                    " Do that before shard() or inside `with onefold.unsharded(model):`, or give"
                    " shard() a device and the recipe a precision."
                )


def check_not_wrapped(module: nn.Module | None) -> None:
    """Raise RuntimeError if this is a forward pass of a DistributedDataParallel model that contains
    `module`.
    """
    around = getattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    if around is not None and any(m is module for m in around.modules()):
        raise RuntimeError(WRAPPED)


class Structure:
    """The modules of a model as shard() found them. Parameters added later would train on every
    rank by itself.

    Walking the whole model costs a millisecond or more, so each look compares only the next few
    modules: their number of parameters, and which children they have. A change is found within some
    passes, in the same pass on every rank.
    """

    def __init__(self, root: nn.Module, entries: Sequence[Entry]) -> None:
        self._root, self._entries = weakref.ref(root), entries
        self._remember(root)

    def _remember(self, root: nn.Module) -> None:
        self._seen = [(weakref.ref(m), _signature(m)) for m in root.modules()]
        self._next = 0

    def look(self, everywhere: bool) -> bool:
        """Compare some modules, or all of them if `everywhere`. Returns True if modules have
        changed, but no parameters.

        Raises:
            RuntimeError: the model has other parameters than when it was sharded, or other ties
                between them; the message names them.
        """
        root = self._root()
        if root is None:
            return False
        start, self._next = (0, 0) if everywhere else (self._next, self._next + _MODULES_A_PASS)
        part = self._seen if everywhere else self._seen[start : self._next]
        if self._next >= len(self._seen):
            self._next = 0
        if all((module := ref()) is not None and _signature(module) == then for ref, then in part):
            return False
        if said := changes(root, self._entries):
            now = sum(1 for _ in root.parameters())
            raise RuntimeError(
                f"the model had {len(self._entries)} parameters when it was sharded and has {now}"
                f" now: {said}. Change its structure (adapters, heads, ties) before shard(), or"
                " inside `with onefold.unsharded(model):`."
            )
        self._remember(root)
        return True

    def refuse_changes(self, call: str) -> None:
        """Check that the parameters that `shard()` found are those of the model. Called before
        `call` reads or writes their values.

        Raises:
            RuntimeError: the model has other parameters now; the message names them.
        """
        root = self._root()
        if root is not None and (said := changes(root, self._entries)):
            raise RuntimeError(
                f"{call} of a model that has other parameters than when it was sharded: {said}. "
                "Change its structure before shard(), or inside `with onefold.unsharded(model):`."
            )


def changes(root: nn.Module, entries: Iterable[Entry]) -> str:
    """Return a text that names the parameters of `root` that were added, removed, replaced or tied
    to others since `entries` were found there; "" if none were.
    """
    then = {name: entry for entry in entries for name in entry.names}
    known = {id(entry.param): entry for entry in entries}
    now = {
        name: param
        for name, param in root.named_parameters(remove_duplicate=False)
        if isinstance(param, nn.Parameter)
    }
    there = {id(param) for param in now.values()}
    replaced = [name for name, param in now.items() if id(param) not in known and name in then]
    added = [name for name, param in now.items() if id(param) not in known and name not in then]
    tied = [
        f"{name!r} to {entry.names[0]!r}"
        for name, param in now.items()
        if (entry := known.get(id(param))) is not None and name in then and then[name] is not entry
    ]
    removed = [
        name for name, entry in then.items() if name not in now and id(entry.param) not in there
    ]
    lists = {"replaced": replaced, "added": added, "removed": removed}
    said = [
        f"{what} {_few([repr(name) for name in names])}" for what, names in lists.items() if names
    ]
    return ", ".join([*said, *([f"tied {_few(tied)}"] if tied else [])])


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _signature(module: nn.Module) -> tuple[int, ...]:
    return (
        sum(p is not None for p in module._parameters.values()),
        *map(id, module._modules.values()),
    )
