"""The backward passes of one engine: how each begins, and how it ends, also when it raised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from onefold.runtime import differentiate
from onefold.runtime.agree import agree_and_finish
from onefold.runtime.parameters.interval import disable_torch_function
from onefold.runtime.unreduced import show_unreduced

if TYPE_CHECKING:
    from onefold.runtime.capabilities import Activations
    from onefold.runtime.entry import Entry
    from onefold.runtime.gather import Gatherer
    from onefold.runtime.parameters.write_counters import ForwardPass
    from onefold.runtime.progress import Resources
    from onefold.runtime.reduce import Reducer
    from onefold.runtime.spans import Spans
    from onefold.runtime.steps import Step


def in_autograd() -> bool:
    """Whether a backward pass is running in this thread. A forward pass inside it is a
    recomputation.
    """
    return torch._C._current_graph_task_id() != -1


class Backward:
    """Opens a backward pass at its first event, and ends it when autograd has finished.

    Attributes:
        reached: the forward passes whose outputs this backward pass has reached.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        resources: Resources,
        gather: Gatherer,
        reduce: Reducer,
        steps: Step,
        activations: Activations,
        spans: Spans,
    ) -> None:
        self.entries, self.resources, self.progress = entries, resources, resources.progress
        self.gather, self.reduce, self.steps = gather, reduce, steps
        self.activations, self.spans = activations, spans
        self.reached: list[ForwardPass] = []

    def event(self, accumulates: bool = False) -> None:
        """Note that a backward pass has reached something of this engine. The first event opens the
        pass, and asks autograd to call `_end` at its end.

        `accumulates`: the event is that a parameter has got its gradient.
        """
        progress = self.progress
        if not progress.backward_open and in_autograd():
            with disable_torch_function():
                progress.differentiating = not (
                    accumulates or differentiate.accumulates(self.entries)
                )
                progress.backward_open, progress.creates_graph = True, torch.is_grad_enabled()
                self.gather.begin_backward()
                if not progress.differentiating:
                    self.reduce.begin_backward()
                self.spans.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        elif accumulates and progress.differentiating:
            # A gradient from inside a re-entrant checkpoint: the outer graph does not show it
            progress.differentiating = False
            self.gather.foresee_backward()
            self.reduce.begin_backward()

    def _end(self) -> None:
        progress, reduce = self.progress, self.reduce
        memory, transfers = self.resources.memory, self.resources.transfers
        with disable_torch_function(), torch.no_grad():
            if progress.differentiating:
                self._end_differentiating()
                return
            reduce.collect()
            self.gather.join_rest_of_backward()
            used = reduce.used
            if used and not progress.deferring:
                reduce.launch_rest()
                agree_and_finish(self.resources, self.gather, reduce, used)
                progress.step += 1
                progress.reduced_since_gather = True
            progress.outside_graphs = False
            if used:
                self._close_graphs()
            if progress.deferring or progress.holding:
                show_unreduced(reduce)
            self.steps.join()
            progress.backward_open = False
            self.gather.end_backward()
            self.activations.end_backward()
            transfers.down.wait()  # the copies down that the user finds in `.grad` are complete
            memory.look()
            transfers.host.look()
            for unit in reduce.units:
                unit.waiting = set()

    def _end_differentiating(self) -> None:
        """End a backward pass that accumulated nothing (torch.autograd.grad): there is nothing to
        reduce and nothing to agree on.
        """
        self.progress.backward_open = self.progress.differentiating = False
        if not self.progress.creates_graph:
            self._close_graphs()
        self.reached.clear()
        self.gather.end_backward()
        self.activations.end_backward()
        self.resources.memory.look()

    def _close_graphs(self) -> None:
        """Close the graphs that the backward pass has used up: those of the passes that it reached,
        or one graph if it reached none.
        """
        progress, closed = self.progress, [p for p in dict.fromkeys(self.reached) if p.open]
        for each in closed:
            each.open = False
        graphs, of_root = (len(closed), sum(p.of_root for p in closed)) if self.reached else (1, 1)
        progress.open_graphs = max(0, progress.open_graphs - graphs)
        progress.root_graphs = max(0, progress.root_graphs - of_root)
        self.reached.clear()

    def reset(self) -> None:
        """Clean up after a forward or backward pass that raised."""
        progress = self.progress
        if not progress.differentiating:
            self.reduce.drop()
        progress.backward_open = progress.differentiating = False
        progress.open_graphs = progress.root_graphs = 0
        self.reached.clear()
        progress.outside_graphs = False
        self.gather.end_backward()
        self.activations.end_backward()
