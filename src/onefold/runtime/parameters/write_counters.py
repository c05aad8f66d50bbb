"""Which parameters have been written to since a forward pass computed with them.

    forward A   step   backward A     an error, as in plain PyTorch: the weights that A's gradients need are overwritten
    forward A   backward A   step     the usual order
    forward A, forward B   step over B's parameters   backward A     fine

Autograd's version counters do not notice this: an optimizer writes to the masters, but a backward
pass reads the flat buffers that are gathered or copied from them.

Each forward pass stores one number, the count of writes when it began. If the count has changed
when its backward pass begins, the backward pass walks up the graph from the pass's output, and
raises if it meets a parameter whose values have been overwritten. Not every write overwrites:
copies in another dtype keep the old values until they are refreshed, and an optimizer writes only
to the parameters that it steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onefold.runtime.parameters.interval import disable_torch_function, get_grad

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry


class WriteCounters:
    """Counts the writes to an engine's masters. `entry.last_write` is the number of the last write
    to that entry.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries  # the engine's own list, which it clears when it closes
        self.count = 0
        # Parameters that got a gradient on some rank since they were last stepped
        self.graded: set[int] = set()

    def stepped(self, entries: Iterable[Entry]) -> list[Entry]:
        """Count a step of an optimizer over `entries` as a write to those with a gradient.

        For an entry of which this rank owns no element, a gradient on any other rank counts.
        Returns such entries that the other ranks have stepped.
        """
        self.count += 1
        others: list[Entry] = []
        for entry in entries:
            graded = entry.number in self.graded
            if get_grad(entry.param) is not None:
                entry.last_write = self.count
            elif (graded or entry.graded_elsewhere) and self._is_others(entry):
                entry.last_write = self.count
                # A step of offloaded shards has dropped their gradients by now
                if entry.graded_elsewhere or entry.flat.storage.offloaded:
                    others.append(entry)
            self.graded.discard(entry.number)
        return others

    @staticmethod
    def _is_others(entry: Entry) -> bool:
        """Whether this rank owns no element of `entry`, and so never has a gradient of it."""
        a, b = entry.flat.local(entry)
        return a == b

    def all_of(self, entries: Iterable[Entry]) -> None:
        """Count a write to the masters of all `entries`."""
        self.count += 1
        for entry in entries:
            entry.last_write = self.count

    def refuse_if_computed_with(self, since: int) -> None:
        """Check the parameters upstream of the current autograd node. Called in a hook of a
        backward pass.

        Raises:
            RuntimeError: a parameter among them was overwritten after write number `since`.
        """
        written = {
            id(e.compute): e
            for e in self._entries
            if e.last_write > since and e.flat.overwritten_since(e.last_write)
        }
        node = torch._C._current_autograd_node()
        found = _leaves(node, written) if written and node is not None else []
        if found:
            others = f" and {len(found) - 1} others have" if len(found) > 1 else " has"
            raise RuntimeError(
                "backward() of a forward pass that ran before optimizer.step(), or before another"
                f" write to the parameters: {found[0]!r}{others} changed since, so the gradients"
                " would be wrong. Call backward() before step(), or run the forward pass again."
            )


class ForwardPass:
    """What a backward pass needs to know of its forward pass: the count of writes when it began."""

    __slots__ = ("_counters", "of_root", "open", "since", "task")

    def __init__(self, counters: WriteCounters) -> None:
        self._counters, self.since, self.task = counters, counters.count, -1
        # open: it has a graph that no backward pass has consumed. of_root: a pass of the whole
        # model
        self.open = self.of_root = False

    def backward_reached(self, whole: bool) -> None:
        """Check for writes when the backward pass reaches an output of the pass (`whole`) or of one
        unit in it. Once an output of the pass was checked, its units are not checked in that backward
        pass.

        Raises:
            RuntimeError: its parameters have been written to since the forward pass.
        """
        if self.since == self._counters.count:
            return
        task = torch._C._current_graph_task_id()
        if whole:
            self.task = task
        elif self.task == task:
            return
        with disable_torch_function():
            self._counters.refuse_if_computed_with(self.since)


def _leaves(start: Any, wanted: dict[int, Entry]) -> list[str]:
    """Return the names of the parameters in `wanted` (by the id of the whole parameter) that the
    graph upstream of `start` reaches.
    """
    found, seen, todo = [], {start}, [start]
    while todo:
        node = todo.pop()
        if (entry := wanted.get(id(getattr(node, "variable", None)))) is not None:
            found.append(entry.slot.name)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return sorted(found)
