"""The engine: one recipe at work on one module.

[Note: life of a step]

    forward pre-hook of a unit     acquire its parameters, let the module see them
    forward hook of a unit         show the optimizer's parameters again, release
    gradient of a parameter        copy into the unit's buffer; unit complete → reduce while backward goes on
    end of backward                land the reductions, agree on what was used, set `.grad`, release everything
    optimizer step                 works on `.grad` and master weights that are this rank's; resident copies become stale
    next forward                   stale copies are gathered while the first units compute

The engine holds no strong reference to the module: modules → hooks → engine, never back. When the
module dies, the engine closes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.comm import CollectiveContext, Group
from onefold.device import chunk_for
from onefold.layout import round_up
from onefold.memory import GRADIENTS, IDLE, MASTERS, PARAMETERS, MemoryLedger, Pool
from onefold.recipe import Recipe, Tier
from onefold.recipe.options import SECTOR
from onefold.recipe.rows import GROUP, NATIVE
from onefold.runtime.agree import agree_on_failure, note
from onefold.runtime.boxes import find_boxes
from onefold.runtime.buffers import Buffers, check_in_place, refuse_changes
from onefold.runtime.differentiate import OpenPass, in_autograd, still_open
from onefold.runtime.flat import Entry, Flat, Unit, bind
from onefold.runtime.gather import Gatherer
from onefold.runtime.parameters.values import IN_BACKWARD, count_writes, given_out
from onefold.runtime.parts import whole_masters
from onefold.runtime.passes import Graph, Passes
from onefold.runtime.reduce import Reducer
from onefold.runtime.stepper import Choice
from onefold.runtime.uninitialized import Uninitialized
from onefold.runtime.units import UnitSpec, offloaded_units

if TYPE_CHECKING:
    from onefold.offload.step import ApartStepper
    from onefold.sharding import Capabilities


# -- who follows the passes ------------------------------------------------------------------------
#
# Code outside the core that follows the passes over a model, whoever runs them.
#
#     a forward pass over the model, or a part of it, begins    `forward_begins`
#     a backward pass that accumulates gradients begins         `backward_begins`: what its gradients are multiplied with
#
# A training engine that divides losses, or drops the gradients of the last step, cannot rely on calls
# of its own: a script may call the module itself, and `loss.backward()`.


class PassFollower(Protocol):
    """Set as `Engine.follower`; None follows nothing.

    Attributes:
        synchronizes: the pass under way ends with reduced gradients, unless it is under `no_sync`.
    """

    @property
    def synchronizes(self) -> bool: ...

    def forward_begins(self) -> None:
        """A forward pass begins that no other contains, not even a backward pass."""

    def backward_begins(self) -> float:
        """A backward pass begins, and no gradient of it has arrived. Returns what its gradients are
        multiplied with.
        """
        ...


# -- what capabilities give ------------------------------------------------------------------------
#
# What an engine is given from outside the core: `shard()` knows which capability a recipe needs,
# and hands its maker to the engine.
#
# | question                                              | answered by        | maker (sharding.py)        |
# |-------------------------------------------------------|--------------------|----------------------------|
# | where is a shard stored                               | `Storage`          | `Capabilities.storage`     |
# | how does the whole come together                      | `Gather`           | `Capabilities.gather`      |
# | how do partial gradients become sums                  | `Hop`              | `Capabilities.hop`         |
# | where do saved activations wait for the backward pass | `Activations`      | `Capabilities.activations` |
# | how is an interval written as fewer bytes             | a codec of quant   | `Capabilities.codec`       |
# | what is on the host and on NVMe, and moves there      | `Transfers`        | `Capabilities.transfers`   |
# | who steps a shard, and when                           | `Stepper`          | `Capabilities.steppers`    |
#
# The engine and its parts import none of these implementations.


class Activations:
    """Where saved activations wait; it is called when passes begin and end. This one leaves them on
    the device.

    Attributes:
        hooks: on the saved tensors of the forward pass under way.
    """

    hooks: saved_tensors_hooks | None = None

    def begin_forward(self) -> None: ...
    def end_forward(self) -> None: ...
    def end_backward(self) -> None: ...
    def close(self) -> None: ...


# -- the engine ------------------------------------------------------------------------------------


class Engine:
    """What `onefold.engine_of(module)` returns.

    Attributes:
        recipe: what it executes. asked: the recipe before `Recipe.with_sums`.
        units: its units, the root first.
        mesh: the axes of the ranks. group: all ranks of the mesh.
        number: of the engines of this process; the same on all ranks.
        traffic: payload bytes sent by this rank. memory: bytes held by the engine on this rank's
            device.
        transfers: what the engine holds on the host and on NVMe, and what it moves there and back.

    Which step, which pass. The engine and its passes set it; the gatherer and the reducer read it, and
    report failures.

        step_count: synchronized backward passes so far.
        synced: no `no_sync` is open. holds_whole: gradients stay whole in passes without `sync`,
            whatever the recipe says. pending: gradients wait for a later reduction.
        follower: code outside the core that follows the passes. factor: what
            the gradients of the backward pass under way are multiplied with.
        graded: the forward pass under way, or the last one, began with gradients enabled.
        backward_open: a backward pass has begun.
        differentiating: that pass accumulates nothing (torch.autograd.grad). creates_graph: that
            pass is itself recorded by autograd.
        graphs: of forward passes, and of operations with gradients outside them, whose backward pass
            has not come.
        writes: how often a step, a load or the engine has written to masters. optimizer_seen: an
            optimizer over these parameters has stepped once.
        failure: an error of background work, or of a disk, that was not raised yet. Ranks agree on
            it in a backward pass, and the next optimizer step raises it on all of them, so that no
            rank takes a step that another does not take.
        failure_agreed: some rank had a `failure` at the last such agreement.
        last_failure: the most recent error of background work since the ranks last agreed that there
            is none, raised by `wait()` of a save or not.
        closed: the engine has let go of everything.
    """

    numbers = count()  # of the engines of this process
    early: ApartStepper  # the one that may step in the backward pass
    gather: Gatherer
    reduce: Reducer
    passes: Passes

    def __init__(
        self,
        specs: list[UnitSpec],
        recipe: Recipe,
        group: Group,
        device: torch.device,
        capabilities: Capabilities,
    ) -> None:
        self.device, self.capabilities = device, capabilities
        self.group, self.mesh = group, group.shared.mesh
        # The ranks of all stages of a pipeline of which this is one: see optim/clip.py
        self.across: Group | None = None
        self.rank, self.world_size = group.number, group.size
        if recipe.reduce == NATIVE and self.world_size > 1 and self.group.backend == "gloo":
            raise ValueError(
                "reduce='native' asks for the backend's own reduce-scatter, and gloo has none:"
                " leave it out, or run on a backend that has one, such as NCCL."
            )
        self.asked = recipe
        self.recipe = recipe = recipe.with_sums(self.group.native, self.group.flat_over_nodes)
        self.step_count, self.writes, self.synced = 0, 0, True
        self.holds_whole = self.pending = self.graded = False
        self.follower: PassFollower | None = None
        self.factor = 1.0
        self.backward_open = self.differentiating = self.creates_graph = False
        self.optimizer_seen = self.failure_agreed = self.closed = False
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.failure: BaseException | None = None
        self.last_failure: BaseException | None = None
        self._defers = recipe.reduces_at == "boundary"
        # In groups of one rank there is no sum to hold
        self._holds = (
            not self._defers
            and recipe.gradients.over == GROUP
            and group.inter_group.size > 1
            and group.topology.inner > 1
        )
        self.traffic = self.group.ledger
        self.memory = memory = MemoryLedger()
        self.traffic.wanted = lambda: memory.record
        offloaded = offloaded_units([s.trained for s in specs], recipe, group.topology)
        self.transfers = capabilities.transfers(self)
        self.pool = Pool(device, memory, paged=bool(offloaded) and recipe.on_disk)
        # Waits until the save that is under way has read masters and states
        self.copying: Callable[[], None] | None = None
        # Raises while averages are in the masters' place
        self.refusing: Callable[[], None] | None = None
        holders = find_boxes(specs, self.group, self.mesh)
        self.units: list[Unit] = bind(specs, self, offloaded, holders)
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.entries = [entry for flat in self.flats for entry in flat.entries]
        for number, entry in enumerate(self.entries):
            entry.number = number
        self.number = next(self.numbers)
        self.unsharded: bool = all(flat.unsharded for flat in self.flats)
        # Entries that other ranks have stepped in a backward pass, and whose gradients are gone
        self.stepped_early: set[Entry] = set()
        self.full_params_depth = 0
        self.full_params_write = False
        self.buffers = Buffers(self, specs)
        # What was on the meta device and has no value yet; empty once everything is loaded
        self.uninitialized = Uninitialized(self.group)
        # For onefold.unshard: the hooks on modules, and the finalizer that closes the engine
        self.handles: list[Any] = []
        self.finalizer: Any = None
        # Waits for background work (a save), so that its failure is known
        self.settle: Callable[[], None] = lambda: None

        # In this order: each takes what it needs of those before
        self.steppers = capabilities.steppers(self)
        self.early = self.steppers[1]
        self.choices: weakref.WeakKeyDictionary[Any, Choice] = weakref.WeakKeyDictionary()
        self.gather = Gatherer(self)
        self.activations: Activations = capabilities.activations(self)
        self.reduce = Reducer(self)
        self.passes = Passes(self)
        for flat in self.flats:
            memory.add(PARAMETERS, flat.spec.parameter_bytes, flat.unit_name)
            memory.add(MASTERS, flat.spec.master_bytes, flat.unit_name)
            for tier, kind, nbytes in flat.spec.offloaded:
                if not tier.on_disk:  # regions of a disk are counted as they are made
                    category = MASTERS if kind == "master" else PARAMETERS
                    self.transfers.ledgers[tier].add(category, nbytes, flat.unit_name)
        # Parameters whose `.data` is a plain tensor off the device: nothing tells of writes to it
        away, copies = self.offloaded_flats, self.transfers.up.asynchronous
        self.plain = [e for f in away if copies and f.owners is None for e in f.entries]
        if away:  # no more elements than the largest of them needs
            own = max(f.storage.numel * f.dtypes.master.itemsize for f in away)
            self.transfers.sums.chunk = chunk_for(own)
            most = round_up(max(f.storage.numel for f in away), SECTOR)
            self.transfers.chunk = min(self.recipe.chunk, most)
        for tier, ledger in self.transfers.ledgers.items():
            if tier is Tier.DEVICE or (away and not tier.on_disk):
                ledger.probes[GRADIENTS] = partial(self.reduce.gradient_bytes, tier)
        self.transfers.host.probes[IDLE] = self.transfers.pool.idle

    def close(self) -> None:
        """Let go of everything: buffers, communicators, and the reference cycles among the engine's
        own objects.
        """
        if self.closed:
            return
        self.closed = True
        self.settle()
        self.early.close()
        for group in filter(None, (self.across, self.group)):
            group.close()
        self.transfers.close()
        for flat in self.flats:
            flat.forget()
        for unit in self.units:
            unit.flats.clear()
        self.flats.clear()
        self.entries.clear()
        self.plain.clear()
        self.pool.drain()
        for ledger in self.transfers.ledgers.values():
            ledger.probes.clear()
        self.activations.close()
        del self.gather, self.reduce, self.steppers, self.early, self.choices
        del self.passes, self.buffers, self.uninitialized

    @property
    def offloaded_flats(self) -> list[Flat]:
        """The flat buffers whose state is offloaded."""
        return [flat for flat in self.flats if flat.storage.offloaded]

    @property
    def on_disk(self) -> bool:
        """Whether some of the state is stored on NVMe."""
        return any(flat.storage.on_disk for flat in self.flats)

    # -- which step, which pass ---------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return "backward" if self.backward_open else "forward"

    @property
    def sync(self) -> bool:
        """Whether this backward pass ends with reduced gradients."""
        return self.synced and (self.follower is None or self.follower.synchronizes)

    @property
    def deferring(self) -> bool:
        """Whether gradients stay whole in this backward pass."""
        return (self._defers or self.holds_whole) and not self.sync

    @property
    def holding(self) -> bool:
        """Whether gradients are reduced inside each group only in this backward pass: the hop
        between groups waits for the last micro-batch.
        """
        return self._holds and not self.holds_whole and not self.sync

    @property
    def awaited_by_others(self) -> bool:
        """Whether other ranks wait for this one until the boundary, in this pass: an error of this
        rank must not stop it alone.
        """
        return self.world_size > 1 and (torch.is_grad_enabled() or self.backward_open)

    def context(
        self, move: str, unit: str, phase: str | None = None, about: tuple[int, int] | None = None
    ) -> CollectiveContext:
        """Return the context of a collective that starts now: its step, and its phase, by default the
        pass under way.
        """
        return CollectiveContext(move, unit, self.step_count, phase or self.phase, about=about)

    def state_context(self, unit: str) -> CollectiveContext:
        """Return the context of a collective over parameters or states of a unit."""
        return self.context("state", unit, "state")

    def refuse_if_closed(self) -> None:
        """Called when a backward pass comes to a part of a graph.

        Raises:
            RuntimeError: the model of the graph is gone.
        """
        if self.closed:
            raise RuntimeError(
                "backward() of a forward pass whose sharded model is gone (deleted, or unsharded)"
                " since: its parameters cannot be gathered any more. Keep the model until then."
            )

    def failed(self, error: BaseException) -> None:
        """Note an error that happened while other ranks wait for this one. This rank goes on; the
        first error is raised at the boundary.
        """
        self.failure = self.failure or error

    # -- forward -----------------------------------------------------------------------------------

    @property
    def stack(self) -> list[OpenPass]:
        """The open forward passes of units, see `Passes.stack`."""
        return [] if self.closed else still_open(self.passes.stack)

    @property
    def computing(self) -> bool:
        """Whether the code that runs now computes with whole parameters: in a forward pass, or in
        its recomputation in backward.
        """
        return bool(self.stack) or (in_autograd() and not self.full_params_depth)

    # -- outside a pass, with gradients -----------------------------------------------------------

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass of the model is under way."""
        return bool(self.stack) or (self.backward_open and not self.full_params_depth)

    def in_any_pass(self) -> bool:
        """Whether a pass of the model is under way. Ends a backward pass that was left open."""
        if self.backward_open and not in_autograd():
            self.passes.reset()
        return bool(self.stack) or self.backward_open

    def begin_outside(self, entry: Entry) -> Unit:
        """Prepare for an operation with gradients outside a forward pass, which is about to use
        whole parameters of the unit of `entry`. Returns that unit.
        """
        unit = entry.unit
        self.in_any_pass()
        check_in_place((unit,))
        self.passes.refresh([unit])
        self.reduce.follow_trainable(unit.flats)
        unit.calls += 1
        return unit

    # -- other requests of parameters --------------------------------------------------------------

    def agree_on_overflow(self, found: torch.Tensor, group: Group | None = None) -> None:
        """Set `found` to its maximum over all ranks (of `group`: those of all stages of a pipeline).
        Collective. `found` is one number, above 0 if this rank's gradients are not finite.

        Raises:
            ValueError: the recipe steps in the backward pass, before gradients can be checked.
        """
        self.told_of_overflow()
        values = (group or self.group).gather_values(
            found.detach().to(self.device),
            self.context("control", "(overflow check)", "optimizer"),
        )
        found.fill_(values.max().to(found.device))

    def told_of_overflow(self) -> None:
        """Called before gradients are unscaled: the ranks agree, or another stage of this rank has
        agreed, on whether they are finite. Raises as `agree_on_overflow`.
        """
        if self.recipe.step_in_backward:
            raise ValueError(
                "step_in_backward=True steps gradients before they can be unscaled: leave that"
                " option out with a GradScaler."
            )
        self.optimizer_is_stepping()

    # -- writes to masters -------------------------------------------------------------------------

    def about_to_write(self) -> None:
        """Wait for copies of masters and states that are under way: these are going to change.
        Raises: RuntimeError: averages are in the masters' place.
        """
        if self.refusing is not None:
            self.refusing()
        copying, self.copying = self.copying, None
        if copying is not None:
            copying()
        self.transfers.up.wait()  # copies up may still read masters on the host

    def wait_before_write(self, flat: Flat, seen: bool = False) -> None:
        """Wait for copies of the masters of `flat` that are under way. Called before code outside a
        step writes to them, or (`seen`) takes a view that it may write to. The host waits if the
        masters are in its memory, or if a save is copying them.
        """
        if not seen and (self.copying or self.refusing) is not None:
            self.about_to_write()
        elif flat.storage.offloaded and flat.storage.in_place:
            self.transfers.up.wait()

    def wait_if_given_out(self) -> None:
        """At the end of a pass, wait for the copies up if code holds a plain view of masters: it may
        write there from now on.
        """
        if any(given_out(entry.param) for entry in self.plain):
            self.transfers.up.wait()

    # -- between steps -----------------------------------------------------------------------------

    def make_stale(self) -> None:
        """Mark every copy of masters as stale: the masters have been written to."""
        count_writes(self, self.entries)

    def optimizer_is_stepping(self) -> None:
        """Called before an optimizer over these parameters steps."""
        if self.backward_open and in_autograd():
            raise RuntimeError(f"optimizer.step() was called in a gradient hook, but {IN_BACKWARD}")
        if not self.backward_open:
            self.gather.release_last_units()
        self.about_to_write()
        self.transfers.check()
        if self.failure_agreed and self.on_disk and self.world_size > 1:
            agree_on_failure(
                self,
                self.failure or self.last_failure,
                "before the step: nothing has been stepped",
            )
        elif self.failure_agreed or (self.failure is not None and self.world_size == 1):
            self.tell_failure()
        if any(flat.waits for flat in self.flats):
            raise RuntimeError(
                "optimizer.step() was called while gradients kept under no_sync have not been"
                " reduced yet. Run the last micro-batch of the step outside"
                " `onefold.no_sync(model)`."
            )

    def note_update(self, name: str, items: Iterator[str]) -> None:
        """Note what clipping or an optimizer is about to do, of which `items` are the numbers, for the
        ranks to compare.
        """
        if not self.group.alone and self.step_count:  # before a first pass nothing has a gradient
            note(self.group.updates, name, items)

    def tell_failure(self) -> None:
        """Raise the error of background work: the one not raised yet, or else the most recent.

        Raises:
            RuntimeError: it is another rank's alone.
        """
        self.settle()  # another rank's work may have failed first: wait for this rank's error
        failure = self.failure or self.last_failure
        self.failure, self.last_failure, self.failure_agreed = None, None, False
        raise failure or RuntimeError(
            "another rank failed beside the passes (in a step during the backward pass, or in a save):"
            " read what it says. This rank has not stepped what it steps here."
        )

    # -- other -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unsynced(self) -> Iterator[None]:
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = before

    def reduce_pending(self) -> None:
        """Reduce the gradients that wait for the boundary, outside of a backward pass. Collective:
        every rank must call it, after the same backward passes.
        """
        if self.pending and self.sync:
            self.passes.reduce_pending()
            self.buffers.due = True

    def check_moment(self, call: str) -> None:
        """Called before `call` reads or writes the values of parameters.

        Raises:
            RuntimeError: this is inside a forward pass or `full_params`, or the model has other
                parameters by now than `shard()` found.
        """
        if self.stack or self.full_params_depth:
            where = "a forward pass" if self.stack else "full_params()"
            raise RuntimeError(
                f"{call}() was called inside {where}: call it outside, between steps."
            )
        refuse_changes(self.units[0].module(), self.entries, call)

    def whole(self, entry: Entry) -> torch.Tensor:
        self.uninitialized.refuse("gather() would give", entry.names)
        return entry.flat.view(whole_masters(self, entry.flat), entry).clone()

    def summary(self) -> str:
        """Return the recipe and the units as a readable table, with the share of padding."""
        numel = sum(u.numel for u in self.units)
        content = sum(flat.layout.content for flat in self.flats)
        lines = [
            self.recipe.describe(),
            (
                f"{self.world_size} ranks, {len(self.units)} units, {content:,} parameters,"
                f" {(numel - content) / max(numel, 1):.2%} padding"
            ),
        ]
        lines += [f"  {u.name:40} {u.numel:>14,} elements" for u in self.units]
        return "\n".join(lines)
