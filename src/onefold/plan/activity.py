"""What a micro-batch keeps and computes, from a trace or from dimensions. Its slots correspond to
the engine's.

    slot      forward 0   forward 1   ...   backward 1   backward 0
    engine    ▒▒          ▒▒                ▒▒▒▒         ▒▒▒▒            plan/replay.py
    activity  ░           ░░          ░░░   ░░░          ░               here
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onefold.machine.kernels import Kernels
from onefold.offload.activations import SMALLEST
from onefold.plan.formulas import MicroBatchBytes, transformer_flops_per_token
from onefold.plan.shapes import ModelShape, Transformer, UnitShape
from onefold.tracing.trace import ActivationTrace


@dataclass(frozen=True)
class Slot:
    """Bytes at the highest moment while one unit runs. `logits` and `gradients` (that the engine
    has not taken over yet) are parts of `peak`.
    """

    unit: str
    phase: str
    peak: int
    logits: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Activity:
    """One micro-batch.

    Attributes:
        saved: bytes kept for the backward pass at its start, of which `logits` are logits.
        flops: of the matrix products of forward and backward, recomputation included.
        forward_flops: of the forward pass alone.
        kernels: what runs; None where only dimensions are known.
        movable: bytes of large saved tensors by unit, which the host may hold until the backward
            pass. largest: the bytes of the largest of them.
    """

    slots: tuple[Slot, ...]
    saved: int
    logits: int
    flops: float
    forward_flops: float
    source: str
    notes: tuple[str, ...] = ()
    kernels: Kernels | None = None
    movable: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_trace(cls, trace: ActivationTrace) -> Activity:
        """Take over a trace of the real module, span by span."""
        return cls(
            tuple(Slot(s.unit, s.phase, s.peak, s.logits, s.gradients) for s in trace.spans),
            trace.saved,
            trace.logits,
            flops=trace.forward_flops + trace.backward_flops,
            forward_flops=trace.forward_flops,
            source="traced",
            notes=trace.notes,
            kernels=trace.kernels,
            movable={u.name: u.movable for u in trace.units if u.movable},
            largest={u.name: u.largest for u in trace.units if u.movable},
        )

    @classmethod
    def from_dims(
        cls,
        model: ModelShape,
        dims: Transformer,
        micro_batch: int,
        seq: int,
        element_bytes: int,
        checkpointing: str,
        code: str = "",
    ) -> Activity:
        """Count from dimensions alone (`plan.formulas`), for models without code to trace.

        A block uses bytes beyond those that it keeps while it runs, and in the backward pass the
        gradient of its largest parameter. The loss casts the logits to fp32 and keeps their
        log-probabilities; in the backward pass the gradients of both are beside them: 12 bytes an
        entry. The gradient of a head that is tied to the embedding waits for the embedding's.

        Args:
            code: the family whose code will run, one of `formulas.CODES`; "" counts fused kernels.

        Raises:
            ValueError: a code that is not known.
        """
        size = MicroBatchBytes(dims, micro_batch, seq, element_bytes, code)
        blocks = [(block, keeps(i, checkpointing)) for i, block in enumerate(blocks_of(model))]
        repeated = {block.name for block, _ in blocks}
        others = [u for u in model.units if u.name not in repeated and u.parameters]
        recomputed = sum(not whole for _, whole in blocks) / max(len(blocks), 1)
        done, forward = _flops(model, dims, seq, size.tokens, recomputed)
        movable = {block.name: size.kept(whole) for block, whole in blocks}
        largest = {
            block.name: min(
                movable[block.name], size.tokens * max(dims.hidden, dims.ffn) * element_bytes
            )
            for block, _ in blocks
        }
        # Smaller tensors are not moved to the host
        large = size.tokens * dims.hidden * element_bytes >= SMALLEST
        return cls(
            (*_forward(blocks, size), *_backward(blocks, others, size)),
            size.before + sum(movable.values()) + size.behind + size.logits,
            size.logits,
            done,
            forward,
            "formula",
            movable=movable | {"(root)": size.logits} if large else {},
            largest=largest | {"(root)": size.logits} if large else {},
        )


def _forward(blocks: Sequence[tuple[UnitShape, bool]], size: MicroBatchBytes) -> Iterator[Slot]:
    """Yield the slots of a forward pass. Each block comes with whether it keeps everything."""
    held = size.before
    for block, whole in blocks:
        yield Slot(block.name, "forward", held + size.whole + size.in_hand())
        held += size.kept(whole)
    yield Slot("(root)", "forward", held + size.behind + size.first_logits, size.first_logits)


def _backward(
    blocks: Sequence[tuple[UnitShape, bool]], others: Sequence[UnitShape], size: MicroBatchBytes
) -> Iterator[Slot]:
    """Yield the slots of the backward pass: the last block first, then the `others`."""
    held = size.before + sum(size.kept(whole) for _, whole in blocks)
    # The log-probabilities, their gradients and the gradients of the logits
    logits = 3 * size.logits
    yield Slot("(root)", "backward", held + size.behind + logits, logits)
    for block, whole in reversed(blocks):
        largest = _largest(block) * size.element
        again = 0 if whole else size.whole
        beside = size.beside(largest)
        own = min(largest, again + beside) + size.shared
        yield Slot(block.name, "backward", held + again + beside + size.shared, 0, own)
        held -= size.kept(whole)
    for unit in others:
        own = _largest(unit) * size.element + size.shared
        yield Slot(unit.name, "backward", held + own, 0, own)


def _largest(unit: UnitShape) -> int:
    """Elements of the unit's largest parameter."""
    return max((p.numel for p in unit.parameters), default=0)


def _flops(
    model: ModelShape, dims: Transformer, seq: int, tokens: int, recomputed: float
) -> tuple[float, float]:
    """Return (FLOPs of all matrix products, of the forward pass's) where the share `recomputed` of
    the blocks runs again in the backward pass.
    """
    # A token reads one row of a table: model FLOPs count all rows, the products none
    tables = [p for u in model.units if u.looks_up_only for p in u.parameters]
    counted = sum((6 if p.trainable else 4) * p.numel for p in tables)
    whole = (flops_per_token(model, dims, seq) - counted) * tokens
    multiplied = model.active_numel - sum(p.numel for p in tables)
    forward = transformer_flops_per_token(multiplied, dims, seq) * tokens / 3
    return whole + recomputed * _recomputed(model, dims, seq) * tokens, forward


def flops_per_token(model: ModelShape, dims: Transformer | None, seq: int) -> float:
    """Return the model FLOPs of forward and backward. Frozen parameters have no gradients: 4 each
    instead of 6.
    """
    return transformer_flops_per_token(model.active_numel, dims, seq) - 2 * frozen_active(model)


def _recomputed(model: ModelShape, dims: Transformer, seq: int) -> float:
    """Return the FLOPs a token of the blocks' second forward passes.

    torch ends one as soon as it has everything that backward needs: before the last product of a
    block, except where a router weighs the result of that product.
    """
    repeated = {u.name for u in blocks_of(model)}
    inside = model.active_numel - sum(u.numel for u in model.units if u.name not in repeated)
    last = 2 * dims.layers * dims.ffn * dims.hidden if dims.experts <= 1 else 0
    return max(0.0, transformer_flops_per_token(inside, dims, seq) / 3 - last)


def frozen_active(model: ModelShape) -> int:
    """Count the frozen parameters that a token passes: of experts, only the chosen share."""
    if model.trainable == model.numel:
        return 0
    dims = model.transformer
    share = dims.active / dims.experts if dims and dims.experts > 1 else 1.0
    trained = (p for u in model.units for p in u.parameters if p.trainable)
    passed = sum(p.numel * (share if p.routed else 1.0) for p in trained)
    return max(0, model.active_numel - round(passed))


def keeps(index: int, checkpointing: str) -> bool:
    """Return whether a block keeps its activations. "selective" recomputes every second block, as
    `onefold train` does.
    """
    return checkpointing == "none" or (checkpointing == "selective" and index % 2 == 1)


#: The names of units that are tiles of a weight.
TILE = re.compile(r"\.tiles\.\d+$")


def blocks_of(model: ModelShape) -> list[UnitShape]:
    """Return the repeated units: the largest family whose names differ only in their numbers."""
    families: dict[str, list[UnitShape]] = {}
    for unit in model.units:
        if re.search(r"\d", unit.name) and not TILE.search(unit.name):
            families.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
    return max(families.values(), key=len, default=[])


def assumed_dims(model: ModelShape, seq: int) -> Transformer:
    """Return the dimensions of a decoder with this many parameters, 12·L·h²: heads of 128, and a
    feed-forward four times as wide.
    """
    layers = max(len(blocks_of(model)), 1)
    hidden = max(64, round(math.sqrt(model.numel / (12 * layers)) / 64) * 64)
    return Transformer(layers, hidden, max(1, hidden // 128), 4 * hidden, 50_304, seq)


def stretched(activity: Activity, blocks: Sequence[str], names: Sequence[str]) -> Activity:
    """Return `activity` with the blocks `names` instead of `blocks`. With as many blocks only names
    change.

        traced      ▁ ▂ ▃ ▄ █ ▄ ▃ ▂ ▁            each further block adds a step on both sides, and lifts
        two more    ▁ ▂ ▃ ▄ ▅ ▆ █ ▆ ▅ ▄ ▃ ▂ ▁    everything between its two passes by what it keeps

    A block keeps half of the difference between the peaks of the last block and of the one two
    before it (two, since checkpointing may alternate). With fewer than three blocks there is no
    such difference, and the saved bytes are divided among the blocks.
    """
    if len(blocks) == len(names):
        movable, largest = (
            {_renamed(unit, blocks, names): nbytes for unit, nbytes in of.items()}
            for of in (activity.movable, activity.largest)
        )
        return replace(
            activity,
            slots=tuple(replace(s, unit=_renamed(s.unit, blocks, names)) for s in activity.slots),
            movable=movable,
            largest=largest,
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
    movable, largest = (
        {unit: nbytes for unit, nbytes in of.items() if unit not in index}
        | {name: of.get(blocks[_like(i, len(blocks))], 0) for i, name in enumerate(names)}
        for of in (activity.movable, activity.largest)
    )
    saved = activity.saved + more
    return replace(activity, slots=tuple(out), saved=saved, movable=movable, largest=largest)


def _renamed(unit: str, blocks: Sequence[str], names: Sequence[str]) -> str:
    return names[blocks.index(unit)] if unit in blocks else unit


def _like(i: int, count: int) -> int:
    """Return the block whose slots block `i` takes: itself, or one of the last two, of the same
    parity.
    """
    return i if i < count else max(0, count - 1 - (i - (count - 1)) % 2) if count > 1 else 0


def _lifted(slot: Slot, by: int) -> Slot:
    return replace(slot, peak=max(slot.peak + by, slot.logits + slot.gradients)) if by else slot


def _runs(slots: Sequence[Slot], index: dict[str, int]) -> list[tuple[int | None, list[Slot]]]:
    """Return the runs of successive slots of one block in one phase; None stands for no block."""
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
    """Return the bytes that one block keeps for the backward pass."""
    peaks: dict[int, int] = {}
    for s in activity.slots:
        if s.phase == "forward" and s.unit in index:
            peaks[index[s.unit]] = max(peaks.get(index[s.unit], 0), s.peak)
    last = len(index) - 1
    if last >= 2 and {last, last - 2} <= set(peaks):
        return max(0.0, (peaks[last] - peaks[last - 2]) / 2)
    return max(0, activity.saved - activity.logits) / max(len(index), 1)
