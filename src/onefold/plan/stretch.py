"""The activities of a model with more or fewer of its blocks, from those of the model itself.

traced      ▁ ▂ ▃ ▄ █ ▄ ▃ ▂ ▁        a block more is a step more on both sides, and everything
two more    ▁ ▂ ▃ ▄ ▅ ▆ █ ▆ ▅ ▄ ▃ ▂ ▁    between the last block's two passes lies higher by it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onefold.plan.activity import Activity, Slot


def stretched(activity: Activity, blocks: Sequence[str], names: Sequence[str]) -> Activity:
    """`activity` as it would be with blocks `names` in the place of `blocks`; of equal number it is
    the same but for the names.

    A block further is as much higher as the last lies above the one two before it (checkpointing
    may alternate), half of that each. With fewer than three blocks nothing says how much a block
    keeps, so the saved bytes are shared out.
    """
    if len(blocks) == len(names):
        renamed = {
            _renamed(unit, blocks, names): nbytes for unit, nbytes in activity.movable.items()
        }
        return replace(
            activity,
            slots=tuple(replace(s, unit=_renamed(s.unit, blocks, names)) for s in activity.slots),
            movable=renamed,
        )
    index = {name: i for i, name in enumerate(blocks)}
    each = _each(activity, index)
    more = round((len(names) - len(blocks)) * each)
    runs = _runs(activity.slots, index)
    out: list[Slot] = []
    lift = 0
    done: set[str] = set()
    for block, slots in runs:
        if block is None:
            out += [_lifted(s, lift) for s in slots]
            continue
        phase = slots[0].phase
        forward = phase == "forward"
        first, last = (0, len(blocks) - 1) if forward else (len(blocks) - 1, 0)
        if block == first and phase not in done:
            done.add(phase)
            order = range(len(names)) if forward else reversed(range(len(names)))
            for i in order:
                source = _like(i, len(blocks))
                step = round((i - source) * each)
                out += [_lifted(replace(s, unit=names[i]), step) for s in _of(runs, source, phase)]
        if block == last:
            lift = more if forward else 0
    movable = {unit: nbytes for unit, nbytes in activity.movable.items() if unit not in index}
    movable |= {
        name: activity.movable.get(blocks[_like(i, len(blocks))], 0) for i, name in enumerate(names)
    }
    return replace(activity, slots=tuple(out), saved=activity.saved + more, movable=movable)


def _renamed(unit: str, blocks: Sequence[str], names: Sequence[str]) -> str:
    return names[blocks.index(unit)] if unit in blocks else unit


def _like(i: int, count: int) -> int:
    """The block whose slots block `i` has: itself, or one at the end whose number is as even."""
    return i if i < count else max(0, count - 1 - (i - (count - 1)) % 2) if count > 1 else 0


def _lifted(slot: Slot, by: int) -> Slot:
    return replace(slot, peak=max(slot.peak + by, slot.logits + slot.gradients)) if by else slot


def _runs(slots: Sequence[Slot], index: dict[str, int]) -> list[tuple[int | None, list[Slot]]]:
    """Stretches of slots of one block in one phase; None for what is no block."""
    runs: list[tuple[int | None, list[Slot]]] = []
    for slot in slots:
        block = index.get(slot.unit)
        if runs and runs[-1][0] == block and runs[-1][1][-1].phase == slot.phase:
            runs[-1][1].append(slot)
        else:
            runs.append((block, [slot]))
    return runs


def _of(runs: Sequence[tuple[int | None, list[Slot]]], block: int, phase: str) -> list[Slot]:
    return [s for at, slots in runs if at == block and slots[0].phase == phase for s in slots]


def _each(activity: Activity, index: dict[str, int]) -> float:
    """Bytes that one block keeps for backward."""
    peaks: dict[int, int] = {}
    for s in activity.slots:
        if s.phase == "forward" and s.unit in index:
            peaks[index[s.unit]] = max(peaks.get(index[s.unit], 0), s.peak)
    last = len(index) - 1
    if last >= 2 and {last, last - 2} <= set(peaks):
        return max(0.0, (peaks[last] - peaks[last - 2]) / 2)
    return max(0, activity.saved - activity.logits) / max(len(index), 1)
