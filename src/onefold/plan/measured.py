"""The figures of one machine as they were measured; `Calibration` holds them and answers
questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Any

from onefold.plan.costs import Kernels
from onefold.plan.curve import Curve
from onefold.plan.schema import MOVES

#: Bytes that a fused AdamW moves for each fp32 element: it reads parameter, gradient and two
#: moments, and writes all but the gradient.
ADAMW_BYTES = 28

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class MatrixPoint:
    """`F.linear` of [m, k] with [n, k], 2·m·n·k FLOPs."""

    dtype: str
    m: int
    n: int
    k: int
    flops_per_s: float

    def __post_init__(self) -> None:
        _positive(self, "m", "n", "k", "flops_per_s")


@dataclass(frozen=True)
class BlockPoint:
    """Forward and backward pass of one transformer block over `tokens` tokens in one sequence.

    FLOPs are the model's: 6·12h² + 12·h·s a token (PaLM, appendix B, for one layer), whatever the
    kernels really do.
    """

    dtype: str
    hidden: int
    tokens: int
    flops_per_s: float

    def __post_init__(self) -> None:
        _positive(self, "hidden", "tokens", "flops_per_s")


@dataclass(frozen=True)
class Overlap:
    """A gather beside matrix products, and each of them alone, in seconds.

    `hidden` is the share of the shorter that vanished: together = compute + gather - hidden ·
    min(compute, gather).
    """

    compute: float
    gather: float
    together: float
    compute_beside: float

    def __post_init__(self) -> None:
        _positive(self, "compute", "gather", "together", "compute_beside")

    @property
    def hidden(self) -> float:
        saved = self.compute + self.gather - self.together
        return min(1.0, max(0.0, saved / min(self.compute, self.gather)))

    @property
    def slowdown(self) -> float:
        """A matrix product's time beside a running gather ÷ alone, at least 1."""
        return max(1.0, self.compute_beside / self.compute)


@dataclass(frozen=True)
class PassPoint:
    """Forward and backward pass of something, on its own: what ran and the seconds it took. See
    `onefold.plan.costs`.
    """

    dtype: str
    kernels: Kernels
    seconds: float

    def __post_init__(self) -> None:
        _positive(self, "seconds")


@dataclass(frozen=True)
class StepPoint:
    """A reference step: the engine itself trains a small transformer, and this is how long it took.

    Attributes:
        dtype: of the computation; stage: 0 or 3.
        hidden, tokens: width of its blocks, and tokens of a micro-batch (one sequence).
        micro_batches: of a step. flops: model FLOPs of the whole step, as `BlockPoint` counts them,
            and 6 a weight and token of the head.
        kernels: what runs in all its passes.
        numel: elements of the model; stepped: those that this rank's optimizer steps.
        wire, calls: payload bytes that a rank sends in the step, and collectives, by move.
        seconds: until the last rank was done.
    """

    dtype: str
    stage: int
    hidden: int
    tokens: int
    micro_batches: int
    flops: float
    kernels: Kernels
    numel: int
    stepped: int
    wire: dict[str, float]
    calls: dict[str, int]
    seconds: float

    def __post_init__(self) -> None:
        _positive(self, "hidden", "tokens", "micro_batches", "flops", "numel", "stepped", "seconds")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage {self.stage}: expected 0, 1, 2 or 3.")
        if set(self.wire) != set(self.calls):
            raise ValueError(
                f"wire names {', '.join(self.wire) or 'no move'} and calls"
                f" {', '.join(self.calls) or 'none'}: expected the same."
            )


@dataclass(frozen=True)
class AtRanks:
    """What one rank does while `ranks` ranks of this machine, of `threads` threads each, do the
    same.

    Attributes:
        copies: (bytes read and written, seconds) of a copy within memory.
        optimizer: (bytes moved, seconds) of a fused AdamW step over a flat fp32 shard,
            `ADAMW_BYTES` an element.
        moves: (payload bytes that one rank sends, seconds) by move, as the traffic ledger counts
            them; {} for one rank.
        overlap: None for one rank.
        passes, steps: see there; () in files that are older than they.
    """

    ranks: int
    threads: int
    matrices: tuple[MatrixPoint, ...]
    blocks: tuple[BlockPoint, ...]
    copies: Points
    optimizer: Points
    moves: dict[str, Points] = field(default_factory=dict)
    overlap: Overlap | None = None
    passes: tuple[PassPoint, ...] = ()
    steps: tuple[StepPoint, ...] = ()

    def __post_init__(self) -> None:
        _positive(self, "ranks", "threads")
        for points in (self.copies, self.optimizer, *self.moves.values()):
            Curve(points)
        if self.ranks > 1 and not set(MOVES) <= set(self.moves):
            raise ValueError(
                f"moves of {self.ranks} ranks: expected {', '.join(MOVES)}, found"
                f" {', '.join(self.moves) or 'none'}."
            )
        if self.ranks > 1 and self.overlap is None:
            raise ValueError(f"overlap of {self.ranks} ranks: expected figures, found none.")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Seconds over bytes of each move, of "copy" and of "optimizer"."""
        return {
            name: Curve(points)
            for name, points in (
                *self.moves.items(),
                ("copy", self.copies),
                ("optimizer", self.optimizer),
            )
        }


@dataclass(frozen=True)
class HostLink:
    """Bytes per second between pinned host memory and one GPU."""

    to_device: float
    to_host: float

    def __post_init__(self) -> None:
        _positive(self, "to_device", "to_host")


@dataclass(frozen=True)
class Disk:
    """Bytes per second of one process in `folder`: written through to the disk; read past the page
    cache where `cached` is false.
    """

    folder: str
    write: float
    read: float
    cached: bool = False

    def __post_init__(self) -> None:
        _positive(self, "write", "read")


def middle(rounds: Sequence[AtRanks]) -> AtRanks:
    """Rounds of one measurement as one: of each figure its median. Rounds lie apart in time, so
    that no slow moment decides.
    """
    first = rounds[0]

    def points(name: str) -> tuple[Any, ...]:
        return tuple(
            _median_record(same) for same in zip(*(getattr(r, name) for r in rounds), strict=True)
        )

    def seconds(of: Sequence[Points]) -> Points:
        return tuple((same[0][0], median(y for _, y in same)) for same in zip(*of, strict=True))

    return replace(
        first,
        matrices=points("matrices"),
        blocks=points("blocks"),
        copies=seconds([r.copies for r in rounds]),
        optimizer=seconds([r.optimizer for r in rounds]),
        moves={move: seconds([r.moves[move] for r in rounds]) for move in first.moves},
        overlap=_median_record([r.overlap for r in rounds]) if first.overlap is not None else None,
        passes=points("passes"),
        steps=points("steps"),
    )


def _median_record(same: Sequence[Any]) -> Any:
    """Records that agree in all but their measured figures, which become medians."""
    figures = [f.name for f in fields(same[0]) if f.type == "float"]
    return replace(
        same[0], **{name: median(getattr(record, name) for record in same) for name in figures}
    )


def _positive(record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < inf:
            raise ValueError(f"{name} is {value}: expected a positive, finite number.")
