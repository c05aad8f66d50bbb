"""`--stage auto`: the lowest stage that divides memory and whose states fit what is free on every rank.

Bytes of states a rank holds, for Ψ trained parameters on N ranks with AdamW, c = bytes of the compute dtype:

| stage | parameters | gradients (fp32) | masters (if c < 4) and AdamW's two moments (fp32) |
|-------|------------|------------------|---------------------------------------------------|
| 0     | cΨ         | 4Ψ               | (4 +) 8Ψ                                          |
| 1     | cΨ         | 4Ψ               | (4 +) 8Ψ / N                                      |
| 2     | cΨ         | 4Ψ / N           | (4 +) 8Ψ / N                                      |
| 3     | cΨ / N     | 4Ψ / N           | (4 +) 8Ψ / N                                      |

Which rows are divided is read from the recipe's table of stages. Frozen parameters count as parameters only. Activations
and buffers in flight are not in here; a fifth of what is free is left for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onefold.recipe import COMPUTE_DTYPES, PLACEMENTS_OF_STAGE, Placement
from onefold.train.machine import readable

#: Share of the free memory that states may take.
USABLE = 0.8
_FP32 = 4
_MOMENTS = 8


@dataclass(frozen=True)
class Choice:
    """A stage and why.

    Attributes:
        stage: 0 to 3.
        reason: one sentence.
        needed: {stage: bytes of states on one rank}.
        available: bytes that states may take on the rank that has the least.
    """

    stage: int
    reason: str
    needed: Mapping[int, int]
    available: int


def state_bytes(stage: int, world_size: int, precision: str, trained: int, frozen: int = 0) -> int:
    """Bytes of parameters, gradients, masters and moments on one rank, by the table above (padding not counted)."""
    compute = COMPUTE_DTYPES[precision].itemsize
    masters = 0 if compute == _FP32 else _FP32
    rows = zip(
        PLACEMENTS_OF_STAGE[stage],
        (compute * (trained + frozen), _FP32 * trained, (masters + _MOMENTS) * trained),
        strict=True,
    )
    return sum(-(-size // world_size) if placement is Placement.SHARDED else size for placement, size in rows)


def choose_stage(asked: str, world_size: int, precision: str, trained: int, frozen: int, free: int) -> Choice:
    """Take the stage that was asked for, or find one.

    Stage 0 is taken by itself on one rank only: stage 1 sends the same bytes and holds less.

    Args:
        asked: "auto", or "0" to "3".
        trained, frozen: numbers of parameters.
        free: bytes free on the rank that has the least.
    """
    available = int(free * USABLE)
    needed = {stage: state_bytes(stage, world_size, precision, trained, frozen) for stage in PLACEMENTS_OF_STAGE}
    if asked != "auto":
        return Choice(int(asked), f"stage {asked}, as asked", needed, available)
    if world_size == 1:
        return Choice(0, "stage 0: with one rank there is nothing to divide", needed, available)
    for stage in (1, 2, 3):
        if needed[stage] <= available:
            why = f"its states take {readable(needed[stage])} of {readable(available)} a rank may use"
            if stage == 1:
                return Choice(1, f"stage 1: {why}; it sends what stage 0 sends and divides the optimizer", needed, available)
            below = f"stage {stage - 1} would take {readable(needed[stage - 1])}"
            return Choice(stage, f"stage {stage}, the lowest that fits: {why}, {below}", needed, available)
    return Choice(
        3,
        f"stage 3 holds the least, {readable(needed[3])} a rank, which is more than the {readable(available)} that are "
        "free: it may run out of memory (more ranks or --precision bf16 would help)",
        needed,
        available,
    )
