"""The measured figures of one machine, which `Calibration` holds and answers questions about."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Any

from onefold.comm import MOVES
from onefold.machine.fit import Costs, Curve
from onefold.machine.kernels import Kernels

#: Bytes that a fused AdamW moves per fp32 element: it reads parameter, gradient and two moments
#: (16 bytes), and writes all but the gradient (12 bytes).
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

    FLOPs are the model's, independent of the kernels: 6·12h² + 12·h·s per token (PaLM, appendix B,
    for one layer).
    """

    dtype: str
    hidden: int
    tokens: int
    flops_per_s: float

    def __post_init__(self) -> None:
        _positive(self, "hidden", "tokens", "flops_per_s")


@dataclass(frozen=True)
class Overlap:
    """A gather and matrix products, each alone and both together, in seconds. `compute_beside`: the
    matrix products while the gather runs.

    `hidden` is the hidden share of the shorter one: together = compute + gather - hidden ·
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
        """The time of matrix products beside a gather ÷ their time alone, at least 1."""
        return max(1.0, self.compute_beside / self.compute)


@dataclass(frozen=True)
class PassPoint:
    """The work and seconds of a module's forward and backward pass. See `onefold.machine.fit`."""

    dtype: str
    kernels: Kernels
    seconds: float

    def __post_init__(self) -> None:
        _positive(self, "seconds")


@dataclass(frozen=True)
class StepPoint:
    """A reference step: the engine trains a small transformer for one step, which is timed.

    Attributes:
        dtype: of the computation. stage: 0 or 3.
        hidden, tokens: width of the blocks, and tokens of a micro-batch (one sequence).
        micro_batches: number per step. flops: model FLOPs of the whole step, as `BlockPoint` counts
            them, plus 6 per weight of the head and token.
        kernels: the work of all its passes.
        numel: elements of the model. stepped: those that this rank's optimizer steps.
        wire, calls: by move, the payload bytes that a rank sends in the step, and the collectives.
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
    """The figures of one rank while `ranks` ranks of this machine, with `threads` threads each, do
    the same.

    Attributes:
        copies: (bytes read and written, seconds) of copies within memory.
        optimizer: (bytes moved, seconds) of fused AdamW steps over a flat fp32 shard. A step moves
            `ADAMW_BYTES` per element.
        moves: {move: (payload bytes that one rank sends, seconds)}, as the traffic ledger counts
            bytes; {} for one rank.
        overlap: None for one rank.
        passes, steps: `PassPoint` and `StepPoint`; () in files from before they existed.
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
        """The seconds as a function of bytes, of each move, "copy" and "optimizer"."""
        points = {**self.moves, "copy": self.copies, "optimizer": self.optimizer}
        return {name: Curve(of) for name, of in points.items()}

    @cached_property
    def costs(self) -> dict[str, Costs]:
        """The cost of each part of a pass, by dtype."""
        by_dtype: dict[str, list[tuple[Kernels, float]]] = {}
        for p in self.passes:
            by_dtype.setdefault(p.dtype, []).append((p.kernels, p.seconds))
        return {dtype: Costs.of(passes) for dtype, passes in by_dtype.items()}


@dataclass(frozen=True)
class HostLink:
    """Bytes per second between pinned host memory and one GPU."""

    to_device: float
    to_host: float

    def __post_init__(self) -> None:
        _positive(self, "to_device", "to_host")


@dataclass(frozen=True)
class Disk:
    """Bytes per second of one process in `folder`, written through to the disk. Reads come from the
    page cache if `cached`, else from the disk.
    """

    folder: str
    write: float
    read: float
    cached: bool = False

    def __post_init__(self) -> None:
        _positive(self, "write", "read")


def middle(rounds: Sequence[Any]) -> Any:
    """Combine the rounds of one measurement, which have the same shape: return the median of each
    figure. Rounds are apart in time, so one slow moment does not decide.
    """
    first = rounds[0]
    if isinstance(first, float):
        return median(rounds)
    if is_dataclass(first) and not isinstance(first, type):
        parts = {f.name: [getattr(record, f.name) for record in rounds] for f in fields(first)}
        return replace(first, **{name: middle(same) for name, same in parts.items()})
    if isinstance(first, tuple):
        return tuple(middle(same) for same in zip(*rounds, strict=True))
    if isinstance(first, dict):
        return {key: middle([each[key] for each in rounds]) for key in first}
    return first


def _positive(record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < inf:
            raise ValueError(f"{name} is {value}: expected a positive, finite number.")


# -- from JSON ----------------------------------------------------------------------------------

_PLAIN: Mapping[type, tuple[Any, str]] = {
    float: (int | float, "a number"),
    int: (int, "a whole number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
}


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Convert `value`, from `json.load`, to an instance of `kind`: a dataclass, tuple, dict,
    optional or plain type. The reverse of `dataclasses.asdict`.

    Raises:
        ValueError: a key is missing or unknown, or has a value of another type. The message begins
            with the key's path.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)

    def expect(fits: bool, expected: str) -> None:
        if not fits:
            shown = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
            raise ValueError(f"{where or 'the file'}: expected {expected}, found {shown}.")

    if is_dataclass(kind):
        expect(isinstance(value, Mapping), "keys and values")
        return _decode_record(kind, value, where)
    if origin is types.UnionType:
        return None if value is None else decode(arguments[0], value, where)
    if origin is dict:
        expect(isinstance(value, Mapping), "keys and values")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple:
        expect(isinstance(value, list | tuple), "a list")
        of = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        expect(len(value) == len(of), f"a list of {len(of)}")
        pairs = enumerate(zip(of, value, strict=True))
        return tuple(decode(a, v, f"{where}[{i}]") for i, (a, v) in pairs)
    accepted, name = _PLAIN[kind]
    expect(isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)), name)
    return kind(value)


def _decode_record(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    known, hints = {f.name: f for f in fields(kind)}, typing.get_type_hints(kind)
    path = {name: f"{where}.{name}" if where else name for name in (*known, *value)}
    for name in sorted(set(value) - set(known)):
        raise ValueError(f"{path[name]}: unknown key; known here are {', '.join(known)}.")
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{path[name]}: this key is missing.")
    given = {name: decode(hints[name], item, path[name]) for name, item in value.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where or 'the file'}: {error}") from None
