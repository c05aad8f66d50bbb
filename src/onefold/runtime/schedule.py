"""The schedule: the order in which all ranks gather and reduce, how far ahead they go, and when a
reduction is waited for. `gather.py` and `reduce.py` carry it out.

    forward    use 0   use 1   use 2          backward  use 2   use 1   use 0    end
    gathers    g0 g1   g2      ·              gathers   g1      g0      ·
    memory     [0 ]1   [1 ]2   [2 ]     2     memory    [2 ]1   [1 ]0   [0 ]              (prefetch = 1)
                                              reduced   [r2 .......][r1 ....]  [r0 ...]   (in_flight = 2)

| order      | at first                                  | once all ranks have seen the same           |
|------------|-------------------------------------------|---------------------------------------------|
| `forward`  | the order in which units are registered   | the order of use in the forward pass        |
| `backward` | the reverse, enclosing units first        | the order of use in the backward pass       |
| `reduces`  | the reverse                               | the order in which units had all gradients  |

The ranks compare what they saw at the end of each backward pass (runtime/backward.py). Units that a
step did not use keep a place in the orders (`with_missing`, `with_unseen`).

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

from collections.abc import Iterator, Sequence
from typing import Any

from onefold.recipe import Recipe
from onefold.recipe.core import LARGE_TRAFFIC, SMALL_TRAFFIC
from onefold.runtime.unit import Unit


class Schedule:
    """The schedule of one engine.

    Attributes:
        forward, backward, reduces: the agreed orders, of the indices of units.
        gathers_agreed, reduces_agreed: all ranks have seen these orders.
        last: the units that stay gathered between the passes. See [Note: last units stay].
        forward_seen, backward_seen: the units that this rank has used in the pass under way, or the
            last one. reduces_seen: those that had all their gradients.
        forward_walk, backward_walk: of the passes under way; None where units are gathered on
            demand.
        held_back: `up_to` has put off a unit.
        next_reduce: how many units of `reduces` were launched in this backward pass.
    """

    def __init__(self, units: Sequence[Unit], recipe: Recipe, two_levels: bool) -> None:
        self.units, self.recipe = units, recipe
        self.sharded = [u for u in units if not u.resident]
        self.forward = [u.index for u in self.sharded]
        self.backward = backwards(self.sharded)
        self.reduces = [u.index for u in units][::-1]
        self.gathers_agreed = self.reduces_agreed = False
        self.last: frozenset[int] = frozenset()
        self.forward_seen: list[int] = []
        self.backward_seen: list[int] = []
        self.reduces_seen: list[int] = []
        self.forward_walk: Walk | None = None
        self.backward_walk: Walk | None = None
        self.held_back = False
        self.next_reduce = 0
        self._ahead = recipe.units_ahead(two_levels)
        self._reads_ahead = any(f.storage.reads_ahead for u in self.sharded for f in u.flats)
        self._in_flight = recipe.in_flight if recipe.overlap else 0

    # -- gathers -----------------------------------------------------------------------------------

    def begin_forward(self, over_model: bool) -> None:
        self.forward_walk = Walk(self.forward) if over_model else None
        self.forward_seen = []

    def begin_backward(self) -> None:
        self.backward_seen, self.held_back, self.backward_walk = [], False, None

    def foresee_backward(self, over_model: bool) -> None:
        """Prepare the walk of this backward pass, whose forward pass was one `over_model`, or else
        over a part of it.
        """
        # Units that every rank still holds need no gather and are not in the walk. The last units
        # are in it: if the pass skips one of them, `Gatherer.acquire` has to notice, since their
        # reduction waits for that.
        order = [
            index
            for index in self.backward
            if self.units[index].ungathered or self.units[index].leases.awaiting_backward
        ]
        self.backward_walk = walk = Walk(order) if over_model else None
        if walk is not None and self.gathers_agreed:
            # A re-entrant checkpoint may have recomputed before the first gradient came. Every rank
            # gathered its units on demand and has released them: they are not to be joined
            for index in self.backward_seen:
                walk.reach(index)
                walk.use(index)

    def ahead(self, walk: Walk, waiting: Sequence[Unit]) -> Iterator[Unit]:
        """Walk on, and yield the units to gather ahead of their use. `waiting`: the units that are
        gathered and not used yet.
        """
        ahead, nbytes = len(waiting), sum(u.gathered_bytes for u in waiting)
        while self._ahead and (index := walk.next()) is not None:
            unit = self.units[index]
            if unit.leases.awaiting_backward:  # gathered, and counted in `waiting`
                walk.at += 1
                continue
            nbytes += unit.gathered_bytes
            if ahead >= self._ahead and nbytes > SMALL_TRAFFIC:
                break
            if ahead and nbytes > LARGE_TRAFFIC:
                break
            walk.at += 1
            if unit.ungathered:
                yield unit
                ahead += 1

    def read_ahead(self, walk: Walk) -> list[Unit]:
        """Return the unit to read from a disk, which is slower than the wire: one further than those
        gathered ahead.
        """
        if not (self._ahead and self._reads_ahead):
            return []
        return [self.units[index] for index in walk.order[walk.at : walk.at + 1]]

    def up_to(self, unit: Unit) -> list[Unit] | None:
        """Return the units to join so that this backward pass, which does not use `unit`, has
        passed it.

        Returns None if this rank has yet to use another unit that comes before it in the order.
        Joining goes through the order, so that other unit would be joined too, and dropped before
        its use. This happens behind frozen units: they have no gradient that the reductions wait
        for, so reductions get ahead of the pass.
        """
        walk = self.backward_walk
        if walk is None or unit.index not in walk.order[walk.at :]:
            return []
        there = walk.order.index(unit.index, walk.at)
        before = [self.units[index] for index in walk.order[walk.at : there]]
        if any(u.calls and u.index not in self.backward_seen for u in before):
            self.held_back = True
            return None
        walk.reach(unit.index)
        return [*before, unit]

    def rest(self, walk: Walk | None) -> list[Unit]:
        """Walk to the end, and return the units that come until then."""
        return [self.units[index] for index in walk.rest()] if walk is not None else []

    # -- reductions --------------------------------------------------------------------------------

    def begin_reduces(self) -> None:
        self.next_reduce, self.reduces_seen = 0, []

    def next_to_reduce(self) -> Unit | None:
        """Return the unit that is to be launched next; None if all were."""
        if self.next_reduce < len(self.reduces):
            return self.units[self.reduces[self.next_reduce]]
        return None

    def is_due(self, in_flight: Sequence[Any]) -> bool:
        return is_due(in_flight, self._in_flight)

    def next_hop_is_due(self, in_flight: Sequence[Any]) -> bool:
        """Whether to wait for the oldest of the reductions that are past their first hop."""
        return len(in_flight) > self._in_flight or are_large(in_flight)

    # -- what all ranks have seen ------------------------------------------------------------------

    def seen(self) -> tuple[list[int], list[int], list[int]]:
        """Return the three orders that this rank has seen in this step."""
        return self.forward_seen, self.backward_seen, self.reduces_seen

    @property
    def agreed(self) -> bool:
        return self.reduces_agreed and (self.gathers_agreed or not self.sharded)

    def agree(self, gathered: set[int]) -> None:
        """Take what this rank has seen, as all ranks have, for the order of the next steps. Units
        that were not seen keep a place in it: a later step may use them.

        `gathered`: the units that any rank has gathered in the backward pass.
        """
        if self.forward_seen:
            # Units used in forward whose backward reads no parameter
            needless = set(self.forward_seen) - gathered
            self.forward = with_missing(self.forward_seen, self.forward)
            unseen = set(self.backward) - needless - set(self.backward_seen)
            self.backward = with_unseen(self.backward_seen, unseen, self.forward, self.units)
            self.gathers_agreed = True
            if self.recipe.reshard_after_forward:
                forward, backward = (
                    [self.units[i] for i in seen]
                    for seen in (self.forward_seen, self.backward_seen)
                )
                self.last = frozenset(u.index for u in last_units(forward, backward))
        if self.reduces_seen:
            self.reduces = with_missing(self.reduces_seen, self.reduces)
            self.reduces_agreed = True


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


# -- orders ----------------------------------------------------------------------------------------


class Walk:
    """A walk along an agreed order of unit indices.

    Units before position `at` have been gathered, some of them ahead of use. Units before position
    `used` have been used, or passed over.
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

    These are the last unit of the forward pass and the units that enclose it, without those that
    the forward pass uses several times, since ranks may be at different uses of them.
    """
    last, found = forward[-1], []
    for unit in backward:
        if not (unit is last or unit.encloses(last)):
            break
        if sum(used is unit for used in forward) == 1:
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
    seen: list[int], unseen: set[int], forward: list[int], units: Sequence[Unit]
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
