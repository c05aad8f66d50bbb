"""Interpolate and extrapolate measured points: the cost of operations, the seconds of moves, the
rate of a shape.

| what                  | model                                        | fitted to                        |
|-----------------------|----------------------------------------------|----------------------------------|
| passes (`Costs`)      | five costs × the work in the pass            | passes timed by a calibration    |
| moves, copies (`Fit`) | latency + bytes ÷ bandwidth                  | seconds over bytes               |
| the same (`Curve`)    | lines between points, the fit beyond them    | the points themselves            |
| blocks                | `nearest_mean`, never outside measured rates | rates at (width, tokens)         |

The same FLOPs take longer in more and smaller operations: transformers' Llama and GPT-2 blocks take
1.3 times, Mixtral's 1.6 times as long as a plain block of their width. A rate of blocks cannot show
that, because it does not know the operations of a pass. `Costs` does:

    seconds = FLOPs of products     × seconds of one FLOP in a large product
            + products              × seconds to start one
            + bytes of products     × seconds of one byte (the memory time that a small or thin product cannot hide)
            + other operations      × seconds to start one: Python, dispatch, autograd, kernel launch
            + bytes of others       × seconds of one byte
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from onefold.machine.kernels import Kernels


@dataclass(frozen=True)
class Costs:
    """Seconds of one FLOP, one product, one byte of products, one other operation, and one byte of
    other operations.
    """

    flop: float
    product: float
    product_byte: float
    other: float
    other_byte: float

    def seconds(self, kernels: Kernels) -> float:
        return sum(
            each * number for each, number in zip(astuple(self), astuple(kernels), strict=True)
        )

    @classmethod
    def of(cls, passes: Sequence[tuple[Kernels, float]]) -> Costs:
        """Return the costs that best fit the `(work, seconds)` of passes.

        Raises:
            ValueError: there is no pass, or one took no time.
        """
        if not passes or any(not seconds > 0 for _, seconds in passes):
            raise ValueError(
                f"{len(passes)} passes: expected at least one, each of which took time."
            )
        return cls(*_least_squares([(astuple(kernels), s) for kernels, s in passes]))


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + bytes / bytes_per_s. The latency is never negative. The bandwidth is
    inf if more bytes took no longer.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Fit:
        """Return the line that best fits the `(bytes, seconds)`. With one point the latency is 0.

        Raises:
            ValueError: there are no points, or a size or time is not positive and finite.
        """
        per_byte, latency = _least_squares([((x, 1.0), y) for x, y in _checked(points)])
        return cls(latency, 1 / per_byte if per_byte else math.inf)


def _least_squares(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Solve numbers · x = seconds for x >= 0, over rows of `(numbers, seconds)`. Minimizes the sum
    of squared relative errors, so that small measurements count as much as large ones.

    There are few unknowns, so it tries every set of unknowns that may be nonzero. The best solution
    without negative values is the constrained optimum; of equals it takes the first.
    """
    a = np.array([[n / seconds for n in numbers] for numbers, seconds in rows], dtype=np.float64)
    scale = np.where(a.max(axis=0) > 0, a.max(axis=0), 1.0)
    a /= scale
    best, least = np.zeros(a.shape[1]), math.inf
    for count in range(1, a.shape[1] + 1):
        for chosen in itertools.combinations(range(a.shape[1]), count):
            found = np.linalg.lstsq(a[:, chosen], np.ones(len(rows)), rcond=None)[0]
            error = float(((a[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9) - 1e-20:
                best, least = np.zeros(a.shape[1]), error
                best[list(chosen)] = found
    return [float(x) for x in best / scale]


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of bytes, from measured `(bytes, seconds)`. The function never falls.

    seconds │                     ·'   beyond the last point: the fit's bandwidth
            │               ·--·'
            │        ·---·'            between points: straight lines, never falling
            │  ·--·'
            │-'                        below the first: towards the fit's latency
            └──────────────────── bytes

    Noise can make a larger size look faster. Such neighbouring points are pooled to their mean.

    Raises:
        ValueError: there are no points, or a size or time is not positive and finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(_checked(self.points)))

    @cached_property
    def fit(self) -> Fit:
        return Fit.of(self.points)

    @cached_property
    def _rising(self) -> list[tuple[float, float]]:
        """The points, made non-decreasing by pooling adjacent violators."""
        pools: list[tuple[float, int]] = []
        for _, y in self.points:
            total, count = y, 1
            while pools and pools[-1][0] / pools[-1][1] >= total / count:
                before = pools.pop()
                total, count = total + before[0], count + before[1]
            pools.append((total, count))
        level = [total / count for total, count in pools for _ in range(count)]
        return [(x, y) for (x, _), y in zip(self.points, level, strict=True)]

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for `nbytes`; 0 for 0 bytes.

        Raises:
            ValueError: a negative number of bytes.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes: expected 0 or more.")
        if nbytes == 0:
            return 0.0
        points = self._rising
        last = points[-1]
        if nbytes >= last[0]:
            return last[1] + (nbytes - last[0]) / self.fit.bytes_per_s
        known = [(0.0, min(self.fit.latency_s, points[0][1])), *points]
        after = bisect_left(known, nbytes, key=lambda p: p[0])
        (x0, y0), (x1, y1) = known[after - 1], known[after]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def nearest_mean(
    known: Sequence[tuple[tuple[float, ...], float]], at: tuple[float, ...], power: float = 3.0
) -> float:
    """Interpolate a positive value at `at` from values at scattered places: their geometric mean,
    weighted by distance^-power, with distances in logarithms (Shepard 1968).

    At a measured place it returns the measured value. Elsewhere it stays between the smallest and
    the largest value, so a rate is never extrapolated beyond the measurements.

    Raises:
        ValueError: there are no values, or a coordinate is not positive.
    """
    if not known:
        raise ValueError("nothing was measured to interpolate between.")
    if any(c <= 0 for c in at):
        raise ValueError(f"{' × '.join(f'{c:g}' for c in at)}: expected positive sizes.")
    values = np.array([value for _, value in known])
    distances = np.linalg.norm(np.log([place for place, _ in known]) - np.log(at), axis=1)
    if distances.min() < 1e-9:
        return float(values[distances.argmin()])
    mean = np.exp(np.average(np.log(values), weights=distances**-power))
    return float(np.clip(mean, values.min(), values.max()))


def _checked(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points sorted by size, with one point per size (the mean of its times)."""
    by_size: dict[float, list[float]] = {}
    for x, y in points:
        if not (0 < x < math.inf and 0 < y < math.inf):
            raise ValueError(
                f"({x} bytes, {y} s) is not a measurement: expected positive, finite numbers."
            )
        by_size.setdefault(float(x), []).append(float(y))
    if not by_size:
        raise ValueError("no points to fit: expected at least one pair of bytes and seconds.")
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(by_size.items())]
