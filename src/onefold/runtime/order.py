"""The orders in which all ranks gather and reduce, and when a reduction is waited for. `gather.py` and
`reduce.py` carry it out.

    forward    use 0   use 1   use 2          backward  use 2   use 1   use 0    end
    gathers    g0 g1   g2      ·              gathers   g1      g0      ·
    memory     [0 ]1   [1 ]2   [2 ]     2     memory    [2 ]1   [1 ]0   [0 ]              (prefetch = 1)
                                              reduced   [r2 .......][r1 ....]  [r0 ...]   (in_flight = 2)

| order of      | at first                                  | once all ranks have seen the same           |
|---------------|-------------------------------------------|---------------------------------------------|
| forward       | the order in which units are registered   | the order of use in the forward pass        |
| backward      | the reverse, enclosing units first        | the order of use in the backward pass       |
| reductions    | the reverse                               | the order in which units had all gradients  |

The ranks compare what they saw at the end of each backward pass (runtime/agree.py). Units that a
step did not use keep a place in the orders (`Order.learn`).

| what                  | goes as far as                                                                           |
|-----------------------|------------------------------------------------------------------------------------------|
| gathers ahead of use  | `Recipe.units_ahead` units, and further ones up to SMALL_TRAFFIC bytes together; once one |
|                       | is ahead, never more than LARGE_TRAFFIC bytes                                            |
| reads from a disk     | one unit further                                                                         |
| reductions in flight  | `in_flight` of them, and further ones up to SMALL_TRAFFIC bytes together; of large units  |
|                       | LARGE_TRAFFIC bytes, sent and received (`is_due`)                                        |
| the host before the   | two units of a pass (`RunAhead` in comm/pending.py)                                      |
| device                |                                                                                          |

[Note: every rank joins every gather] Both passes walk an agreed order of units. A rank that takes
another branch and passes over a unit still joins the gather of that unit, and drops the result. So
ranks may use different units, as long as each uses its units in the agreed order. A unit that the
order does not foresee is gathered on demand, and then all ranks must gather it at the same point.

[Note: last units stay] The backward pass begins with the unit that the forward pass used last and
the units that enclose it. These stay gathered between the two passes. The order seen in the first
step tells which units they are (`last_units`), so the first step itself still releases them. Every
later pass over the whole model that records gradients keeps all of them on every rank, including
those that a rank did not use. They are released together, at points that every rank passes: at the
next forward pass, before an optimizer steps, at the end of any backward pass, and when masters are
written to (which all ranks do alike). So every rank knows what the others hold, and all ranks
gather in the same order. They are also released when the whole autograd graph of the pass is freed,
because no backward pass can follow then. Freeing a part of the graph releases nothing: ranks may
drop different outputs.

[Note: reductions keep one order] Units are reduced in an order that all ranks agree on. A unit that
is ready early waits for those before it. A unit that this rank did not use takes part with zeros:

- if its module was not called, as soon as those before it are launched;
- if it was called and the backward pass goes past it, from then on (`Reducer.passed_over`);
- else at the end of the backward pass (`Reducer.launch_rest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.runtime.flat import Unit


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

    def rest(self) -> list[Unit]:
        """Walk to the end, and return the units that come until then."""
        rest, self.at = self.walk[self.at :], len(self.walk)
        return rest

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


def backwards(units: Sequence[Unit]) -> list[Unit]:
    """Return the order in which a backward pass first comes to units that a forward pass used in the
    order of `units`. It goes from the last to the first. A unit that encloses others comes before
    them: its output is computed last, so its gradient comes first.
    """
    groups: list[list[Unit]] = []
    for unit in units:
        if groups and groups[-1][0].encloses(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [unit for head, *rest in reversed(groups) for unit in (head, *backwards(rest))]


def last_units(forward: Sequence[Unit], backward: Sequence[Unit]) -> set[Unit]:
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


# -- when a reduction is due -----------------------------------------------------------------------
#
# Of reductions with a `unit`, `sent_bytes` and `is_last` (they are on their last hop), the oldest
# first. What is due depends on the launches alone, not on when a rank was ready. So all ranks start
# next hops in the same order among their launches. Backends without tags need that.


def is_due(flying: Sequence[Any], in_flight: int) -> bool:
    """Whether to wait for the oldest reduction: too many are in flight, in number or in bytes, or it
    has a further hop and another unit has been launched since.
    """
    if len(flying) > in_flight:
        return not in_flight or sum([r.sent_bytes for r in flying]) > SMALL_TRAFFIC
    if len(flying) < 2 or flying[0].unit == flying[-1].unit:
        return False
    return not flying[0].is_last or are_large(flying)


def are_large(flying: Sequence[Any]) -> bool:
    """Whether reductions of several units are in flight, with more than LARGE_TRAFFIC bytes. A small
    unit that follows a large one (a norm behind a head) is no reason to wait for that one.
    """
    if len(flying) < 2 or 2 * sum([r.sent_bytes for r in flying]) <= LARGE_TRAFFIC:
        return False
    newest = sum([r.sent_bytes for r in flying if r.unit == flying[-1].unit])
    return bool(flying[0].unit != flying[-1].unit) and newest > SMALL_TRAFFIC
