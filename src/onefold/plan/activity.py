"""What a micro-batch keeps and computes, in slots that line up with the engine's: from a trace, or
from dimensions.

    slot      forward 0   forward 1   ...   backward 1   backward 0
    engine    ▒▒          ▒▒                ▒▒▒▒         ▒▒▒▒            plan/replay.py
    activity  ░           ░░          ░░░   ░░░          ░               here
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onefold.doctor.kernels import Kernels
from onefold.offload.activations import SMALLEST
from onefold.plan.formulas import (
    beside_gradient,
    block_bytes,
    held_before,
    in_hand,
    kept_behind,
    kept_beyond,
    transformer_flops_per_token,
)
from onefold.plan.shapes import ModelShape, Transformer, UnitShape
from onefold.tracing.trace import ActivationTrace


@dataclass(frozen=True)
class Slot:
    """While one unit runs: bytes at the largest sum, and how much of them are logits, and gradients
    not yet handed over.
    """

    unit: str
    phase: str
    peak: int
    logits: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Activity:
    """One micro-batch. `flops` are matrix products of forward and backward, recomputation included;
    `forward_flops` of forward alone; `kernels` is what runs, None where only dimensions are known;
    `movable` are the bytes of large saved tensors by unit, which may go to the host until the
    backward pass.
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

    @classmethod
    def from_trace(cls, trace: ActivationTrace) -> Activity:
        """What a trace of the real module says, span by span."""
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
        """From dimensions alone (`plan.formulas`): for models without code at hand.

        A block keeps A bytes; while it runs it has W in hand, and in backward the gradient of its
        largest parameter. The loss takes the logits to fp32 and keeps their log-probabilities; in
        backward both their gradients stand beside them: 12 bytes an entry. A head that is tied to
        the embedding has a gradient that waits for the embedding's.

        Args:
            code: the family whose code will run, as `formulas.CODES` has them; "" counts fused
                kernels.

        Raises:
            ValueError: a code that is not known.
        """
        size = _Sizes(dims, micro_batch, seq, element_bytes, code)
        blocks = [(block, _kept(i, checkpointing)) for i, block in enumerate(blocks_of(model))]
        repeated = {block.name for block, _ in blocks}
        others = [u for u in model.units if u.name not in repeated and u.parameters]
        recomputed = sum(not whole for _, whole in blocks) / max(len(blocks), 1)
        done, forward = _flops(model, dims, seq, size.tokens, recomputed)
        movable = {block.name: size.kept(whole) for block, whole in blocks}
        # Else each of a block's tensors is too small to be worth moving
        large = size.tokens * dims.hidden * element_bytes >= SMALLEST
        return cls(
            (*_forward(blocks, size), *_backward(blocks, others, size)),
            size.before + sum(movable.values()) + size.behind + size.logits,
            size.logits,
            done,
            forward,
            "formula",
            movable=movable | {"(root)": size.logits} if large else {},
        )


@dataclass(frozen=True)
class _Sizes:
    """What the formulas say of one micro-batch, in bytes."""

    dims: Transformer
    micro_batch: int
    seq: int
    element: int
    code: str

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq

    @cached_property
    def whole(self) -> int:
        """What a block keeps for its backward pass."""
        own = block_bytes(self.dims, self.micro_batch, self.seq, element_bytes=self.element)
        return int(own) + self.tokens * kept_beyond(self.code, self.dims, self.seq, self.element)

    @cached_property
    def point(self) -> int:
        """What a block keeps that is recomputed."""
        return int(
            block_bytes(
                self.dims,
                self.micro_batch,
                self.seq,
                element_bytes=self.element,
                recompute="full",
            )
        )

    def kept(self, whole: bool) -> int:
        """What a block keeps: everything, or what it is recomputed from."""
        return self.whole if whole else self.point

    @cached_property
    def in_hand(self) -> int:
        """Beside what a block keeps, while it runs forward."""
        one = in_hand(self.code, self.dims, self.seq, self.element, backward=False)
        return self.tokens * one

    def beside(self, largest: int) -> int:
        """Beside what a block keeps, while it runs backward; `largest`: its largest gradient."""
        return beside_gradient(self.code, self.dims, self.tokens, self.seq, self.element, largest)

    @cached_property
    def before(self) -> int:
        """What is kept before the first block."""
        return held_before(self.code, self.dims, self.micro_batch, self.seq, self.element)

    @cached_property
    def behind(self) -> int:
        """What is kept behind the last block, logits aside."""
        return self.tokens * kept_behind(self.code, self.dims, self.element)

    @property
    def logits(self) -> int:
        """The log-probabilities that the loss keeps, in fp32."""
        return 4 * self.tokens * self.dims.vocab

    @property
    def first_logits(self) -> int:
        """The logits when the loss is computed: in fp32, their log-probabilities, and the model's
        own where these have fewer bytes.
        """
        own = self.element if self.element < 4 else 0
        return self.tokens * self.dims.vocab * (8 + own)

    @property
    def shared(self) -> int:
        """The gradient of a tied head, until the embedding adds its own to it."""
        return self.dims.vocab * self.dims.hidden * self.element if self.dims.tied else 0


def _forward(blocks: Sequence[tuple[UnitShape, bool]], size: _Sizes) -> Iterator[Slot]:
    """The slots of a forward pass through `blocks`, each with whether it keeps everything."""
    held = size.before
    for block, whole in blocks:
        yield Slot(block.name, "forward", held + size.whole + size.in_hand)
        held += size.kept(whole)
    yield Slot("(root)", "forward", held + size.behind + size.first_logits, size.first_logits)


def _backward(
    blocks: Sequence[tuple[UnitShape, bool]], others: Sequence[UnitShape], size: _Sizes
) -> Iterator[Slot]:
    """The slots of the backward pass, last block first, and then the `others`."""
    held = size.before + sum(size.kept(whole) for _, whole in blocks)
    # The log-probabilities, with their gradients and the logits'
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
    """Elements of its largest parameter."""
    return max((p.numel for p in unit.parameters), default=0)


def _flops(
    model: ModelShape, dims: Transformer, seq: int, tokens: int, recomputed: float
) -> tuple[float, float]:
    """(FLOPs of matrix products that are done, those of the forward pass), where the share
    `recomputed` of the blocks runs again in the backward pass.
    """
    blocks = blocks_of(model)
    whole = (flops_per_token(model, dims, seq) - _looked_up(model)) * tokens
    looked_up = sum(p.numel for u in model.units if u.looks_up_only for p in u.parameters)
    forward = transformer_flops_per_token(model.active_numel - looked_up, dims, seq) * tokens / 3
    return whole + recomputed * _recomputed(model, dims, seq, blocks) * tokens, forward


def flops_per_token(model: ModelShape, dims: Transformer | None, seq: int) -> float:
    """Model FLOPs of forward and backward, where frozen parameters have no gradients of their own:
    4 each instead of 6.
    """
    return transformer_flops_per_token(model.active_numel, dims, seq) - 2 * frozen_active(model)


def _looked_up(model: ModelShape) -> float:
    """What `flops_per_token` counts of tables of which a token reads one row: no product has
    them.
    """
    return sum(
        (6 if p.trainable else 4) * p.numel
        for u in model.units
        if u.looks_up_only
        for p in u.parameters
    )


def _recomputed(
    model: ModelShape, dims: Transformer, seq: int, blocks: Sequence[UnitShape]
) -> float:
    """FLOPs a token of the blocks' second forward passes. torch ends one as soon as it has
    everything that backward needs: before the last product of a block, but where a router weighs
        what comes out of it.
    """
    repeated = {u.name for u in blocks}
    inside = model.active_numel - sum(u.numel for u in model.units if u.name not in repeated)
    last = 2 * dims.layers * dims.ffn * dims.hidden if dims.experts <= 1 else 0
    return max(0.0, transformer_flops_per_token(inside, dims, seq) / 3 - last)


def frozen_active(model: ModelShape) -> int:
    """Frozen parameters that a token passes through; of experts, the share that is chosen."""
    if model.trainable == model.numel:
        return 0
    dims = model.transformer
    share = dims.active / dims.experts if dims and dims.experts > 1 else 1.0
    trained = (p for u in model.units for p in u.parameters if p.trainable)
    passed = sum(p.numel * (share if is_routed(p.name) else 1.0) for p in trained)
    return max(0, model.active_numel - round(passed))


def is_routed(name: str) -> bool:
    """Whether a parameter belongs to experts of which each token sees only some."""
    return re.search(r"(^|\.)experts\.", name) is not None


def _kept(index: int, checkpointing: str) -> bool:
    """Whether the block keeps its activations: "selective" recomputes every second one, as
    `onefold train` does.
    """
    return checkpointing == "none" or (checkpointing == "selective" and index % 2 == 1)


#: What the units of tiles are called (tiling).
TILE = re.compile(r"\.tiles\.\d+$")


def blocks_of(model: ModelShape) -> list[UnitShape]:
    """The repeated units: those that differ in one number of their name and are most."""
    families: dict[str, list[UnitShape]] = {}
    for unit in model.units:
        if re.search(r"\d", unit.name) and not TILE.search(unit.name):
            families.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
    return max(families.values(), key=len, default=[])


def assumed_dims(model: ModelShape, seq: int) -> Transformer:
    """Dimensions of a decoder of this many parameters: 12·L·h² with h = 128·L, heads of 128, four
    times as wide inside.
    """
    layers = max(len(blocks_of(model)), 1)
    hidden = max(64, round(math.sqrt(model.numel / (12 * layers)) / 64) * 64)
    return Transformer(layers, hidden, max(1, hidden // 128), 4 * hidden, 50_304, seq)


def stretched(activity: Activity, blocks: Sequence[str], names: Sequence[str]) -> Activity:
    """`activity` as it would be with blocks `names` in the place of `blocks`; of equal number it is
    the same but for the names.

        traced      ▁ ▂ ▃ ▄ █ ▄ ▃ ▂ ▁            a block more is a step more on both sides, and everything
        two more    ▁ ▂ ▃ ▄ ▅ ▆ █ ▆ ▅ ▄ ▃ ▂ ▁    between the last block's two passes lies higher by it

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
