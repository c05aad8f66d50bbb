"""A unit (`Unit`), its flat buffers (`Flat`) and the parameters in them (`Entry`)."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from onefold.comm import Group, Pending
from onefold.layout import LOW, Dtypes, ShardSpec, Slot, Tiers, overlap
from onefold.layout.holders import Holders, TensorBox
from onefold.memory import storage_of
from onefold.runtime.parameters.interval import (
    IntervalSpec,
    dispatches,
    over,
)
from onefold.runtime.parameters.parameter import (
    Released,
    ShardedParameter,
    ShardInfo,
    Whole,
    faced_class,
    follow_reads,
    point,
    put,
    set_requires_grad,
)
from onefold.runtime.parameters.values import hook_gradient
from onefold.runtime.storage import Storage
from onefold.runtime.units import Found, UnitSpec, keeps_dtype, rests_encoded

if TYPE_CHECKING:
    from onefold.runtime.boxes import Box
    from onefold.runtime.engine import Engine
    from onefold.runtime.gather import Gather
    from onefold.runtime.hops import Hop


# -- a parameter -----------------------------------------------------------------------------------
#
# A parameter of a flat buffer: the optimizer's object, the object that a forward pass sees, and
# the places that refer to it.


#: The mark of a parameter that is to have a flat buffer, also on one rank.
BUFFERED = "_onefold_buffered"


def declared_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter had when `shard()` got it. (`onefold.unshard`
    leaves it in master precision.)
    """
    handed_out, declared = param.__dict__.get("_onefold_dtypes", (None, param.dtype))
    return declared if param.dtype == handed_out else param.dtype


def declare(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Let `shard()` take `param` for one of `dtype`, as long as it has the dtype that it has now."""
    param.__dict__["_onefold_dtypes"] = param.dtype, dtype


class Entry:
    """One parameter: `param` is the optimizer's object, `compute` is the object that the forward
    pass sees, `local` what that has on this rank (of a DTensor; else it is `compute` itself),
    `places` are where modules refer to it.
    """

    unit: Unit
    info: ShardInfo

    def __init__(self, found: Found, slot: Slot, index: int, flat: Flat) -> None:
        self.slot, self.index, self.names = slot, index, tuple(found.names)
        self.strides = torch.empty(slot.shape, device="meta").stride()
        self.places: list[tuple[Any, str]] = [*found.places]  # the modules, until `bind` is done
        for module, _ in found.places if not flat.unsharded else ():
            follow_reads(module)
        self.flat: Flat = flat
        self.engine = flat.engine
        # What this rank holds of a DTensor; None for a plain parameter
        self.box: Box | None = found.box
        # What its gradient is multiplied with before the sum, see `Holders`
        self.parts = flat.ranks.copies if found.partial else 1
        self.param: nn.Parameter = found.param
        self.compute: nn.Parameter = found.param
        self.local: torch.Tensor = found.param
        self.released: torch.Tensor = found.param
        self.active = found.param.requires_grad
        self.declared: torch.dtype = declared_dtype(found.param)
        self.nbytes = slot.numel * flat.dtypes.compute.itemsize  # of its gradient
        # The node of autograd of `param`, once `hook_gradient` has hooked its gradient
        self.accumulates: Any = None
        # Of the whole parameter: its version at the last look, and what all who read its `.data` in
        # this forward pass share. See `keep_writes` in runtime/passes.py
        self.seen_version = 0
        self.alias: torch.Tensor | None = None
        # This rank owns nothing of it, and the ranks that do have a gradient for it
        self.graded_elsewhere = False
        self.number = 0  # among all entries of the engine
        self.last_write = 0  # the last write to its master, see runtime/parameters/values.py

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter as users and checkpoints know it."""
        return self.slot.shape if self.box is None else tuple(self.box.shape)

    @property
    def region(self) -> TensorBox | None:
        """What this rank's holders hold of the global tensor; None if that is all of it."""
        return self.box.here if self.box is not None and self.box.divided else None

    @property
    def numel(self) -> int:
        """Elements of the parameter as users know it."""
        return self.slot.numel if self.box is None else self.box.shape.numel()

    def accounted(self, position: int | None = None) -> tuple[int, int]:
        """Return the elements, counted from the first, that this rank (or that at `position`)
        accounts for. Exactly one rank accounts for each element of the model.
        """
        flat = self.flat
        return self._within(flat.layout.interval(flat.rank if position is None else position))

    def owned(self, position: int | None = None) -> tuple[int, int]:
        """Return the elements, counted from the first, that the optimizer of this rank (or of that
        at `position`) steps. Optimizers of other ranks may step them too.
        """
        flat = self.flat
        return self._within(flat.owned if position is None else flat.spec.owned_by(position))

    def _within(self, addresses: tuple[int, int]) -> tuple[int, int]:
        """Return the elements, counted from the first, that lie at these addresses."""
        start, end = self.slot.start, self.slot.end
        a, b = overlap((start, end), addresses)
        return a - start, b - start

    @cached_property
    def here(self) -> slice:
        """Where the elements that the optimizer of this rank steps are among those that it owns."""
        return self.among_owned(self.owned())

    @property
    def counted(self) -> slice:
        """Where the elements that this rank accounts for are among those that it owns."""
        return self.among_owned(self.accounted())

    def among_owned(self, elements: tuple[int, int]) -> slice:
        """Where elements, counted from the first, are among those that this rank owns."""
        first = self.slot.start - self.flat.owned[0]
        return slice(*(first + at for at in elements))

    @cached_property
    def elsewhere(self) -> bool:
        """Whether it has elements, and this rank owns none of them."""
        return self.here.start == self.here.stop and bool(self.slot.numel)


# -- a flat buffer ---------------------------------------------------------------------------------
#
# A flat buffer bound to a unit's parameters: masters for the optimizer, the whole for the forward
# pass.
#
# One `Flat` holds the parameters of one unit that share a dtype and were trainable (or frozen)
# together:
#
#     placement of        parameters   optimizer     master                       full
#     stage 0             replicated   replicated    [numel], logical shapes      resident; the master itself when dtypes agree
#     stages 1, 2         replicated   sharded       [shard], one interval        resident; master is a slice of it when dtypes agree
#     stage 3             sharded      sharded       [shard], one interval        exists only between gather and release
#
# `divided`: this rank's masters are an interval, or a box, not the whole. `shared`: other ranks step the same
# elements.
#
#     masters are                                        `divided`   `shared`
#     the whole, on every rank (stage 0)                 no          yes, if there is more than one rank
#     an interval that only this rank has                yes         no
#     an interval that ranks of other groups have too    yes         yes
#
# Recipes differ in the parts that a flat buffer is made of. `shard()` chooses them once: its
# `storage` (runtime/storage.py), its `gather` (runtime/gather.py) and its `hops`, those of its
# gradient (runtime/hops.py).


class Kind(NamedTuple):
    """What the parameters of a flat buffer have in common."""

    dtypes: Dtypes
    trainable: bool
    encoded: bool  # their masters are stored encoded
    holders: Holders


class Flat:
    """See the table above. `index` is unique in the engine (it goes into message tags)."""

    def __init__(
        self,
        unit_name: str,
        found: list[Found],
        kind: Kind,
        index: int,
        engine: Engine,
        tiers: Tiers | None,
    ) -> None:
        recipe, made = engine.recipe, engine.capabilities
        dtypes, ranks = kind.dtypes, kind.holders
        group = engine.group.part(ranks.groups)
        self.unit_name, self.index, self.dtypes = unit_name, index, dtypes
        self.engine: Callable[[], Engine | None] = weakref.ref(engine)
        #: Which ranks hold it, among all of the mesh, and those of this rank's box
        self.ranks = ranks
        self.group, self.rank = group, group.rank
        #: All sizes of this buffer; the plan adds up the same ones
        self.spec = spec = ShardSpec(
            tuple((f.names[0], tuple(f.local.shape)) for f in found),
            dtypes,
            recipe,
            group.topology,
            group.rank,
            made.codec,
            trainable=kind.trainable,
            stored=kind.encoded,
            tiers=tiers,
            in_place=all(
                f.param.dtype == dtypes.compute
                and f.box is None
                and BUFFERED not in f.param.__dict__
                for f in found
            ),
            native=group.native,
            rooms=tuple(f.room for f in found),
        )
        self.layout = spec.layout
        # With one rank and one dtype there is nothing to divide, gather or cast: the parameters
        # stay where they are.
        self.unsharded = spec.unsharded
        pairs = zip(found, self.layout.slots, strict=True)
        self.entries = [Entry(f, slot, i, self) for i, (f, slot) in enumerate(pairs)]
        self.whole_master, self.resident = spec.whole_master, spec.resident
        # This rank's addresses: its part among the ranks of its group, and what its optimizer owns
        self.shard, self.owned = spec.shard, spec.owned
        # What each rank multiplies its own gradient with, and whether the sums are divided by the
        # ranks that they were made of; see [Note: the mean over ranks] in runtime/hops.py
        self.scales_late = dtypes.wire != dtypes.sums
        self.early_scale = ranks.scale_of_mean if self.scales_late else ranks.scale
        if recipe.reduce_op == "sum":
            self.early_scale *= ranks.data
        self.storage: Storage = made.storage(self, engine)
        self.gather: Gather = made.gather(self, engine)
        self.hops: tuple[Hop, ...] = tuple(
            made.hop(self, at, engine) for at in range(len(spec.hops))
        )
        #: Whether its parameters are parts of global tensors (all of them: their holders differ)
        self.in_boxes = any(f.box is not None and f.box.divided for f in found)
        # Which rank has which part of the parameters; None if every rank has the whole. See
        # `IntervalSpec`
        self.owners: tuple[tuple[tuple[int, int], ...], int] | None = None
        if self.owned != (0, self.layout.numel) or self.in_boxes:
            owners, alone = self.owners_group, self.whole_master
            positions = [0] if alone else [group.ranks.index(r) for r in owners.ranks]
            self.owners = tuple(map(spec.owned_by, positions)), 0 if alone else owners.rank
        self.master: torch.Tensor
        self.full: torch.Tensor | None = None
        # This rank's whole gradient, which is not reduced yet; and the sums of its group that wait
        # for the boundary, over `shard`
        self.grad: torch.Tensor | None = None
        self.held: torch.Tensor | None = None
        self.filled: set[Entry] = set()  # those whose gradient is in `grad`
        self.hooked = False  # the trainable entries have their gradient hooks
        self.awaited: frozenset[Entry] = frozenset()  # those that are reduced
        # What tells them from others in messages, if some are frozen: ranks must freeze the same
        self.trained: tuple[int, int] | None = None
        # Writes to the masters that no counter of torch shows; the version that the whole was made
        # of. See runtime/passes.py
        self.bumps = self.copied = 0

    @property
    def divided(self) -> bool:
        """Optimizers of different ranks step different elements."""
        return not self.whole_master or self.in_boxes

    @property
    def shared(self) -> bool:
        """Optimizers of several ranks (`holders`) step the same elements, of which each rank
        accounts for an interval.
        """
        return self.owned != self.spec.interval

    @property
    def holders(self) -> Group:
        return self.group if self.whole_master else self.group.inter_group

    # -- building ----------------------------------------------------------------------------------

    def build(self, fill: Callable[[torch.Tensor], None], device: torch.device) -> None:
        """Lay the parameters out. `fill` receives an empty master-precision tensor, [owned], to put
        this rank's part into.
        """
        if self.resident:
            self.full = torch.empty(self.layout.numel, dtype=self.dtypes.compute, device=device)
        self.master = self.storage.build(device)
        there = self.storage.in_place and self.master.device.type == device.type
        first = self.master if there else torch.empty_like(self.master, device=device)
        fill(first)
        self.gather.build(device)
        for entry in self.entries:
            # `compute` points at this while nothing is gathered: the right sizes and strides,
            # without memory
            entry.released = torch.empty(entry.slot.shape, dtype=self.dtypes.compute, device=device)
            entry.released.untyped_storage().resize_(0)
            self._bind(entry, self.own(self.master, entry))
        if not self.storage.in_place:
            self.master.untyped_storage().resize_(0)
        self.storage.store(first)
        if self.full is not None:
            self.point_at(self.full)

    def _bind(self, entry: Entry, data: torch.Tensor) -> None:
        """Lay out one parameter, over `data`."""
        slot, old = entry.slot, entry.param
        entry.active = old.requires_grad
        faced = faced_class(kind := type(old))
        if old.is_meta or (kind is not nn.Parameter and faced is ShardedParameter):
            # `.data` gives a version counter of its own, as a parameter that keeps its identity
            # has. It counts the user's writes, and not those of the engine to the master's memory
            entry.param = nn.Parameter(data.data, requires_grad=old.requires_grad)
            entry.param.__dict__.update(old.__dict__)
            if kind is nn.Parameter:
                with contextlib.suppress(RuntimeError):  # a weak reference or a graph refers to it
                    torch.utils.swap_tensors(old, entry.param)
                    entry.param = old
        else:
            old.data, old.grad = data, None
        if entry.box is None:
            entry.local = entry.compute = Whole(entry.released, requires_grad=entry.active)
        else:
            entry.local = entry.released.data  # a version counter of its own
            entry.compute = entry.box.leaf(entry.local, entry.slot.start, entry.active)
        # The same dicts, so that the handles that the user holds still remove hooks
        entry.compute._backward_hooks, old._backward_hooks = old._backward_hooks, None
        entry.param._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
        old.__dict__.pop("_onefold_dtypes", None)
        # One dictionary for both: a forward pass sees the attributes that anybody puts on a
        # parameter, now or later
        entry.compute.__dict__ = entry.param.__dict__
        seen, own = entry.param.__dict__, type(entry.param)
        plain = own if dispatches(own) else nn.Parameter
        entry.info = seen["onefold"] = ShardInfo(entry, over(faced, own), plain)
        entry.param.__class__ = entry.info.faced
        if self.owners is not None:
            box = entry.box if self.in_boxes else None
            shape = slot.shape if box is None else box.shape
            seen["_onefold_spec"] = IntervalSpec(
                weakref.ref(self), *self.owners, slot.name, slot.start, shape, box=box
            )
        self.swap(entry, entry.param)

    def forget(self) -> None:
        """Let go of everything when the engine closes: parameters have none from now on."""
        for entry in self.entries:
            entry.engine = lambda: None
            if hasattr(entry, "info"):  # it was laid out
                entry.info.entry = lambda: None
        self.__dict__.clear()
        self.engine = lambda: None

    # -- views -------------------------------------------------------------------------------------

    def view(self, buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
        """`entry` as a view of a buffer over the whole address space, in its logical shape."""
        at = buffer.storage_offset() + entry.slot.start
        return buffer.as_strided(entry.slot.shape, entry.strides, at)  # in one call

    @cached_property
    def gaps(self) -> list[slice]:
        """What lies between the entries, and behind them."""
        edges = [at for slot in self.layout.slots for at in (slot.start, slot.end)]
        edges = [0, *edges, self.layout.numel]
        return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def own(self, part: torch.Tensor, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of `entry` in `part`, [owned], as its optimizer sees them: in
        their logical shape if it owns all of them, and they are all there is.
        """
        if self.whole_master and not self.in_boxes:
            return self.view(part, entry)
        return part[entry.here]

    @property
    def owners_group(self) -> Group:
        """The ranks whose masters together are the whole, each element once."""
        return self.group.intra_group if self.owned == self.shard else self.group

    @property
    def version(self) -> int:
        """The number of the masters' values: another one after each write."""
        return self.bumps + self.written

    @property
    def written(self) -> int:
        """How often code has written to the masters, by torch's counters."""
        return sum([e.param._version for e in self.entries])

    @property
    def stale(self) -> bool:
        """Whether the whole lacks a write to the masters."""
        if self.full is None or (
            self.whole_master and storage_of(self.full) == storage_of(self.master)
        ):
            return False  # there is none, or the masters are in it
        return self.copied != self.version

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return `view` of all entries."""
        return [self.view(buffer, entry) for entry in self.entries]

    def point_at(self, buffer: torch.Tensor | None) -> None:
        """Make the forward pass's parameters views of `buffer`; None leaves them without memory."""
        released = buffer is None
        views = [e.released for e in self.entries] if buffer is None else self.views(buffer)
        for entry, view in zip(self.entries, views, strict=True):
            leaf: Any = entry.compute
            if type(leaf) is Released:
                leaf.__class__ = Whole  # type: ignore[assignment]
            point(entry.local, view)
            if released and type(leaf) is Whole:  # a fake tensor keeps its class
                leaf.__class__ = Released
            elif entry.box is not None:  # [Note: a DTensor follows its buffer]
                leaf._local_tensor = entry.box.freed if released else entry.local

    @staticmethod
    def swap(entry: Entry, param: torch.Tensor) -> None:
        """Put `param` in all places of the entry. (Recurrent layers keep a list of their weights too,
        which torch looks through at the beginning of their forward pass.)
        """
        for parameters, attribute in entry.places:
            put(parameters, attribute, param)

    # -- trainable parts ---------------------------------------------------------------------------

    def follow_trainable(self, waiting: bool) -> None:
        """Follow `requires_grad` as the user has set it on the parameters, and hook the gradients of
        those that train.

        `waiting`: gradients of earlier micro-batches wait for the boundary. Those of parameters that
        were trainable then are awaited too, even if the parameters are frozen now.
        """
        for entry in self.entries:
            wanted = entry.param.requires_grad
            if wanted != entry.active:
                if wanted:
                    self.storage.refuse_training(entry)
                entry.active, self.hooked = wanted, False
                set_requires_grad(entry.compute, wanted)
        if not self.hooked:
            self.hooked = not waiting
            for entry in self.entries:
                if entry.active and entry.accumulates is None:
                    hook_gradient(entry)
            before = self.awaited if waiting else frozenset()
            self.awaited = before | {e for e in self.entries if e.active}
            flags = bytes(e.active for e in self.entries)
            self.trained = None if all(flags) else (sum(flags), zlib.crc32(flags))

    @property
    def travels(self) -> bool:
        """Whether its gradient is reduced: whole, with zeros for entries that are frozen."""
        return bool(self.awaited)

    @property
    def waits(self) -> bool:
        """Whether gradients wait for the boundary."""
        return self.grad is not None or self.held is not None


# -- a unit ------------------------------------------------------------------------------------------
#
# A unit: a block's flat buffers with one lifecycle.
#
# | from      | to        | when                                                      |
# |-----------|-----------|-----------------------------------------------------------|
# | SHARDED   | FETCHING  | this rank's interval is being read from a disk, ahead      |
# | FETCHING  | GATHERING | a gather is launched, as from SHARDED                     |
# | FETCHING  | SHARDED   | it was not needed                                         |
# | SHARDED   | GATHERING | a gather is launched (used, prefetched, or joined)         |
# | GATHERING | GATHERED  | its bytes have arrived                                    |
# | GATHERED  | SHARDED   | released: the buffer goes back to the pool                |
# | GATHERED  | GATHERING | the resident copy is refreshed: its masters were written to |


class State(enum.Enum):
    SHARDED = "sharded"
    FETCHING = "fetching"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """One unit of an engine.

    Attributes:
        name: the dotted name of its module, "(root)" for the root; path: the same, "" for the root.
        numel: elements of its flat buffers, alignment and padding included.
        gathered_bytes: bytes of its buffers while it is gathered.
        resident: its whole parameters exist all the time (replicated), or it has none.
        calls: its uses in forward passes with gradients since the last backward pass; set to 0 when
            the next pass begins.
        aside: those whose small gradient waits on the parameter for others.
            aside_bytes: of these gradients together.
        saved_apart: how often `saved` was ever raised while its module was not in a pass.

    Who holds a gathered unit, and until when:

    | reason              | taken when                                          | given back when                       |
    |---------------------|-----------------------------------------------------|---------------------------------------|
    | `in_use`            | the forward pass of its module begins, or is        | that pass ends, or raises             |
    | (how many passes)   | recomputed                                          |                                       |
    | `borrowed`          | other code of the pass reads a parameter            | the pass ends                         |
    | kept                | a pass without gradients under `keep_gathered`; the | that pass ends; `Gatherer.let_go`     |
    |                     | stage of a pipeline is unsharded for micro-batches  |                                       |
    | `awaiting_backward` | a forward pass ends that used it last               | the backward pass uses or passes it   |
    | `saved` (how many)  | autograd saves a part of its buffers                | autograd frees it                     |
    | `gradients` (which) | a backward pass begins                              | they arrive, one by one               |
    | `recomputing`       | its forward pass is recomputed (the count of        | the next recomputation begins         |
    |                     | `Gatherer.reached` then)                            |                                       |
    | `by_hand`           | a backward pass begins, and code has kept a         | the backward pass ends                |
    |                     | parameter without saving it (runtime/passes.py)     |                                       |

    Two are no leases. `used`: a pass uses the unit; until then it is only prefetched or joined.
    `unwanted`: the pass has gone past it without using it, so it goes.

    | asked                                                   | holds it                                            |
    |---------------------------------------------------------|-----------------------------------------------------|
    | after the forward pass of its module                    | `borrowed`, kept, and the last units                |
    | in a backward pass (`Unit.needed_in_backward`)          | `in_use`, `saved`, `gradients`; if it has frozen    |
    |                                                         | parameters, `recomputing` and `by_hand` too         |
    | at the end of a backward pass                           | `in_use`                                            |
    | by whatever releases (`Gatherer.release`)               | being kept, until masters are written to            |

    A checkpointed unit in a backward pass: `gradients` (if it is trained) from the beginning;
    `in_use` and `recomputing` while it is recomputed; then `gradients` until the last one has come,
    which releases it. What a recomputation saves has no handles, so it takes no `saved`; a frozen
    unit, which no gradient comes for, is held by `recomputing` until the next recomputation
    (`Gatherer._sweep`).
    """

    def __init__(self, name: str, index: int, module: nn.Module, flats: list[Flat]) -> None:
        self.name, self.path, self.index, self.flats = name or "(root)", name, index, flats
        for entry in self.entries:
            entry.unit = self
        self.module = weakref.ref(module)
        self.resident = all(flat.resident for flat in flats)
        # The backward pass of an embedding reads no parameter
        self.looks_up_only = type(module) is nn.Embedding
        self.state = State.GATHERED if self.resident else State.SHARDED
        self.in_use = self.saved = 0
        self.used = self.unwanted = self.borrowed = self.by_hand = False
        self.awaiting_backward = False
        self.gradients: set[Entry] = set()
        self.recomputing: int | None = None
        self.calls = self.saved_apart = 0
        self.aside: list[Entry] = []
        self.aside_bytes = 0
        self.ready = self.launched = self.late = False
        self.pending: list[Pending] = []
        self.gathered_bytes = sum(
            f.layout.numel * f.dtypes.compute.itemsize for f in flats if not f.resident
        )

    @property
    def ungathered(self) -> bool:
        """Whether its gather has not been launched."""
        return self.state in (State.SHARDED, State.FETCHING)

    @property
    def numel(self) -> int:
        return sum(flat.layout.numel for flat in self.flats)

    @property
    def awaited(self) -> set[Entry]:
        """The entries that are reduced."""
        return set[Entry]().union(*[flat.awaited for flat in self.flats])

    @property
    def entries(self) -> list[Entry]:
        return [e for flat in self.flats for e in flat.entries]

    @property
    def needed_in_backward(self) -> bool:
        """Whether the backward pass under way, which has used the unit, still needs its buffers."""
        if self.in_use:
            return True
        if self.looks_up_only:
            return False
        if self.saved or self.gradients:
            return True
        # A gradient that never comes would tell that a frozen parameter is no longer needed
        return (self.recomputing is not None or self.by_hand) and any(
            e.flat.unsharded or not e.active for e in self.entries
        )

    def encloses(self, other: Unit) -> bool:
        """Whether the other unit's module lies inside this one's."""
        return self is not other and (self.path == "" or other.path.startswith(self.path + "."))


def bind(
    specs: Sequence[UnitSpec],
    engine: Engine,
    offloaded: Collection[int],
    holders: Holders,
) -> list[Unit]:
    """Build the units of `specs`. A unit has one flat buffer for each kind of its parameters: of
    the same dtypes (`_onefold_wire` of a parameter names another for the wire, unless the recipe
    does), trained or frozen, stored encoded or not, held by the same ranks.

    Args:
        engine: the one that parameters ask. offloaded: the indices of the units whose state is
            offloaded. holders: of the parameters that are no boxes.
    """
    recipe, numbers = engine.recipe, itertools.count()
    units = []
    for index, spec in enumerate(specs):
        kinds: dict[Kind, list[Found]] = {}
        for found in spec.found:
            dtype, trainable = declared_dtype(found.param), found.param.requires_grad
            dtypes = Dtypes.of(dtype, trainable, recipe, keeps_dtype(found))
            wire = found.param.__dict__.get("_onefold_wire")
            if wire is not None and trainable and dtype in LOW and recipe.gradients.wire is None:
                dtypes = dataclasses.replace(dtypes, wire=wire)
            held_by = holders if found.box is None else found.box.kind.holders
            encoded = rests_encoded(found, recipe)
            kinds.setdefault(Kind(dtypes, trainable, encoded, held_by), []).append(found)
        flats = []
        for kind, of_kind in kinds.items():
            tiered = index in offloaded and not kind.encoded
            tiers = Tiers.of(kind.trainable, recipe) if tiered else None
            name = spec.name or "(root)"
            flats.append(Flat(name, of_kind, kind, next(numbers), engine, tiers))
        units.append(Unit(spec.name, index, spec.module, flats))
    # The modules' own dictionaries rather than the modules: an engine must not keep its model alive.
    # `follow_reads` has put others in their places, also in those of modules with plain parameters
    for entry in (e for unit in units for e in unit.entries):
        entry.places = [(module._parameters, a) for module, a in entry.places]
    return units
