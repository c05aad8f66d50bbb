"""Buffers of the model follow rank 0's, by the rule of DistributedDataParallel.

| pass over the model                                | rank 0's buffers become everybody's before it |
|----------------------------------------------------|-----------------------------------------------|
| the first                                          | yes                                           |
| after a pass with gradients, outside `no_sync`     | yes, in evaluation too                        |
| after a pass without gradients, or under `no_sync` | no                                            |

On a mesh of several axes, a buffer follows the first of the ranks that share it: those apart along data
axes alone, which hold the same of its module's parameters. Along other axes each rank has its own, as of
its heads, columns or experts.

All of them travel in one message, as bytes: buffers of any dtype, 0-dimensional ones, those that
are not in the state dict, and those that a module has put in place of others since. Constants
travel too, as under DDP: without a further message, no rank can know whether another rank has
written to a buffer (writes through `.data` change no version counter).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from onefold.comm import CollectiveContext, Group, alike, as_bytes, both
from onefold.layout.holders import Holders
from onefold.memory import STAGING, storage_of
from onefold.runtime.boxes import local_of
from onefold.runtime.parameters.interval import ShardedParameterError, spec_of
from onefold.runtime.parameters.parameter import WRAPPED
from onefold.runtime.uninitialized import is_marked
from onefold.wording import few

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Unit
    from onefold.runtime.units import UnitSpec

Key = TypeVar("Key")
#: Ranks that share a buffer, for every rank.
Sharing = tuple[tuple[int, ...], ...]
#: A module's buffers, by their names in it.
Table = dict[str, torch.Tensor | None]

_START = CollectiveContext("control", "(buffers)", 0, "state")


class Buffers:
    """The buffers of one engine's model. Holds the modules' tables of buffers, not the modules.

    Attributes:
        due: the next pass over the model begins with a copy of rank 0's buffers: the last one recorded
            gradients that the ranks share.
    """

    def __init__(self, engine: Engine, specs: Iterable[UnitSpec]) -> None:
        self._engine, self._group = engine, engine.group
        # By id of the table of a module, of whose parameters not all ranks hold the same
        divided: dict[int, set[Sharing]] = {}
        for found in (f for spec in specs for f in spec.found):
            if found.box is not None and found.box.divided:
                for module, _ in found.places:
                    groups = found.box.kind.holders.groups
                    divided.setdefault(id(module._buffers), set()).add(groups)
        self._others = self._shared_by(())
        self._divided = {table: self._shared_by(groups) for table, groups in divided.items()}
        self._tables: list[Table] = []
        self._sent: list[Table] = []
        self.due = True

    def find(self, module: nn.Module) -> None:
        """Look at the modules of the model. Before passes go the buffers that the recipe names."""
        wanted, norms = self._engine.recipe.sync_buffers, nn.modules.batchnorm._NormBase
        self._tables = [m._buffers for m in module.modules()]
        self._sent = [
            m._buffers
            for m in module.modules()
            if wanted is True or (wanted == "norms" and isinstance(m, norms))
        ]

    def _shared_by(self, divided: Iterable[Sharing]) -> tuple[Group, str]:
        """Return who shares buffers of a module, by who holds the same of its parameters; and in words
        whose values this rank's are: "tp: 1 of 2", or "" if all ranks share them.
        """
        mesh, group = self._engine.mesh, self._group
        apart: list[Any] = [mesh.along([name for name in mesh.names if name not in mesh.data])]
        apart += [{r: ranks for ranks in groups for r in ranks} for groups in sorted(divided)]
        sharing = Holders.of(
            {r: tuple(of[r] for of in apart) for r in mesh.at}, mesh.data_of
        ).groups
        at = next(i for i, ranks in enumerate(sharing) if group.shared.rank in ranks)
        axes = mesh.axes_of([ranks[0] for ranks in sharing])
        words = f"{', '.join(axes)}: {at} of {len(sharing)}" if axes else ""
        return group.part(sharing), words

    def _place(self, table: Table) -> tuple[Group, str]:
        return self._divided.get(id(table), self._others)

    def _by_group(self, tables: Iterable[Table]) -> dict[Group, list[torch.Tensor]]:
        """Return the buffers in `tables`, each once, by the group that shares them."""
        by: dict[Group, dict[int, torch.Tensor]] = {}
        for table in tables:
            found = by.setdefault(self._place(table)[0], {})
            for name, b in table.items():
                if b is not None:
                    found[id(b)] = local_of(refuse_parts(name, b))
        return {group: [*found.values()] for group, found in by.items()}

    def before_pass(self) -> None:
        """Called when a pass over the model begins: send rank 0's buffers, if that is due."""
        if not self.due or self._group.size == 1:
            return
        engine = self._engine
        for group, tensors in self._by_group(self._sent).items():
            nbytes = sum(b.nbytes for b in tensors)
            engine.memory.add(STAGING, nbytes, "buffers")
            context = engine.context("state", "buffers")
            group.broadcast(tensors, context)
            engine.memory.add(STAGING, -nbytes, "buffers")

    def start(self) -> None:
        """Give every rank the values of the first that shares a buffer, or of rank 0 where that one
        has none: its model was on the meta device. Collective.
        """
        everyone, shared = self._group, self._by_group(self._tables)
        context = self._engine.state_context("buffers")
        own = [b for group, found in shared.items() if group is not everyone for b in found]
        if own and not everyone.alone:
            without = everyone.any_of(bytes(map(is_marked, own)), _START)
            everyone.broadcast([b for b, no in zip(own, without, strict=True) if no], context)
        for group, tensors in shared.items():
            group.broadcast(tensors, context)

    # -- buffers of which ranks have values of their own -------------------------------------------

    @property
    def several(self) -> bool:
        """Whether some buffers may be shared by some of the ranks only."""
        return bool(self._divided or self._others[1])

    def places(self, named: Mapping[Key, torch.Tensor]) -> dict[Key, tuple[Group, str]]:
        """Return who shares each buffer, and the words of `_shared_by`."""
        known = {
            id(local_of(b)): self._place(table)
            for table in self._tables
            for b in table.values()
            if b is not None
        }
        # What a hook of the state dict has made is in no table
        return {name: known.get(id(local_of(b)), self._others) for name, b in named.items()}

    def own(self, named: Mapping[str, torch.Tensor]) -> dict[str, tuple[Group, str]]:
        """Return those of `places` of which ranks have other values than ranks that do not share
        them. Collective if there are `several`; the host waits.
        """
        places = self.places(named) if self.several else {}
        mine = [
            named[n] if words and group.rank == 0 else None for n, (group, words) in places.items()
        ]
        apart = unlike(self._group, mine)
        return {name: places[name] for name, other in zip(places, apart, strict=True) if other}

    def refuse_own(self, module: nn.Module, call: str) -> None:
        """Raise ValueError on every rank if `call` would have rank 0's values of buffers of which
        other ranks have values of their own. Collective if there are `several`.
        """
        if own := self.own(persistent(module)):
            raise ValueError(
                f"{call} has one value of each buffer, and ranks have values of their own of"
                f" {few(map(repr, own))} (here {next(iter(own.values()))[1]}). onefold.save stores"
                " them all. Register what is computed anew with persistent=False."
            )


def persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the module's state dict has, by name."""
    return {
        f"{prefix}.{key}" if prefix else key: b
        for prefix, m in module.named_modules()
        for key, b in m._buffers.items()
        if b is not None and key not in m._non_persistent_buffers_set
    }


def unlike(group: Group, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
    """Return of each tensor whether ranks have other bytes of it, None aside. Collective; the host
    waits.
    """
    mine = [
        bytes(8)
        if t is None
        else both(zlib.crc32(as_bytes(t).cpu().numpy().tobytes()).to_bytes(4, "little"))
        for t in tensors
    ]
    found = group.any_of(b"".join(mine), _START) if mine else b""
    return [not alike(found[i : i + 8]) for i in range(0, len(found), 8)]


def refuse_parts(name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Return `buffer` unless it was made of a shard.

    Raises:
        ShardedParameterError: it is this rank's part of a parameter, such as
            `self.register_buffer("old", p.data.clone())` makes.
    """
    spec = spec_of(buffer)
    if spec is not None:
        raise ShardedParameterError(
            f"buffer {name!r} was made of parameter {spec.name!r} after shard(): it holds this"
            " rank's part of it, and buffers are rank 0's everywhere. Make it (a pruning mask, an"
            " average) before shard() or between onefold.unshard(model) and a new shard(), or register a"
            " whole copy, `parameter.onefold.gather()` (on every rank)."
        )
    return buffer


# -- checks of what a model has become -------------------------------------------------------------
#
# Checks at the beginning of a pass over the model: is the model still the one that was sharded?


def check_in_place(units: Iterable[Unit]) -> None:
    """Raise RuntimeError if the model was moved or cast after shard()."""
    for flat in (f for unit in units for f in unit.flats if not f.unsharded):
        # The first entry of which this rank owns elements. If it owns none of any, the dtype still
        # tells
        entry = next((e for e in flat.entries if e.here.start < e.here.stop), flat.entries[0])
        (a, b), param, master = (entry.here.start, entry.here.stop), entry.param, flat.master
        lies = storage_of(param), param.storage_offset()
        moved = a < b and lies != (storage_of(master), master.storage_offset() + a)
        if moved or param.dtype != master.dtype:
            raise RuntimeError(
                f"parameter {entry.name!r} no longer lies in its flat buffer: the model was moved or"
                " cast after shard() (.to(), .half(), .cuda(), assigning .data). Do that before"
                " shard() or between onefold.unshard(model) and a new shard(), or give shard() a"
                " device and the recipe a precision."
            )


def check_not_wrapped(module: nn.Module | None) -> None:
    """Raise RuntimeError if this is a forward pass of a DistributedDataParallel model that contains
    `module`.
    """
    around = getattr(nn.parallel.DistributedDataParallel, "_get_active_ddp_module", lambda: None)()
    if around is not None and any(m is module for m in around.modules()):
        raise RuntimeError(WRAPPED)


def refuse_changes(root: nn.Module | None, entries: Iterable[Entry], call: str) -> None:
    """Check that the parameters that `shard()` found are those of the model, before `call`.
    Parameters added later would train on every rank by itself.

    Raises:
        RuntimeError: the model has other parameters now, or other ties between them; the message
            names them.
    """
    if root is None:
        return
    then = {name: entry.param for entry in entries for name in entry.names}
    now = dict(root.named_parameters(remove_duplicate=False))
    known, there = (set(map(id, params.values())) for params in (then, now))
    lists = {
        "replaced": [n for n, p in then.items() if now.get(n, p) is not p],
        "added": [n for n, p in now.items() if n not in then and id(p) not in known],
        "removed": [n for n, p in then.items() if n not in now and id(p) not in there],
    }
    if any(lists.values()):
        said = ", ".join(
            f"{what} {few(map(repr, names))}" for what, names in lists.items() if names
        )
        raise RuntimeError(
            f"{call}: the model had {len(known)} parameters when it was sharded and has"
            f" {len(there)} now: {said}."
            " Change its structure (adapters, heads, ties) before shard(), or between"
            " onefold.unshard(model) and a new shard(); for other values write into its parameters"
            " inside `with onefold.full_params(model, write=True):`."
        )
