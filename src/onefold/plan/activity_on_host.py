"""Activations on the host between the forward and the backward pass: what leaves the slots of an
`Activity`, and what comes back.

    unit        0       1       2       loss    2       1       0
    kept        a       a b     a b c   a b c   a b c   a b     a
    on the host         a       a b     a b c   a b     a                 as far as the budget goes
    device      a       b       c       ·       c       b       a         + copies on their way, + what comes up ahead

It mirrors offload/activations.py: storages that autograd saves go down, large ones only
(`Activity.movable`), the first saved first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.offload.activations import NEAR
from onefold.offload.arena import SLAB
from onefold.plan.activity import Activity, Slot
from onefold.plan.beyond import Carried


@dataclass(frozen=True)
class OnHost:
    """An activity with some of it on the host.

    Attributes:
        activity: what is left on the device. moved: bytes of a micro-batch that go down and come up
            again.
        nbytes: of host memory that are taken for it, in whole slabs.
    """

    activity: Activity
    moved: int = 0
    nbytes: int = 0

    def carried(self, micro_batches: int) -> tuple[Carried, ...]:
        """What a step of so many micro-batches moves."""
        total = self.moved * micro_batches
        return (
            (Carried("down", total, "forward"), Carried("up", total, "backward")) if total else ()
        )


def on_host(activity: Activity, budget: int, shared: bool) -> OnHost:
    """`activity` with up to `budget` bytes of it on the host.

    Args:
        shared: the device is a CPU: a copy is done when the call returns, so that none is on its
            way down.
    """
    near = min(NEAR, budget // 8)
    order = _in_order(activity.slots)
    gone: dict[str, int] = {}
    for unit in order:
        gone[unit] = min(activity.movable.get(unit, 0), budget - sum(gone.values()))
    total = sum(gone.values())
    slots, seen = [], dict.fromkeys(order, 0)
    last = {slot.unit: i for i, slot in enumerate(activity.slots) if slot.phase == "forward"}
    for i, slot in enumerate(activity.slots):
        if slot.phase == "forward":  # what other units saved so far
            away = sum(seen.values())
            seen[slot.unit] = gone[slot.unit] if i == last[slot.unit] else 0
            waits = 0 if shared else near
        else:  # what was saved before this unit; what was saved behind it has been read
            if slot.unit in order:
                del order[order.index(slot.unit) :]
            away = sum(gone[unit] for unit in order)
            waits = near
        slots.append(
            replace(
                slot, peak=max(slot.peak - away + min(waits, away), slot.logits + slot.gradients)
            )
        )
    slabs = min(budget, -(-total // SLAB) * SLAB)
    return OnHost(replace(activity, slots=tuple(slots)), total, slabs)


def _in_order(slots: Sequence[Slot]) -> list[str]:
    """Units in the order in which their forward passes end: one that runs again later (a root with
    the loss) is where it runs last.
    """
    order = list(dict.fromkeys(s.unit for s in reversed(slots) if s.phase == "forward"))
    return order[::-1]
