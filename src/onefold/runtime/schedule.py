"""The agreed order of units, and walks along it.

    first step     foreseen from the order in which units are registered (`backwards`)
    afterwards     the order that all ranks have seen; `runtime/backward.py` compares it among the ranks at the
                   end of each backward pass, and completes it by the units that were not used
                   (`with_missing`, `with_unseen`)

See [Note: every rank joins every gather] in runtime/gather.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from onefold.runtime.unit import Unit


class Walk:
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


def last_units(forward: Sequence[Unit], backward: Sequence[Unit]) -> list[Unit]:
    """Return the units that a forward pass uses last and its backward pass first, with no other
    unit in between. `forward` and `backward` are units in the order of use.

    These are the last unit of the forward pass and the units that enclose it. Two kinds are left
    out: tiles, which are small so that only one is held at a time, and units that the forward pass
    uses several times, since ranks may be at different uses of them.
    """
    last, found = forward[-1], []
    for unit in backward:
        if not (unit is last or unit.encloses(last)):
            break
        if not unit.tile and sum(used is unit for used in forward) == 1:
            found.append(unit)
    return found


def with_missing(seen: list[int], order: list[int]) -> list[int]:
    """Return `seen` with the units that only `order` has, each put after its predecessor there."""
    out, known = list(seen), set(seen)
    for at, index in enumerate(order):
        if index not in known:
            before = order[at - 1] if at else None
            out.insert(out.index(before) + 1 if before is not None else 0, index)
            known.add(index)
    return out


def with_unseen(
    seen: list[int], unseen: set[int], forward: list[int], units: list[Unit]
) -> list[int]:
    """Return the backward order `seen` with the `unseen` units in the places where a pass that uses
    them will reach them.

    That is ahead of the units that the forward pass uses earlier. Units that enclose the unseen one
    do not count, since a backward pass reaches these both first and last.
    """
    out, at = list(seen), {index: n for n, index in enumerate(forward)}
    for index in sorted(unseen, key=lambda i: -at[i]):
        earlier = (
            n
            for n, other in enumerate(out)
            if at[other] < at[index] and not units[other].encloses(units[index])
        )
        out.insert(next(earlier, len(out)), index)
    return out
