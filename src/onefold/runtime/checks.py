"""What is looked at when a pass over the model begins: is the model still the one that was sharded?"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from onefold.memory import storage_of
from onefold.runtime.parameter import WRAPPED

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

_MODULES_A_PASS = 64


def check_in_place(engine: Engine) -> None:
    """Raise RuntimeError if the model was moved or cast after shard()."""
    for unit in engine.units:
        for flat in unit.flats:
            if flat.passive:
                continue
            # The first of which this rank owns anything; where it owns nothing, the dtype still tells.
            owned = next((e for e in flat.entries if flat.local(e)[0] < flat.local(e)[1]), None)
            entry = owned or flat.entries[0]
            want = storage_of(flat.master), flat.master.storage_offset() + flat.local(entry)[0] - flat.owned[0]
            lies = storage_of(entry.param), entry.param.storage_offset()
            if (owned is not None and lies != want) or entry.param.dtype != flat.master.dtype:
                raise RuntimeError(
                    f"parameter {entry.slot.name!r} no longer lies in its flat buffer: the model was moved or cast after shard() "
                    "(.to(), .half(), .cuda(), assigning .data). Do that before shard(), "
                    "or give shard() a device and the recipe a precision."
                )


def check_not_wrapped(module: nn.Module | None) -> None:
    """Raise RuntimeError if this pass is a DistributedDataParallel's over a model that holds `module`."""
    around = getattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    if around is not None and any(m is module for m in around.modules()):
        raise RuntimeError(WRAPPED)


class Structure:
    """The modules of a model as shard() found them: parameters added later would train on every rank by itself.

    Walking the whole model costs a millisecond and more, so a look compares the next few modules (their number of parameters, and which
    children they have): a change is found within some passes, in the same one on every rank.
    """

    def __init__(self, root: nn.Module, known: int) -> None:
        self._root, self._known = weakref.ref(root), known
        self._remember(root)

    def _remember(self, root: nn.Module) -> None:
        self._seen = [(weakref.ref(m), _signature(m)) for m in root.modules()]
        self._next = 0

    def look(self, everywhere: bool) -> None:
        """Compare some modules, or all.

        Raises:
            RuntimeError: the model has more parameters than when it was sharded, or fewer.
        """
        root = self._root()
        if root is None:
            return
        start, self._next = (0, 0) if everywhere else (self._next, self._next + _MODULES_A_PASS)
        part = self._seen if everywhere else self._seen[start : self._next]
        if self._next >= len(self._seen):
            self._next = 0
        if all((module := ref()) is not None and _signature(module) == then for ref, then in part):
            return
        if (now := sum(1 for _ in root.parameters())) != self._known:
            raise RuntimeError(
                f"the model had {self._known} parameters when it was sharded and has {now} now: "
                "add modules (adapters, heads) before shard()."
            )
        self._remember(root)


def _signature(module: nn.Module) -> tuple[int, ...]:
    return (sum(p is not None for p in module._parameters.values()), *map(id, module._modules.values()))
