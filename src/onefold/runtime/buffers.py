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

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from onefold.comm import CollectiveContext, Group, alike, both
from onefold.comm.mesh import Mesh
from onefold.memory import STAGING, storage_of
from onefold.recipe import Recipe
from onefold.runtime.boxes import local_of
from onefold.runtime.parameters.interval import ShardedParameterError, spec_of
from onefold.runtime.parameters.parameter import WRAPPED
from onefold.runtime.uninitialized import is_marked

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry
    from onefold.runtime.resources import Resources
    from onefold.runtime.unit import Unit
    from onefold.runtime.units import UnitSpec

Key = TypeVar("Key")
#: Ranks that share a buffer, for every rank.
Sharing = tuple[tuple[int, ...], ...]


_START = CollectiveContext("control", "(buffers)", 0, "state")


class Buffers:
    """The buffers of one engine's model. Holds the modules' tables of buffers, not the modules.

    Attributes:
        due: the next pass over the model begins with a copy of rank 0's buffers.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: Group | None = None,
        mesh: Mesh | None = None,
        specs: Iterable[UnitSpec] = (),
    ) -> None:
        self._wanted = recipe.sync_buffers
        self._group, self._mesh = group, mesh
        # By id of a module's table: who holds the same of its parameters, where not all ranks do
        self._divided: dict[int, set[Sharing]] = {}
        for found in (f for spec in specs for f in spec.found):
            if found.box is not None and found.box.divided:
                for module, _ in found.places:
                    groups = found.box.kind.holders.groups
                    self._divided.setdefault(id(module._buffers), set()).add(groups)
        #: Each module's table, who shares what is in it, and whether it is sent before passes
        self._tables: list[tuple[dict[str, torch.Tensor | None], Sharing, bool]] = []
        self.due = True

    def find(self, module: nn.Module) -> None:
        """Look at the modules of the model. Before passes go the buffers that the recipe names."""
        norms = nn.modules.batchnorm._NormBase
        known: dict[frozenset[Sharing], Sharing] = {}
        self._tables = []
        for m in module.modules():
            divided = frozenset(self._divided.get(id(m._buffers), ()))
            if divided not in known:
                known[divided] = self._sharing(divided)
            sent = self._wanted is True or (self._wanted is not False and isinstance(m, norms))
            self._tables.append((m._buffers, known[divided], sent))

    def _sharing(self, divided: Iterable[Sharing]) -> Sharing:
        """Return who shares buffers of a module, by who holds the same of its parameters."""
        if self._mesh is None:
            return ()
        axes = self._mesh.axes
        others = axes.along([name for name in axes.names if not axes.carries(name)])
        held = [{r: ranks for ranks in groups for r in ranks} for groups in sorted(divided)]
        out: dict[Any, list[int]] = {}
        for rank, at in sorted(zip(self._mesh.ranks, others, strict=True)):
            out.setdefault((at, *(of[rank] for of in held)), []).append(rank)
        return tuple(map(tuple, out.values()))

    def close(self) -> None:
        self._tables = []

    def _shared(self, every: bool = False) -> dict[Sharing, list[torch.Tensor]]:
        """Return the buffers that are sent before passes, or all, by who shares them; each once."""
        out: dict[Sharing, dict[int, torch.Tensor]] = {}
        for table, sharing, sent in self._tables:
            for name, b in table.items() if table and (sent or every) else ():
                if b is not None:
                    out.setdefault(sharing, {})[id(b)] = local_of(refuse_parts(name, b))
        return {sharing: [*found.values()] for sharing, found in out.items()}

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers that are sent before passes, as they are now."""
        return [b for found in self._shared().values() for b in found]

    @property
    def nbytes(self) -> int:
        """Bytes of one message: what rank 0 sends to each other rank."""
        return sum(map(_nbytes, self.tensors()))

    def before_pass(self, resources: Resources) -> None:
        """Called when a pass over the model begins: send rank 0's buffers, if that is due."""
        if not self.due or resources.group.size == 1:
            return
        for sharing, tensors in self._shared().items():
            nbytes = sum(map(_nbytes, tensors))
            resources.memory.add(STAGING, nbytes, "buffers")
            from_rank_0(resources, resources.group.part(sharing), tensors, "forward")
            resources.memory.add(STAGING, -nbytes, "buffers")

    def after_pass(self, synchronized: bool) -> None:
        """Called after a pass over the model. `synchronized`: it recorded gradients that the ranks
        will share.
        """
        self.due = synchronized

    def start(self, resources: Resources) -> None:
        """Give every rank the values of the first that shares a buffer, or of rank 0 where that one
        has none: its model was on the meta device. Collective.
        """
        group, shared = resources.group, self._shared(every=True)
        if group.size == 1:
            return
        own = [b for sharing, found in shared.items() if len(sharing) > 1 for b in found]
        if own and not group.alone:
            without = group.any_of(bytes(map(is_marked, own)), _START)
            from_rank_0(
                resources, group, [b for b, no in zip(own, without, strict=True) if no], "state"
            )
        for sharing, tensors in shared.items():
            from_rank_0(resources, group.part(sharing), tensors, "state")

    # -- buffers of which ranks have values of their own -------------------------------------------

    @property
    def several(self) -> bool:
        """Whether some buffers are shared by some of the ranks only."""
        return any(len(sharing) > 1 for _, sharing, _ in self._tables)

    def places(self, named: Mapping[Key, torch.Tensor]) -> dict[Key, tuple[Sharing, str]]:
        """Return who shares each buffer, and in words whose values this rank's are: "tp: 1 of 2"; ""
        if all ranks share it.
        """
        shared = self._sharing(())  # of what a hook of the state dict has made, in no table
        found = {
            id(local_of(b)): sharing
            for table, sharing, _ in self._tables
            for b in table.values()
            if b is not None
        }
        every = {name: found.get(id(local_of(b)), shared) for name, b in named.items()}
        words = {sharing: self._words(sharing) for sharing in {*every.values()}}
        return {name: (sharing, words[sharing]) for name, sharing in every.items()}

    def _words(self, sharing: Sharing) -> str:
        if self._group is None or self._mesh is None or len(sharing) < 2:
            return ""
        me, axes = self._group.ranks[self._group.rank], self._mesh.axes
        at, mine = next((i, ranks) for i, ranks in enumerate(sharing) if me in ranks)
        shared = self._mesh.axes_of(mine)
        sizes = zip(axes.names, axes.sizes, strict=True)
        apart = [name for name, size in sizes if size > 1 and name not in shared]
        return f"{', '.join(apart)}: {at} of {len(sharing)}"

    def own(self, named: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return those buffers of which ranks have other values than ranks that do not share them,
        and in words whose this rank's are. Collective if there are `several`; the host waits.
        """
        group = self._group
        if group is None or not self.several:
            return {}
        places = {name: at for name, at in self.places(named).items() if at[1]}
        first = {name: group.part(sharing).rank == 0 for name, (sharing, _) in places.items()}
        apart = unlike(group, [named[name] if first[name] else None for name in places])
        return {name: places[name][1] for name, other in zip(places, apart, strict=True) if other}

    def refuse_own(self, module: nn.Module, call: str) -> None:
        """Raise ValueError on every rank if `call` would have rank 0's values of buffers of which
        other ranks have values of their own. Collective if there are `several`.
        """
        if own := self.own(persistent(module)):
            raise ValueError(
                f"{call} has one value of each buffer, and ranks have values of their own of"
                f" {_few([*map(repr, own)])} (here {next(iter(own.values()))}). onefold.save stores"
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
        else both(zlib.crc32(_as_bytes(t).cpu().numpy().tobytes()).to_bytes(4, "little"))
        for t in tensors
    ]
    found = group.any_of(b"".join(mine), _START) if mine else b""
    return [not alike(found[i : i + 8]) for i in range(0, len(found), 8)]


@torch.no_grad()
def from_rank_0(
    resources: Resources, group: Group, tensors: Sequence[torch.Tensor], phase: str
) -> None:
    """Copy the values of the first rank of `group` into `tensors` on all of its ranks, in one message.
    Collective; waits.
    """
    device, sizes = resources.device, list(map(_nbytes, tensors))
    if group.size == 1 or not sum(sizes):
        return
    # A number made of shapes and dtypes: messages of ranks whose buffers differ in these, or in
    # number, do not match.
    number = zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode()) & 0x7FFF
    if group.rank == 0:
        message = torch.cat([_as_bytes(_once(t)).to(device) for t in tensors])
    else:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.from_first(
        message, CollectiveContext("state", "buffers", resources.progress.step_count, phase), number
    ).wait()
    if group.rank == 0 or group.alone:
        return
    for buffer, size, part in zip(tensors, sizes, message.split(sizes), strict=True):
        # Autograd may have saved a constant for a backward pass that is still to come. On the host
        # equal buffers are not written to. On a device the host would have to wait to know, so they
        # are written to without a sign for autograd (`data` has a version counter of its own).
        on_host = buffer.device.type == "cpu"
        mine = _once(buffer.detach() if on_host else buffer.data)
        if size and not (on_host and torch.equal(_as_bytes(mine), part)):
            mine.copy_(part.clone().view(mine.dtype).view(mine.shape))


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


def _once(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of the buffer with each element of its memory once, that is, without expanded
    dimensions.
    """
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if stride == 0 and size > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().reshape(-1).view(torch.uint8)


def _nbytes(buffer: torch.Tensor) -> int:
    once = _once(buffer)
    return once.numel() * once.element_size()


# -- checks of what a model has become -------------------------------------------------------------
#
# Checks at the beginning of a pass over the model: is the model still the one that was sharded?


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
                    " Do that before shard() or between onefold.unshard(model) and a new shard(), or give"
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
        changed, but no parameters. Raises as `refuse_changes`.
        """
        start = 0 if everywhere else self._next
        part = self._seen[start : None if everywhere else start + _MODULES_A_PASS]
        self._next = start + len(part) if start + len(part) < len(self._seen) else 0
        if all((m := ref()) is not None and _signature(m) == then for ref, then in part):
            return False
        self.refuse_changes("a pass")
        if (root := self._root()) is not None:
            self._remember(root)
        return True

    def refuse_changes(self, call: str) -> None:
        """Check that the parameters that `shard()` found are those of the model, before `call`.

        Raises:
            RuntimeError: the model has other parameters now, or other ties between them; the
                message names them.
        """
        root = self._root()
        if root is not None and (said := changes(root, self._entries)):
            raise RuntimeError(
                f"{call}: the model had {len(self._entries)} parameters when it was sharded and has"
                f" {sum(1 for _ in root.parameters())} now: {said}."
                " Change its structure (adapters, heads, ties) before shard(), or between"
                " onefold.unshard(model) and a new shard()."
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
