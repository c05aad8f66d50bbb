"""Which step and which pass; who follows the passes; and what `shard()` chooses for an engine."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.comm import CollectiveContext
from onefold.recipe import Recipe
from onefold.recipe.rows import GROUP

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.runtime.passes import Graph


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
    """Set as `Progress.follower`; None follows nothing.

    Attributes:
        weight: what the gradients of every pass are multiplied with: the number of ranks turns the
            mean over ranks into a sum.
        synchronizes: the pass under way ends with reduced gradients, unless it is under `no_sync`.
    """

    weight: float

    @property
    def synchronizes(self) -> bool: ...

    def forward_begins(self) -> None:
        """A forward pass begins that no other contains, not even a backward pass."""

    def backward_begins(self) -> float:
        """A backward pass begins, and no gradient of it has arrived. Returns what its gradients are
        multiplied with, besides `weight`.
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


# -- which step, which pass ------------------------------------------------------------------------
#
# The engine and its passes set it. The gatherer and the reducer read it, and report failures.


class Progress:
    """Which step, which pass.

    Attributes:
        step_count: synchronized backward passes so far.
        synced: no `no_sync` is open. holds_whole: gradients stay whole in passes without `sync`,
            whatever the recipe says. pending: gradients wait for a later reduction.
        follower: code outside the core that follows the passes. factor: what
            the gradients of the backward pass under way are multiplied with, besides `weight`.
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
        last_failure: the most recent error of background work, raised or not.
        closed: the engine has let go of everything.
    """

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.step_count, self.synced = 0, True
        self.holds_whole = self.pending = False
        self.follower: PassFollower | None = None
        self.factor = 1.0
        self.graded = False
        self.backward_open = self.differentiating = self.creates_graph = False
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.writes, self.optimizer_seen = 0, False
        self.failure: BaseException | None = None
        self.failure_agreed = False
        self.last_failure: BaseException | None = None
        self.closed = False
        self._several = group.size > 1
        self._defers = recipe.reduces_at == "boundary"
        # In groups of one rank there is no sum to hold
        self._holds = (
            not self._defers
            and recipe.gradients.over == GROUP
            and group.inter_group.size > 1
            and group.topology.inner > 1
        )

    @property
    def phase(self) -> str:
        return "backward" if self.backward_open else "forward"

    @property
    def sync(self) -> bool:
        """Whether this backward pass ends with reduced gradients."""
        return self.synced and (self.follower is None or self.follower.synchronizes)

    @property
    def weight(self) -> float:
        """What the gradients of every pass are multiplied with."""
        return 1.0 if self.follower is None else self.follower.weight

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
        return self._several and (torch.is_grad_enabled() or self.backward_open)

    def context(self, move: str, unit: str) -> CollectiveContext:
        """Return the context of a collective that starts now: its step and pass."""
        return CollectiveContext(move, unit, self.step_count, self.phase)

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


# -- spans of the timeline -------------------------------------------------------------------------


class Span(NamedTuple):
    """When a unit computed (on CUDA: when its work was handed to the device), in seconds of
    `time.perf_counter`.

    phase is "forward" or "backward". The forward span of a unit contains those of the units inside
    it. A backward span ends when the last gradient of the unit has come and begins where the previous
    one ended: autograd does not say more.
    """

    unit: str
    phase: str
    start: float
    end: float
