"""The figures of one machine as they were measured; `Calibration` holds them and answers questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from onefold.plan.curve import Curve
from onefold.plan.schema import MOVES

#: Bytes that a fused AdamW moves for each fp32 element: it reads parameter, gradient and two moments, and writes all but the gradient.
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

    FLOPs are the model's: 6·12h² + 12·h·s a token (PaLM, appendix B, for one layer), whatever the kernels really do.
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

    `hidden` is the share of the shorter that vanished: together = compute + gather - hidden · min(compute, gather).
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
class AtRanks:
    """What one rank does while `ranks` ranks of this machine, of `threads` threads each, do the same.

    Attributes:
        copies: (bytes read and written, seconds) of a copy within memory.
        optimizer: (bytes moved, seconds) of a fused AdamW step over a flat fp32 shard, `ADAMW_BYTES` an element.
        moves: (payload bytes that one rank sends, seconds) by move, as the traffic ledger counts them; {} for one rank.
        overlap: None for one rank.
    """

    ranks: int
    threads: int
    matrices: tuple[MatrixPoint, ...]
    blocks: tuple[BlockPoint, ...]
    copies: Points
    optimizer: Points
    moves: dict[str, Points] = field(default_factory=dict)
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        _positive(self, "ranks", "threads")
        for points in (self.copies, self.optimizer, *self.moves.values()):
            Curve(points)
        if self.ranks > 1 and not set(MOVES) <= set(self.moves):
            raise ValueError(f"moves of {self.ranks} ranks: expected {', '.join(MOVES)}, found {', '.join(self.moves) or 'none'}.")
        if self.ranks > 1 and self.overlap is None:
            raise ValueError(f"overlap of {self.ranks} ranks: expected figures, found none.")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Seconds over bytes of each move, of "copy" and of "optimizer"."""
        return {name: Curve(points) for name, points in (*self.moves.items(), ("copy", self.copies), ("optimizer", self.optimizer))}


@dataclass(frozen=True)
class HostLink:
    """Bytes per second between pinned host memory and one GPU."""

    to_device: float
    to_host: float

    def __post_init__(self) -> None:
        _positive(self, "to_device", "to_host")


@dataclass(frozen=True)
class Disk:
    """Bytes per second of one process in `folder`: written through to the disk; read past the page cache where `cached` is false."""

    folder: str
    write: float
    read: float
    cached: bool = False

    def __post_init__(self) -> None:
        _positive(self, "write", "read")


def _positive(record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < inf:
            raise ValueError(f"{name} is {value}: expected a positive, finite number.")
