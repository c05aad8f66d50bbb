"""The order of units, and walks along it. The order is foreseen from how units are registered, and
later the one that all ranks have seen. See [Note: every rank joins every gather] in
runtime/gather.py.
"""

from __future__ import annotations

from onefold.runtime.unit import Unit


class Cursor:
    """A walk along an agreed order of unit indices.

    Units before position `at` have been gathered, some of them ahead of use. Units before position
    `used` have had their turn.
    """

    def __init__(self, order: list[int]) -> None:
        self.order, self.at, self.used = order, 0, 0

    def reach(self, index: int) -> list[int]:
        """Walk to the position after the next `index`, and return the indices passed over. Stay if
        `index` does not come any more.
        """
        try:
            there = self.order.index(index, self.at)
        except ValueError:
            return []
        passed, self.at = self.order[self.at : there], there + 1
        return passed

    def use(self, index: int) -> list[int]:
        """Note that `index`, which has been gathered, is used now. Returns the indices that had
        their turn before it and were not used; an empty list if the order does not have `index`
        here.
        """
        if index not in self.order[self.used : self.at]:
            return []
        there = self.order.index(index, self.used)
        skipped, self.used = self.order[self.used : there], there + 1
        return skipped

    def next(self) -> int | None:
        return self.order[self.at] if self.at < len(self.order) else None

    def rest(self) -> list[int]:
        rest, self.at = self.order[self.at :], len(self.order)
        return rest


def backwards(units: list[Unit]) -> list[int]:
    """Return the order in which a backward pass first comes to units that were registered in the
    order of `units`. It goes from the last to the first. A unit that encloses others comes before
    them: its output is computed last, so its gradient comes first.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].encloses(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [index for head, *rest in reversed(groups) for index in (head.index, *backwards(rest))]
