"""Gathering and releasing units, ahead of use and on demand, in the orders that all ranks keep
(this file). Who holds a gathered unit, and until when, is in the table of `Unit`
(runtime/flat.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.comm import Chain, CollectiveContext, Group, Pending
from onefold.memory import GATHERED, TierError, storage_of
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.runtime import differentiate
from onefold.runtime.differentiate import tensors_in
from onefold.runtime.flat import Flat, State, Unit
from onefold.runtime.saved import is_in, saving

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.passes import Graph


# -- how the whole comes together -------------------------------------------------------------------
#
# How the whole of a flat buffer comes together. `shard()` chooses one `Gather` for each flat buffer.
#
# | class           | file                  | what travels                                                          |
# |-----------------|-----------------------|-----------------------------------------------------------------------|
# | `Gather`        | here                  | values in the compute dtype                                           |
# | `EncodedGather` | quant/encoded.py      | bytes, encoded once after a step                                      |
#
# | path                                                                  | where                            |
# |-----------------------------------------------------------------------|----------------------------------|
# | a copy, or nothing                                                    | every rank has all masters       |
# | owned ── all owners ──► whole                                         | else                             |
# | interval ── inter-group ──► shard (cached) ── intra-group ──► whole   | with a second copy (hpZ, ZeRO++) |
#
# `interval` is a rank's part among all ranks, `shard` its part among those of its group (see [Note:
# positions] in layout/flat.py). A gather may have a cached shard: the secondary shard (hpZ), or
# this rank's part encoded (qwZ). Gathers start from it until masters are written to. Frozen weights
# that are stored encoded are in it, and nowhere else.


class Gather:
    """The gathers of one flat buffer.

    Attributes:
        exact: the whole holds the masters' values, rounded to the compute dtype and no further.
        cached: the bytes of the cached shard; None if every gather starts from the masters.
        cached_of: the version of the masters that the cached shard was made of.
        beside: it begins with a copy, from the host or a cast. Copy and gather then run on the stream
            of the copies up. The computation goes on, and waits where the unit is used.
    """

    exact: bool = True

    def __init__(self, flat: Flat, engine: Engine) -> None:
        self.flat, self.engine = flat, engine
        self.up = engine.transfers.up
        self.beside = self.up.asynchronous and not flat.spec.shares_memory
        self.cached: torch.Tensor | None = None
        self.cached_of = -1

    def build(self, device: torch.device) -> None:
        """Take the memory of the cached shard."""
        if nbytes := self.flat.spec.cached_bytes:
            self.cached = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def start(self, full: torch.Tensor, context: CollectiveContext) -> Pending:
        """Start gathering the whole into `full`."""
        return self.send(full, full, context)

    def send(self, full: torch.Tensor, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        """Do so. `wire`: the whole as it travels."""
        if not self.beside:
            return self._send(full, wire, context)
        with self.up.on_stream():
            pending = self._send(full, wire, context)
        # Whoever waits for the gather waits for the copy before it too
        return pending.then(partial(self.up.order, self.up.mark()))

    def _send(self, full: torch.Tensor, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        group, cached = self.flat.group, self.cached
        if cached is None:
            self.fill(full, wire)
            if self.flat.whole_master:
                return Pending(group, [], context)
            return self.all_gather(self.flat.owners_group, wire, context)
        second_copy = self.flat.spec.has_secondary
        last = group.intra_group if second_copy else self.flat.owners_group
        mine = self.part(wire, self.flat.shard if second_copy else self.flat.owned)
        cached = cached.view(wire.dtype)
        if self.fresh:
            mine.copy_(cached)
            return self.all_gather(last, wire, context)
        self.fill(full, wire)
        self.cached_of = self.flat.version

        def cache_and_gather() -> Pending:
            cached.copy_(mine)
            return self.all_gather(last, wire, context)

        if not second_copy:
            return cache_and_gather()
        return Chain(group, self.all_gather(group.inter_group, mine, context), cache_and_gather)

    @property
    def fresh(self) -> bool:
        """Whether the cached shard has the masters' present values."""
        flat = self.flat
        return self.cached is not None and (flat.spec.stored or self.cached_of == flat.version)

    def part(self, wire: torch.Tensor, addresses: tuple[int, int]) -> torch.Tensor:
        """Return the part of what travels that stands for some ranks' intervals."""
        numel = max(self.flat.layout.numel, 1)
        return wire[slice(*(at * wire.numel() // numel for at in addresses))]

    def fill(self, full: torch.Tensor, wire: torch.Tensor) -> None:
        """Put this rank's part into its place in what travels."""
        self.put(full)

    def all_gather(self, group: Group, wire: torch.Tensor, context: CollectiveContext) -> Pending:
        return group.all_gather(wire, context, self.flat.index)

    def put(self, full: torch.Tensor) -> None:
        """Copy this rank's masters into their place in the whole.

        If a disk fails while other ranks wait for this one, this rank must not stop alone. It goes
        on with the values that it has, and all ranks raise before the optimizer steps.
        """
        try:
            self.flat.storage.put(full)
        except TierError as error:
            if not self.engine.awaited_by_others:
                raise
            self.engine.failed(error)


# -- orders -----------------------------------------------------------------------------------------
#
# The orders in which all ranks gather and reduce, and when a reduction is waited for. `gather.py` and
# `reduce.py` carry it out.
#
#     forward    use 0   use 1   use 2          backward  use 2   use 1   use 0    end
#     gathers    g0 g1   g2      ·              gathers   g1      g0      ·
#     memory     [0 ]1   [1 ]2   [2 ]     2     memory    [2 ]1   [1 ]0   [0 ]              (prefetch = 1)
#                                               reduced   [r2 .......][r1 ....]  [r0 ...]   (in_flight = 2)
#
# | order of      | at first                                  | once all ranks have seen the same           |
# |---------------|-------------------------------------------|---------------------------------------------|
# | forward       | the order in which units are registered   | the order of use in the forward pass        |
# | backward      | the reverse, enclosing units first        | the order of use in the backward pass       |
# | reductions    | the reverse                               | the order in which units had all gradients  |
#
# The ranks compare what they saw at the end of each backward pass (runtime/agree.py). Units that a
# step did not use keep a place in the orders (`Order.learn`).
#
# | what                  | goes as far as                                                                           |
# |-----------------------|------------------------------------------------------------------------------------------|
# | gathers ahead of use  | `Recipe.units_ahead` units, and further ones up to SMALL_TRAFFIC bytes together; once one |
# |                       | is ahead, never more than LARGE_TRAFFIC bytes                                            |
# | reads from a disk     | one unit further                                                                         |
# | reductions in flight  | `in_flight` of them, and further ones up to SMALL_TRAFFIC bytes together; of large units  |
# |                       | LARGE_TRAFFIC bytes, sent and received (`is_due`)                                        |
# | the host before the   | two units of a pass (`RunAhead` in comm/pending.py)                                      |
# | device                |                                                                                          |
#
# [Note: every rank joins every gather] Both passes walk an agreed order of units. A rank that takes
# another branch and passes over a unit still joins the gather of that unit, and drops the result. So
# ranks may use different units, as long as each uses its units in the agreed order. A unit that the
# order does not foresee is gathered on demand, and then all ranks must gather it at the same point.
#
# [Note: last units stay] The backward pass begins with the unit that the forward pass used last and
# the units that enclose it. These stay gathered between the two passes. The order seen in the first
# step tells which units they are (`last_units`), so the first step itself still releases them. Every
# later pass over the whole model that records gradients keeps all of them on every rank, including
# those that a rank did not use. They are released together, at points that every rank passes: at the
# next forward pass, before an optimizer steps, at the end of any backward pass, and when masters are
# written to (which all ranks do alike). So every rank knows what the others hold, and all ranks
# gather in the same order. They are also released when the whole autograd graph of the pass is freed,
# because no backward pass can follow then. Freeing a part of the graph releases nothing: ranks may
# drop different outputs.


class Order:
    """An order of units that all ranks keep in one kind of pass, and how far a pass has come.

    Attributes:
        units: the order. agreed: all ranks have seen it; else it is a guess.
        seen: the units that this rank came to in the pass under way, or the last one.
        walk: the units to come to in this pass, in order; empty where units are gathered on demand.
        at: units of the walk before this place are launched, some of them ahead of use. used: those
            before this place have been used, or passed over.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units, self.agreed = units, not units
        self.begin([])

    def begin(self, walk: list[Unit]) -> None:
        self.walk, self.at, self.used = walk, 0, 0
        self.seen: list[Unit] = []

    def next(self) -> Unit | None:
        """Return the first unit of the walk that is not launched."""
        return self.walk[self.at] if self.at < len(self.walk) else None

    def come_to(self, unit: Unit, launched: bool) -> tuple[list[Unit], list[Unit]]:
        """Walk to the next place of `unit`, which is about to be used. Stay if it does not come any
        more, or if it is `launched` already, but not by this walk.

        Returns the units that had their turn before it: those launched ahead of use, and those not
        launched.
        """
        try:
            there = self.walk.index(unit, self.used, self.at if launched else len(self.walk))
        except ValueError:
            return [], []
        ahead, others = self.walk[self.used : min(there, self.at)], self.walk[self.at : there]
        self.used, self.at = there + 1, max(self.at, there + 1)
        return ahead, others

    def learn(self, others: Sequence[Unit]) -> None:
        """Take what this rank has seen, as all ranks have, for the order of the next passes. Those of
        `others` that were not seen come behind their predecessors there: a later pass may use them.
        """
        out, before = list(self.seen), -1
        for unit in others:
            if unit in out:
                before = out.index(unit)
            else:
                before += 1
                out.insert(before, unit)
        self.units, self.agreed = out, True


def backwards(units: Sequence[Any]) -> list[Any]:
    """Return the order in which a backward pass first comes to units that a forward pass used in the
    order of `units`. It goes from the last to the first. A unit that encloses others comes before
    them: its output is computed last, so its gradient comes first.
    """
    groups: list[list[Any]] = []
    for unit in units:
        if groups and groups[-1][0].encloses(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [unit for head, *rest in reversed(groups) for unit in (head, *backwards(rest))]


def last_units(forward: Sequence[Any], backward: Sequence[Any]) -> set[Any]:
    """Return the units that a forward pass uses last and its backward pass first, with no other
    unit in between. `forward` and `backward` are units in the order of use.

    These are the last unit of the forward pass and the units that enclose it, without those that
    the forward pass uses several times, since ranks may be at different uses of them.
    """
    last, found = forward[-1], set()
    for unit in backward:
        if not (unit is last or unit.encloses(last)):
            break
        if forward.count(unit) == 1:
            found.add(unit)
    return found


# -- when --------------------------------------------------------------------------------------------


def look_ahead(gatherer: Any, order: Order) -> None:
    """Launch the gathers of the units that come next; read one further unit from its disk, which is
    slower than the wire.
    """
    waiting = [u for u in gatherer.gathered.values() if not (u.used or u in gatherer.keeping)]
    ahead, nbytes = len(waiting), sum([u.gathered_bytes for u in waiting])
    while (unit := order.next()) is not None:
        if not unit.awaiting_backward:  # else it is gathered, and counted already
            nbytes += unit.gathered_bytes
            if ahead and nbytes > (
                LARGE_TRAFFIC if ahead < gatherer.units_ahead else SMALL_TRAFFIC
            ):
                gatherer.fetch(unit)
                return
            if unit.ungathered:
                gatherer.launch(unit)
                ahead += 1
        order.at += 1


class Gatherer:
    """Gathers, keeps and releases the units of one engine.

    Attributes:
        forward, backward: the orders of gathers. last: the units that stay gathered between the
            passes. See [Note: last units stay] in this file.
        gathered: the units that are gathered or being gathered, by index. by_storage: their buffers.
        kept: units that stay gathered over passes; with `holding`, also over those with gradients.
        reached: how often a backward pass has reached the output of a unit.
        hooks: on saved tensors, of the forward pass under way.
    """

    def __init__(self, engine: Engine) -> None:
        self.units = engine.units
        self.engine, self.recipe, self.group = engine, engine.recipe, engine.group
        self.pool = engine.pool
        self.sharded = [u for u in self.units if not u.resident]
        self.forward, self.backward = Order(self.sharded), Order(backwards(self.sharded))
        self.last: Collection[Unit] = ()
        self.units_ahead = self.recipe.units_ahead(self.group.topology.two_levels)
        # The pass that left the last units gathered. Kept for the callback of the weak reference
        self.awaited_pass: weakref.ref[Graph] | None = None
        self.gathered: dict[int, Unit] = {}
        self.by_storage: dict[int, tuple[Unit, Flat]] = {}
        # This pass released a unit although the recipe keeps units for backward. A re-entrant
        # checkpoint does so: its part runs without gradients, and gathers the unit again later
        self.released_early = False
        # Whether torch.autocast may cast gathered parameters
        self.holds_fp32 = any(
            f.dtypes.compute == torch.float32 for u in self.sharded for f in u.flats
        )
        self.hooks: saved_tensors_hooks | None = None
        self.reached = 0
        self.kept: Collection[Unit] = ()
        self.holding = False

    # -- passes ------------------------------------------------------------------------------------

    def begin_forward(self, over_model: bool) -> None:
        self.released_early = False
        self.release_last_units()  # their backward pass did not come, or comes after this forward pass
        if self.kept and not self.holding:
            self._release_all(self.kept) if self.engine.graded else self.gather_kept()
        if self.sharded:
            self.forward.begin(self.forward.units if over_model else [])
            if torch.is_grad_enabled():
                differentiate.refuse_transforms()
                self.hooks = saving((self,))
                self.hooks.__enter__()

    def end_forward(self, aborted: bool) -> None:
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)
        if not aborted:
            self.join_rest(self.forward)
            for unit in self.units:
                self.wait(unit)  # a refreshed copy or joined unit that this rank did not use
        if not self.sharded:
            return
        keep = self._keeps_for_backward and not aborted
        last = self._kept_last if not aborted and self.group.broken is None else ()
        self.forward.walk = []
        for unit in self.sharded:
            unit.borrowed = unit.unwanted = False
            if unit.state is State.SHARDED:
                continue
            if unit in last and not unit.ungathered:
                unit.used, unit.awaiting_backward = False, True
                continue
            # Where units stay gathered for the backward pass, those that this rank joined and did
            # not use stay too. Other ranks use them: then all ranks hold the unit, and no rank has
            # to gather it in the backward pass.
            stays = (keep and (unit.used or not self.released_early)) or self.engine.backward_open
            if unit in self.keeping or not stays:
                self.release(unit)
        self.pool.drain()

    def keep(self, units: Collection[Unit], holding: bool) -> None:
        """Gather units, and let them stay gathered over passes until `let_go`. Unless `holding`,
        passes with gradients release them.
        """
        self.engine.transfers.check()
        # First: writes to units that are not kept are not looked for
        self.kept, self.holding = dict.fromkeys(units), holding
        self.engine.passes.refresh(self.units)
        self.gather_kept()

    @property
    def keeping(self) -> Collection[Unit]:
        """The units that nothing releases but a write to their masters."""
        return self.kept if self.holding or not self.engine.graded else ()

    def gather_kept(self) -> None:
        """Launch the gathers of the units that stay gathered and are not gathered yet."""
        for unit in self.forward.units:
            if unit in self.kept and unit.ungathered:
                self.launch(unit)

    def let_go(self) -> None:
        """Release the units that `keep` has kept."""
        kept, self.kept, self.holding = self.kept, (), False
        self._release_all(kept)

    def release_last_units(self) -> None:
        """Release the units that wait for a backward pass. Called at points that all ranks pass."""
        self.awaited_pass = None
        self._release_all(self._awaiting_backward())

    def _release_all(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.state is not State.SHARDED and not unit.in_use:
                self.release(unit)
        self.pool.drain()  # also: a buffer made under inference_mode is of no use outside

    def _awaiting_backward(self) -> list[Unit]:
        return [u for u in self.gathered.values() if u.awaiting_backward]

    def release_when_gone(self, graph: Graph) -> None:
        """Release the units that wait for a backward pass when `graph` dies: none can come."""
        seen = weakref.ref(self)

        def gone(_: weakref.ref[Graph]) -> None:
            if (gather := seen()) is not None and not (
                gather.engine.closed or gather.engine.backward_open
            ):
                gather.release_last_units()

        self.awaited_pass = weakref.ref(graph, gone) if self._awaiting_backward() else None

    def begin_backward(self) -> None:
        self.backward.begin([])
        for unit in self._awaiting_backward():
            # Gather it again: this backward pass uses the new values of all units
            if any(flat.stale for flat in unit.flats):
                self.release(unit)
        if not self.engine.differentiating:
            self.foresee_backward()

    def foresee_backward(self) -> None:
        """Prepare the walk of this backward pass along the agreed order, which is that of passes
        over the whole model. After passes over a part of it, units are gathered on demand.
        """
        order, seen = self.backward, self.backward.seen
        # Units that every rank still holds need no gather and are not in the walk. The last units
        # are in it: if the pass skips one of them, `acquire` has to notice, since their reduction
        # waits for that.
        over_model = any(g.of_model for g in self.engine.graphs)
        order.begin(
            [u for u in order.units if over_model and (u.ungathered or u.awaiting_backward)]
        )
        # A re-entrant checkpoint may have recomputed before the first gradient came. Every rank
        # gathered its units on demand and has released them: they are not to be joined
        for unit in seen if order.agreed else ():
            order.come_to(unit, launched=False)
        order.seen = seen

    def join_rest(self, order: Order) -> None:
        """At the end of a pass, join the gathers that other ranks may have launched."""
        rest, order.at = order.walk[order.at :], len(order.walk)
        for unit in rest:
            self.join(unit)

    def end_backward(self) -> None:
        self.backward.walk = []
        for unit in self.sharded:
            unit.borrowed = unit.by_hand = unit.unwanted = False
        self._release_all(self.sharded)

    def learn(self, gathered: Sequence[Unit]) -> None:
        """Take the orders that this rank has seen, as all ranks have, for those of the next steps.

        `gathered`: the units that any rank has gathered in the backward pass.
        """
        forward, backward = self.forward, self.backward
        if not forward.seen:
            return
        # The backward passes of the others, which forward passes use, read no parameter
        needed = [u for u in self.sharded if u in gathered or u not in forward.seen]
        forward.learn(forward.units)
        backward.learn([u for u in backwards(forward.units) if u in needed])
        if self.recipe.reshard_after_forward:
            self.last = last_units(forward.seen, backward.seen)

    @property
    def _keeps_for_backward(self) -> bool:
        """Whether units stay gathered between this forward pass and its backward pass."""
        return torch.is_grad_enabled() and not self.recipe.reshard_after_forward

    @property
    def _kept_last(self) -> Collection[Unit]:
        """The last units, if this forward pass keeps them. It looks at `graded`, since a
        re-entrant checkpoint runs its part of the pass without gradients.
        """
        keeps = self.forward.walk and self.engine.graded and not self.engine.backward_open
        return self.last if keeps else ()

    # -- one unit ----------------------------------------------------------------------------------

    def acquire(self, unit: Unit, backward: bool) -> None:
        """Gather the unit and wait for it; launch the gathers of the units that come next."""
        if unit.used:
            return
        if unit.resident:
            self.wait(unit)
            return
        order = self.backward if backward else self.forward
        ahead, others = order.come_to(
            unit, not (unit.ungathered or (backward and unit.awaiting_backward))
        )
        # Their turn was before this one. The turn of a unit inside this one may still come
        skipped = [u for u in ahead if not (u.used or u.ungathered or unit.encloses(u))]
        for other in (*others, *skipped, unit):
            self.join(other)
        if backward:
            self._sweep()
            if order.walk:
                self.engine.reduce.passed_over(
                    [u for u in (*others, *skipped) if not u.encloses(unit)]
                )
        self.wait(unit)
        unit.used, unit.unwanted = True, False
        order.seen.append(unit)
        self._release_unwanted(unit, backward)
        if order.walk and order.agreed and self.units_ahead:
            look_ahead(self, order)

    def gather_alone(self, unit: Unit) -> bool:
        """Gather the unit for something outside the order of passes. Collective at stage 3.

        Returns True if it was not gathered: then the caller has to release it.
        """
        alone = unit.ungathered
        if alone:
            self.launch(unit)
        self.wait(unit)
        return alone

    def join(self, unit: Unit) -> None:
        """Take part in a gather that other ranks may need. See [Note: every rank joins every
        gather] in this file.
        """
        if unit.ungathered:
            self.launch(unit)
        elif unit.used or unit in self.keeping:
            return
        unit.unwanted, unit.awaiting_backward = True, False  # until it is used

    def pass_by(self, unit: Unit) -> bool:
        """Join the gathers up to that of a unit that this rank does not use in this backward pass.
        Called before this rank waits for the reduction of the ranks that do use it.

        Returns False, and joins nothing, if this rank has yet to use another unit that comes before
        it in the order, which would be joined too, and dropped before its use. Then `passed_over` is
        called again. This happens behind frozen units: they have no gradient that the reductions
        wait for, so reductions get ahead of the pass.
        """
        order = self.backward
        rest = order.walk[order.at :]
        if unit in rest:
            before = rest[: rest.index(unit)]
            if any(u.calls and u not in order.seen for u in before):
                return False
            order.at += len(before) + 1
            for each in (*before, unit):
                self.join(each)
        return True

    def _release_unwanted(self, using: Unit, backward: bool) -> None:
        """Release the units that were joined or gathered ahead, and not used. In a backward pass,
        units that enclose the unit in use, or lie inside it, stay: their turn may still come.
        """
        if not backward and self._keeps_for_backward:
            return
        for unit in [u for u in self.gathered.values() if u.unwanted]:
            if backward and (unit.encloses(using) or using.encloses(unit)):
                continue
            unit.unwanted = False
            if backward or unit not in self._kept_last:  # all ranks keep these
                self.release(unit)

    def _sweep(self) -> None:
        # Two kinds of units give no sign when the backward pass is done with them: recomputed ones
        # (their tensors are saved without handles) and frozen ones (no gradient comes). They are
        # released here, when another unit is acquired for the next recomputation. Between two
        # recomputations the backward pass reaches the output of some unit, which raises `reached`.
        # A unit with the present `reached` belongs to the recomputation under way and stays.
        for unit in list(self.gathered.values()):
            if unit.used and unit.recomputing != self.reached:
                unit.recomputing = None
                self.maybe_release(unit)

    def launch(self, unit: Unit) -> None:
        """Start the gather of every flat buffer of the unit."""
        assert unit.state is not State.GATHERING, unit.name
        unit.state = State.GATHERING
        if not unit.resident:
            self.gathered[unit.index] = unit
        context = self.engine.context("all-gather", unit.name)
        for flat in unit.flats:
            if flat.resident and not flat.stale:
                continue
            unit.pending.append(flat.gather.start(self.buffer_of(unit, flat), context))
            # Not before: a launch that was interrupted is made again
            flat.copied = flat.version

    def buffer_of(self, unit: Unit, flat: Flat) -> torch.Tensor:
        """Return the buffer for the whole of `flat`; take one from the pool if it has none."""
        if flat.full is None:
            flat.full = self.pool.take(flat.layout.numel, flat.dtypes.compute, GATHERED, unit.name)
        self.by_storage[storage_of(flat.full)] = (unit, flat)
        return flat.full

    def fetch(self, unit: Unit) -> None:
        """Start reading this rank's part of the unit, if it is stored on a disk."""
        wanted = [f for f in unit.flats if f.spec.gathers_from_disk and not f.gather.fresh]
        if unit.state is State.SHARDED and wanted:
            unit.state = State.FETCHING
            for flat in wanted:
                self.buffer_of(unit, flat)
                flat.storage.fetch()

    def wait(self, unit: Unit, comes: bool = True) -> None:
        """Wait until the unit is gathered. Without `comes`, its bytes never will: the group is
        broken.
        """
        if unit.state is not State.GATHERING:
            return
        for pending in unit.pending if comes else ():
            pending.wait()
        unit.pending.clear()
        unit.state = State.GATHERED
        for flat in unit.flats:
            if not flat.resident:
                flat.point_at(flat.full)

    def release(self, unit: Unit, kept_too: bool = False) -> None:
        """Release the unit, unless it is kept until its masters are written to (`kept_too`)."""
        unit.used = unit.awaiting_backward = unit.unwanted = False
        unit.recomputing = None
        if unit in self.keeping and not kept_too and self.group.broken is None:
            return
        assert unit.state is not State.SHARDED, unit.name
        self.wait(unit, comes=self.group.broken is None)
        unit.state = State.SHARDED
        self.gathered.pop(unit.index, None)
        if self.holds_fp32 and torch.is_autocast_enabled(self.pool.device.type):
            torch.clear_autocast_cache()  # [Note: casts are handles] in runtime/saved.py
        for flat in unit.flats:
            flat.storage.forget()
            # On one rank, a unit may have frozen parameters, which stay, and others that are cast
            if flat.resident:
                continue
            if (full := flat.full) is not None:
                # First: an interrupt may come, and what gets this address next is no weight
                self.by_storage.pop(storage_of(full), None)
                flat.point_at(None)
                flat.full = None
                self.pool.give(full)

    def after_forward(self, unit: Unit, output: Any) -> None:
        """Release the unit after its forward pass. It stays if the agreed order uses it again next,
        if it is kept for later passes, if other code has read its parameters, or if its output lies
        in a gathered buffer.
        """
        order = self.forward
        if unit.resident or unit.state is not State.GATHERED or unit.borrowed:
            return
        if order.agreed and order.next() is unit:
            order.at += 1
            unit.used = False
        elif unit in self.keeping or unit in self._kept_last:
            unit.used = False
        elif not self._keeps_for_backward:
            self.released_early = True
            # Else `end_forward` releases it: code of the pass may still read the output
            if not any(is_in(self.by_storage, t) for t in tensors_in(output)):
                self.release(unit)

    def is_done(self, unit: Unit) -> bool:
        """Whether this backward pass has used the unit and waits for nothing more of it: no saved
        tensor, no gradient. Then reaching a further output of its forward pass (a cache of keys
        and values) is no reason to gather it again.
        """
        return unit in self.backward.seen and not (unit.saved or unit.gradients)

    def maybe_release(self, unit: Unit) -> None:
        """Release the unit if its backward is over: nothing holds it any more."""
        if not (self.engine.backward_open and unit.used and not unit.resident):
            return
        if not unit.needed_in_backward:
            self.release(unit)


differentiate.keep_hooks_from_compiler(Gatherer.release_when_gone)
