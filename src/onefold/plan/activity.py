"""What a micro-batch keeps and computes, from a trace or from dimensions. Its slots correspond to
the engine's.

    slot      forward 0   forward 1   ...   backward 1   backward 0
    engine    ▒▒          ▒▒                ▒▒▒▒         ▒▒▒▒            plan/program.py
    activity  ░           ░░          ░░░   ░░░          ░               here

Activations that are on the host between the forward and the backward pass leave the slots and come
back, as in offload/activations.py: of the storages that autograd saves the large ones
(`Activity.movable`), the first saved first.

    unit        0       1       2       loss    2       1       0
    kept        a       a b     a b c   a b c   a b c   a b     a
    on the host         a       a b     a b c   a b     a                 as far as the budget allows
    device      a       b       c       ·       c       b       a         + copies on their way, + what is fetched ahead
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onefold.offload.activations import NEAR, SLAB, SMALLEST
from onefold.plan.degrees import ALONE, Degrees
from onefold.plan.formulas import MicroBatchBytes, transformer_flops_per_token
from onefold.plan.rank import Stage, local_numel, stages_of
from onefold.plan.shapes import ModelShape, Parameter, Transformer, blocks_of
from onefold.tracing.trace import Trace


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
        passes: FLOPs of matrix products, recomputation included, by unit and phase.
        kernels: what runs; None where only dimensions are known.
        movable: bytes of large saved tensors by unit, which the host may hold until the backward
            pass. largest: the bytes of the largest of them.
    """

    slots: tuple[Slot, ...]
    saved: int
    logits: int
    passes: Mapping[tuple[str, str], float]
    source: str
    notes: tuple[str, ...] = ()
    movable: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        return sum(self.passes.values())

    @classmethod
    def from_trace(cls, trace: Trace) -> Activity:
        """Take over a trace of the real module, span by span."""
        passes, movable, largest = Counter[tuple[str, str]](), Counter[str](), dict[str, int]()
        for s in trace.spans:
            passes[s.unit, s.phase] += s.flops
            if s.movable:
                movable[s.unit] += s.movable
                largest[s.unit] = max(largest.get(s.unit, 0), s.largest)
        return cls(
            tuple(Slot(s.unit, s.phase, s.peak, s.logits, s.gradients) for s in trace.spans),
            trace.saved,
            trace.logits,
            dict(passes),
            source="traced",
            notes=trace.notes,
            movable=movable,
            largest=largest,
        )

    @classmethod
    def from_dims(
        cls,
        model: ModelShape | Stage,
        dims: Transformer,
        micro_batch: int,
        seq: int,
        element: int,
        checkpointing: str,
        code: str = "",
        degrees: Degrees = ALONE,
        micro_batches: int = 1,
    ) -> Activity:
        """Count from dimensions alone (`plan.formulas`), for models without code to trace: what a rank
        keeps at its fullest of the micro-batches in flight, while one of them runs.

        A block uses bytes beyond those that it keeps while it runs, and in the backward pass the
        gradient of its largest parameter. The loss casts the logits to fp32 and keeps their
        log-probabilities; in the backward pass the gradients of both are beside them: 12 bytes an
        entry. The gradient of a head that is tied to the embedding waits for the embedding's.

        Args:
            model: a model, or what a stage of a pipeline has of it.
            element: bytes of an element of the compute dtype.
            code: the family whose code will run, one of `formulas.CODES`; "" counts fused kernels.
            micro_batches: of a step.

        Raises:
            ValueError: a code that is not known.
        """
        stage = model if isinstance(model, Stage) else stages_of(model, degrees)[0]
        local = local_dims(dims, degrees)
        size = MicroBatchBytes(local, micro_batch, seq // degrees.cp, element, code)
        kept = [keeps(i, checkpointing) for i in range(stage.blocks)]
        blocks, parts = list(zip(stage.names, kept, strict=True)), len(stage.chunks)
        largest = {
            u.name: max((local_numel(p, degrees) for p in u.parameters), default=0) * element
            for u in stage.units
        }
        chunk = sum(size.kept(whole) for whole in kept) / parts
        alone = degrees.pp == 1 or (stage.last and degrees.chunks == 1)
        crossing = 0 if alone else size.tokens * local.hidden * element
        before = size.before if stage.first else 16 * size.tokens
        flights = in_flight(degrees, stage.index, micro_batches)
        others = (flights - 1) * (chunk + crossing + before / parts)
        at = others + before + crossing
        extra = _in_hand(dims, local, degrees, size.tokens, element)
        shared = size.shared if stage.first and stage.last else 0
        slots = []
        for name, whole in blocks:
            slots.append(Slot(name, "forward", round(at + size.whole + size.in_hand() + extra)))
            at += size.kept(whole) / parts
        if stage.last:
            first, logits = size.first_logits, 3 * size.logits
            slots.append(Slot("(root)", "forward", round(at + size.behind + first), first))
            # The log-probabilities, their gradients and the gradients of the logits
            slots.append(Slot("(root)", "backward", round(at + size.behind + logits), logits))
        for name, whole in reversed(blocks):
            again, beside = 0 if whole else size.whole, size.beside(largest[name])
            own = min(largest[name], again + beside) + shared
            peak = round(at + again + beside + shared + extra)
            slots.append(Slot(name, "backward", peak, 0, round(own)))
            at -= size.kept(whole) / parts
        for unit in stage.units:
            if unit.name not in stage.names and unit.parameters:
                own = largest[unit.name] + shared
                slots.append(Slot(unit.name, "backward", round(at + own), 0, own))
        movable = {name: size.kept(whole) for name, whole in blocks}
        wide = size.tokens * max(local.hidden, local.ffn) * element
        # Smaller tensors are not moved to the host
        large = size.tokens * local.hidden * element >= SMALLEST
        last = size.logits if stage.last else 0
        saved = others + before + parts * chunk + size.behind + last
        of_large = {name: min(n, wide) for name, n in movable.items()}
        return cls(
            tuple(slots),
            round(saved),
            last,
            _passes(stage, dims, degrees, micro_batch * seq / degrees.cp, seq, kept),
            "formula",
            movable=movable | {"(root)": last} if large else {},
            largest=of_large | {"(root)": last} if large else {},
        )


def local_dims(dims: Transformer, degrees: Degrees) -> Transformer:
    """Return the widths of a block on one rank. With sequence parallelism what lies between its
    layers is divided too: that is counted as a narrower block.
    """
    t = degrees.tp
    if t == 1:
        return dims
    between = t if degrees.sequence_divided else 1
    whole = dims.experts > 1 and not degrees.expert_tp and not degrees.sequence_divided
    return replace(
        dims,
        hidden=-(-dims.hidden // between),
        heads=dims.heads // t,
        kv_heads=(dims.kv_heads or dims.heads) // t,
        head_dim=dims.head,
        ffn=dims.ffn if whole else dims.ffn // t,
        vocab=-(-dims.vocab // t),
    )


def _in_hand(
    dims: Transformer, local: Transformer, degrees: Degrees, tokens: int, element: int
) -> float:
    """Bytes that a block uses while it runs only because of the axes: its whole input under sequence
    parallelism, keys and values of a whole sample, tokens on their way to and from experts.
    """
    out = tokens * (dims.hidden - local.hidden) * element if degrees.sequence_divided else 0.0
    out += tokens * (degrees.cp - 1) * (local.k + local.v) * element
    return out + (tokens * dims.active * local.hidden * element if degrees.ep > 1 else 0)


def in_flight(degrees: Degrees, index: int, micro_batches: int) -> int:
    """Return how many forward passes of a chunk stage `index` holds at most, before their backward
    passes: of interleaved stages Korthikanti et al. 2022, section 4.2.3.
    """
    p, v = degrees.pp, degrees.chunks
    if degrees.schedule == "gpipe":
        return micro_batches
    held = p - index if v == 1 else 2 * (p - index - 1) + (v - 1) * p + 1
    return min(held, micro_batches * v)


def _passes(
    stage: Stage, dims: Transformer, degrees: Degrees, tokens: float, seq: int, kept: Sequence[bool]
) -> dict[tuple[str, str], float]:
    """Return a rank's FLOPs in one micro-batch, by unit and phase.

    torch ends a recomputed block as soon as it has everything that backward needs: before the last
    product of a block, except where a router weighs the result of that product.
    """
    out: dict[tuple[str, str], float] = {}
    recomputed = {name for name, whole in zip(stage.names, kept, strict=True) if not whole}
    last = 2 * dims.ffn * dims.hidden if dims.experts <= 1 else 0
    share = dims.active / dims.experts
    for unit in stage.units:
        used = [
            (p.numel * (share if p.routed else 1), p.trainable)
            for p in unit.parameters
            if not unit.looks_up_only and (not p.looked_up or _is_head(p, stage, dims))
        ]
        forward = 2 * sum(n for n, _ in used)
        if unit.name in stage.names:
            forward += 2 * (dims.q + dims.out) * seq
        backward = 2 * forward - 2 * sum(n for n, trained in used if not trained)
        backward += max(0.0, forward - last) if unit.name in recomputed else 0
        out[unit.name, "forward"] = forward * tokens / degrees.tp
        out[unit.name, "backward"] = backward * tokens / degrees.tp
    return out


def _is_head(p: Parameter, stage: Stage, dims: Transformer) -> bool:
    """Whether an embedding's matrix is the head of this stage too."""
    return dims.tied and stage.last and (not stage.tied or p.name.startswith("tied."))


def flops_per_token(model: ModelShape, dims: Transformer | None, seq: int) -> float:
    """Return the model FLOPs of forward and backward. Frozen parameters have no gradients: 4 each
    instead of 6.
    """
    return transformer_flops_per_token(model.active_numel, dims, seq) - 2 * frozen_active(model)


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


def assumed_dims(model: ModelShape, seq: int) -> Transformer:
    """Return the dimensions of a decoder with this many parameters, 12·L·h²: heads of 128, and a
    feed-forward four times as wide.
    """
    layers = max(len(blocks_of(model.units)), 1)
    hidden = max(64, round(math.sqrt(model.numel / (12 * layers)) / 64) * 64)
    return Transformer(layers, hidden, max(1, hidden // 128), 4 * hidden, 50_304, seq)


@dataclass(frozen=True)
class OnHost:
    """An activity of which the host holds a part.

    Attributes:
        activity: what is left on the device.
        moved: bytes of a micro-batch that go down and come up again, by unit.
        nbytes: bytes of host memory for them, in whole slabs.
    """

    activity: Activity
    moved: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0


def on_host(activity: Activity, budget: int, shared: bool) -> OnHost:
    """Move up to `budget` bytes of an activity to the host.

    Args:
        shared: the device is a CPU: copies to the host finish at once.
    """
    near = down = min(NEAR, budget // 8)
    order = _in_order(activity.slots)
    gone: dict[str, int] = {}
    for unit in order:
        gone[unit] = min(activity.movable.get(unit, 0), budget - sum(gone.values()))
    total = sum(gone.values())
    slots, seen = [], dict.fromkeys(order, 0)
    last = {slot.unit: i for i, slot in enumerate(activity.slots) if slot.phase == "forward"}
    for i, slot in enumerate(activity.slots):
        if slot.phase == "forward":  # saved by other units so far
            saved = sum(seen.values())
            seen[slot.unit] = gone[slot.unit] if i == last[slot.unit] else 0
            # Copies in flight hold `near` bytes, or twice the largest of them
            large = min(activity.largest.get(slot.unit, 0), gone[slot.unit])
            down = max(down, min(2 * large, down + large))
            waits = 0 if shared else down
        else:  # saved before this unit; what later units saved has been read
            if slot.unit in order:
                del order[order.index(slot.unit) :]
            saved = sum(gone[unit] for unit in order)
            # What is fetched ahead: `near` bytes, or one copy
            waits = max([near, *(activity.largest.get(unit, 0) for unit in order[-1:])])
        left = slot.peak - saved + min(waits, saved)
        slots.append(replace(slot, peak=max(left, slot.logits + slot.gradients)))
    slabs = min(budget, -(-total // SLAB) * SLAB)
    return OnHost(replace(activity, slots=tuple(slots)), gone, slabs)


def _in_order(slots: Sequence[Slot]) -> list[str]:
    """Return the units in the order in which their forward passes end. A unit that runs again (a
    root with the loss) is where it runs last.
    """
    order = list(dict.fromkeys(s.unit for s in reversed(slots) if s.phase == "forward"))
    return order[::-1]


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
            passes={
                (_renamed(unit, blocks, names), phase): n
                for (unit, phase), n in activity.passes.items()
            },
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
    passes = {(unit, phase): n for (unit, phase), n in activity.passes.items() if unit not in index}
    for i, name in enumerate(names):
        like = blocks[_like(i, len(blocks))]
        passes |= {(name, p): activity.passes.get((like, p), 0) for p in ("forward", "backward")}
    return replace(
        activity, slots=tuple(out), saved=saved, passes=passes, movable=movable, largest=largest
    )


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
