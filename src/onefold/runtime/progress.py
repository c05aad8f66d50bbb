"""Where a run stands, and what the parts of an engine work with.

The engine writes where it stands; the gatherer and the reducer read it, and say what has failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onefold.comm import CollectiveContext
from onefold.recipe.rows import GROUP

if TYPE_CHECKING:
    from onefold.comm import Group
    from onefold.memory import MemoryLedger, Pool
    from onefold.recipe import Recipe
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
        failure: what work behind the training, or a disk, has failed with, while the user was not
            told. Ranks agree on it in a backward pass, and the optimizer step behind that raises it
            on all: none takes a step that another does not.
        closed: the engine has let go of everything.
    """

    def __init__(self, recipe: Recipe, group: Group) -> None:
        self.step, self.sync = 0, True
        self.graded = False
        self.backward_open = self.differentiating = self.creates_graph = False
        self.open_graphs = self.root_graphs = 0
        self.failure: BaseException | None = None
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


@dataclass(frozen=True)
class Resources:
    """What the parts of one engine share."""

    recipe: Recipe
    group: Group
    memory: MemoryLedger
    pool: Pool
    transfers: Transfers
    progress: Progress = field(repr=False)
