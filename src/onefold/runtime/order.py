"""The order of units: foreseen from how they are registered, then as all ranks have seen it; and walks
along it. See [Note: every rank joins every gather] in runtime/gather.py.
"""

from __future__ import annotations

from onefold.runtime.unit import Unit


class Cursor:
    """A walk along an agreed order of unit indices.

    Units before `at` have been gathered, some of them ahead; those before `used` have had their
    turn.
    """

    def __init__(self, order: list[int]) -> None:
        self.order, self.at, self.used = order, 0, 0

    def reach(self, index: int) -> list[int]:
        """Walk to just behind the next `index`; the indices passed over. Stay if it does not
        come.
        """
        try:
            there = self.order.index(index, self.at)
        except ValueError:
            return []
        passed, self.at = self.order[self.at : there], there + 1
        return passed

    def use(self, index: int) -> list[int]:
        """The turn of `index`, which has been gathered; the indices that had theirs meanwhile and
        did not take it. None if the order does not have it here.
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
    """The order in which a backward pass first comes to units registered in this order: a unit
    around others before them (its output comes last, and with it its gradient first), the others
    from the last to the first.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].encloses(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [index for head, *rest in reversed(groups) for index in (head.index, *backwards(rest))]
