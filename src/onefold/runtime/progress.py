"""Where a run stands, and what the parts of an engine work with.

The engine writes where it stands; the gatherer and the reducer read it, and say what has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.recipe.rows import GROUP

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.memory import MemoryLedger, Pool
    from onefold.recipe import Recipe
    from onefold.runtime.capabilities import Capabilities
    from onefold.runtime.flat import Flat
    from onefold.runtime.residuals import Residuals
    from onefold.runtime.transfers import Transfers


class Progress:
    """Which step, which pass.

    Attributes:
        step: synchronized backward passes so far.
        sync: this backward pass ends with reduced gradients (it is not under `no_sync`).
        graded: the forward pass under way, or the last one, began with gradients.
        backward_open: a backward pass has begun.
        differentiating: it accumulates nothing (torch.autograd.grad). creates_graph: it is recorded
            itself.
        open_graphs, root_graphs: forward passes with gradients that no backward pass has followed,
            and those of them over the whole model.
        outside_graphs: operations with gradients outside a forward pass (runtime/parameters/outside.py) have
            run since the last backward pass.
        optimizer_seen: an optimizer over these parameters has stepped once. stepped: one has since
            copies of the masters were last compared with them (runtime/stale.py).
            reduced_since_gather: gradients were reduced since then.
        failure: what work behind the training, or a disk, has failed with, while the user was not
            told. Ranks agree on it in a backward pass, and the optimizer step behind that raises it
            on all: none takes a step that another does not.
        failure_agreed: some rank had a `failure` at the last such agreement.
        last_failure: what work behind the training has failed with last, told or not.
        closed: the engine has let go of everything.
    """

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.step, self.sync = 0, True
        self.graded = False
        self.backward_open = self.differentiating = self.creates_graph = False
        self.open_graphs = self.root_graphs = 0
        self.outside_graphs = False
        self.optimizer_seen = self.stepped = self.reduced_since_gather = False
        self.failure: BaseException | None = None
        self.failure_agreed = False
        self.last_failure: BaseException | None = None
        self.closed = False
        self._defers = recipe.reduce_at == "boundary"
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
    def deferring(self) -> bool:
        """Gradients stay whole in this backward pass."""
        return self._defers and not self.sync

    @property
    def holding(self) -> bool:
        """Gradients are reduced inside each group only: the hop between groups waits for the last
        micro-batch.
        """
        return self._holds and not self.sync

    def context(self, move: str, unit: str) -> CollectiveContext:
        """What a move of this moment is for."""
        return CollectiveContext(move, unit, self.step, self.phase)

    def failed(self, error: BaseException) -> None:
        """Something went wrong where others wait for this rank: it goes on, and the first error is
        told at the boundary.
        """
        self.failure = self.failure or error


class MasterAccess:
    """Who reads masters and states while somebody else wants to write to them.

    Attributes:
        copying: waits until a save, or a copy of averages, has read them; None if none does.
    """

    def __init__(self, transfers: Transfers, progress: Progress) -> None:
        self._transfers, self._progress = transfers, progress
        self.copying: Callable[[], None] | None = None

    def about_to_write(self) -> None:
        """Masters or states are going to change: wait for who is copying them."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying()
        self._transfers.up.wait()  # copies up may still read masters on the host

    def before_write(self, flat: Flat, seen: bool = False) -> None:
        """Wait for copies of the masters of `flat` that are under way: code outside a step is going
        to write to them, or (`seen`) takes a view that it may write to. The host waits if they are
        in its memory, or a save is copying them.
        """
        if self._progress.closed:
            return
        if self.copying is not None and not seen:
            self.about_to_write()
        else:
            flat.storage.before_write()


@dataclass(frozen=True)
class Resources:
    """What the parts of one engine share."""

    recipe: Recipe
    group: Group
    device: torch.device
    memory: MemoryLedger
    pool: Pool
    transfers: Transfers
    capabilities: Capabilities
    residuals: Residuals
    masters: MasterAccess
    progress: Progress = field(repr=False)
