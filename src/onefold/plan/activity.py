"""What a micro-batch keeps and computes, in slots that line up with the engine's: from a trace, or from dimensions.

    slot      forward 0   forward 1   ...   backward 1   backward 0
    engine    ▒▒          ▒▒                ▒▒▒▒         ▒▒▒▒            plan/replay.py
    activity  ░           ░░          ░░░   ░░░          ░               here
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onefold.plan.costs import Kernels
from onefold.plan.formulas.activations import block_bytes, logits_bytes
from onefold.plan.formulas.compute import transformer_flops_per_token
from onefold.plan.shapes import ModelShape, Transformer, UnitShape
from onefold.plan.trace import ActivationTrace


@dataclass(frozen=True)
class Slot:
    """While one unit runs: bytes at the largest sum, and how much of them are logits, and gradients not yet handed over."""

    unit: str
    phase: str
    peak: int
    logits: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Activity:
    """One micro-batch. `flops` are matrix products of forward and backward, recomputation included; `forward_flops` of forward alone;
    `kernels` is what runs, None where only dimensions are known.
    """

    slots: tuple[Slot, ...]
    saved: int
    logits: int
    flops: float
    forward_flops: float
    source: str
    notes: tuple[str, ...] = ()
    kernels: Kernels | None = None

    @classmethod
    def from_trace(cls, trace: ActivationTrace) -> Activity:
        """What a trace of the real module says, span by span."""
        slots = tuple(Slot(s.unit, s.phase, s.peak, s.logits, s.gradients) for s in trace.spans)
        flops = trace.forward_flops + trace.backward_flops
        return cls(slots, trace.saved, trace.logits, flops, trace.forward_flops, "traced", trace.notes, trace.kernels)

    @classmethod
    def from_dims(
        cls, model: ModelShape, dims: Transformer, micro_batch: int, seq: int, element_bytes: int, checkpointing: str
    ) -> Activity:
        """From dimensions alone (`plan.formulas.activations`): for models without code.

        A block keeps A bytes; while it runs it has W in hand (what it keeps without recompute, and as much again in backward
        for gradients of its widest activations: the feed-forward's).
        """
        blocks = blocks_of(model)
        tokens = micro_batch * seq
        kept_of = [_kept(i, checkpointing) for i in range(len(blocks))]
        whole = int(block_bytes(dims, micro_batch, seq, element_bytes=element_bytes))
        point = int(block_bytes(dims, micro_batch, seq, element_bytes=element_bytes, recompute="full"))
        wide = tokens * (dims.ffn * (2 if dims.gated else 1) + dims.hidden) * element_bytes
        logits = int(logits_bytes(dims, micro_batch, seq, element_bytes))
        slots, held = [], tokens * dims.hidden * element_bytes
        for block, kept in zip(blocks, kept_of, strict=True):
            slots.append(Slot(block.name, "forward", held + whole + (0 if kept else wide // 2)))
            held += whole if kept else point
        saved = held
        slots.append(Slot("(root)", "forward", held + logits, logits))
        slots.append(Slot("(root)", "backward", held + logits + tokens * dims.vocab * element_bytes, logits))
        for block, kept in zip(reversed(blocks), reversed(kept_of), strict=True):
            largest = max((p.numel for p in block.parameters), default=0) * element_bytes
            again = 0 if kept else whole
            slots.append(Slot(block.name, "backward", held + again + wide + largest, 0, largest))
            held -= whole if kept else point
        repeated = {u.name for u in blocks}
        first = [u for u in model.units if u.name not in repeated and u.parameters]
        for unit in first:
            largest = max(p.numel for p in unit.parameters) * element_bytes
            slots.append(Slot(unit.name, "backward", held + largest, 0, largest))
        forward = transformer_flops_per_token(model.active_numel, dims, seq) * tokens / 3
        whole_step = flops_per_token(model, dims, seq) * tokens
        again_share = sum(1 for k in kept_of if not k) / max(len(kept_of), 1)
        return cls(tuple(slots), saved, logits, whole_step + again_share * forward, forward, "formula")


def flops_per_token(model: ModelShape, dims: Transformer | None, seq: int) -> float:
    """Model FLOPs of forward and backward, where frozen parameters have no gradients of their own: 4 each instead of 6."""
    return transformer_flops_per_token(model.active_numel, dims, seq) - 2 * frozen_active(model)


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
    """Whether the block keeps its activations: "selective" recomputes every second one, as `onefold train` does."""
    return checkpointing == "none" or (checkpointing == "selective" and index % 2 == 1)


def blocks_of(model: ModelShape) -> list[UnitShape]:
    """The repeated units: those that differ in one number of their name and are most."""
    families: dict[str, list[UnitShape]] = {}
    for unit in model.units:
        if re.search(r"\d", unit.name):
            families.setdefault(re.sub(r"\d+", "#", unit.name), []).append(unit)
    return max(families.values(), key=len, default=[])


def assumed_dims(model: ModelShape, seq: int) -> Transformer:
    """Dimensions of a decoder of this many parameters: 12·L·h² with h = 128·L, heads of 128, four times as wide inside."""
    layers = max(len(blocks_of(model)), 1)
    hidden = max(64, round(math.sqrt(model.numel / (12 * layers)) / 64) * 64)
    return Transformer(layers, hidden, max(1, hidden // 128), 4 * hidden, 50_304, seq)
