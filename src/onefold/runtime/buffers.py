"""Buffers of the model follow rank 0's, by the rule of DistributedDataParallel.

| pass over the model                                | rank 0's buffers become everybody's before it |
|----------------------------------------------------|-----------------------------------------------|
| the first                                          | yes                                           |
| after a pass with gradients, outside `no_sync`     | yes, in evaluation too                        |
| after a pass without gradients, or under `no_sync` | no                                            |

All of them travel in one message, as bytes: buffers of any dtype, 0-dimensional ones, those that
are not in the state dict, and those that a module has put in place of others since. Constants
travel too, as under DDP: without a further message, no rank can know whether another rank has
written to a buffer (writes through `.data` change no version counter).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from onefold.comm import CollectiveContext
from onefold.memory import STAGING, storage_of
from onefold.recipe import Recipe
from onefold.runtime.parameters.interval import ShardedParameterError, spec_of
from onefold.runtime.parameters.parameter import WRAPPED

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry
    from onefold.runtime.resources import Resources
    from onefold.runtime.unit import Unit


class Buffers:
    """The buffers of one engine's model that follow rank 0's. Holds the modules' tables of buffers,
    not the modules.

    Attributes:
        due: the next pass over the model begins with a copy of rank 0's buffers.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._wanted = recipe.sync_buffers
        self._tables: list[dict[str, torch.Tensor | None]] = []
        self.due = True

    def find(self, module: nn.Module) -> None:
        """Follow the buffers of `module` that the recipe names."""
        if self._wanted is False:
            return
        norms = nn.modules.batchnorm._NormBase
        self._tables = [
            m._buffers for m in module.modules() if self._wanted is True or isinstance(m, norms)
        ]

    def close(self) -> None:
        self._tables = []

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers as they are now, each once."""
        found = {
            id(b): (name, b)
            for table in self._tables
            if table
            for name, b in table.items()
            if b is not None
        }
        return [refuse_parts(name, b) for name, b in found.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of one message: what rank 0 sends to each other rank."""
        return sum(map(_nbytes, self.tensors()))

    def before_pass(self, resources: Resources) -> None:
        """Called when a pass over the model begins: send rank 0's buffers, if that is due."""
        if not self.due or resources.group.size == 1:
            return
        tensors = self.tensors()
        nbytes = sum(map(_nbytes, tensors))
        if not nbytes:
            return
        memory = resources.memory
        memory.add(STAGING, nbytes, "buffers")
        from_rank_0(resources, tensors, "forward")
        memory.add(STAGING, -nbytes, "buffers")

    def after_pass(self, synchronized: bool) -> None:
        """Called after a pass over the model. `synchronized`: it recorded gradients that the ranks
        will share.
        """
        self.due = synchronized


@torch.no_grad()
def from_rank_0(resources: Resources, tensors: list[torch.Tensor], phase: str) -> None:
    """Copy rank 0's values into `tensors` on every rank, in one message. Collective; waits."""
    group, device, sizes = resources.group, resources.device, list(map(_nbytes, tensors))
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
            " average) before shard() or inside `with onefold.unsharded(model):`, or register a"
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
