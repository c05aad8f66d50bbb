"""Measured points made usable between and beyond them: what operations cost, how long moves take,
which rate a shape reaches.

| what                | model                                          | fitted to                        |
|---------------------|------------------------------------------------|----------------------------------|
| passes (`Costs`)    | five costs × what the pass consists of         | passes timed by a calibration    |
| moves, copies (`Fit`) | latency + bytes ÷ bandwidth                  | seconds over bytes               |
| the same (`Curve`)  | lines between points, the fit beyond them      | the points themselves            |
| blocks              | `nearest_mean`, never beyond what was measured | rates at (width, tokens)         |

A rate of blocks does not know how many operations a pass consists of: equal FLOPs in more and
smaller operations take longer (transformers' Llama and GPT-2 blocks 1.3 times, Mixtral's 1.6 times
as long as a plain block of their width). `Costs` does:

    seconds = FLOPs of products     × what one takes in a large product
            + products              × what starting one takes
            + bytes of products     × what bringing one takes (what no FLOP of a small or thin product hides)
            + other operations      × what starting one takes: Python, dispatch, autograd, a kernel's launch
            + bytes of others       × what one takes
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from onefold.doctor.kernels import Kernels


@dataclass(frozen=True)
class Costs:
    """Seconds of one FLOP, of one product and one byte of products, of one other operation and one
    byte of others.
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
        """The costs that fit `(what ran, seconds)` best.

        Raises:
            ValueError: no pass, or one that took no time.
        """
        if not passes or any(not seconds > 0 for _, seconds in passes):
            raise ValueError(
                f"{len(passes)} passes: expected at least one, each of which took time."
            )
        return cls(*_least_squares([(astuple(kernels), s) for kernels, s in passes]))


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + bytes / bytes_per_s. Latency is never negative; the bandwidth is inf
    where more bytes took no longer.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Fit:
        """The line that fits `(bytes, seconds)` best; through one point, all of it is bandwidth.

        Raises:
            ValueError: no points, or sizes and times that are not positive and finite.
        """
        per_byte, latency = _least_squares([((x, 1.0), y) for x, y in _checked(points)])
        return cls(latency, 1 / per_byte if per_byte else math.inf)


def _least_squares(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Factors x >= 0 with the least sum of squared relative errors, of `(numbers, seconds)` with
    numbers · x = seconds. Relative, so that small measurements count as much as large ones.

    With a few unknowns every set of those that are not zero can be tried. The best that is nowhere
    negative is the constrained optimum; the first of equals is taken.
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
    """Seconds of something that takes longer the more bytes it has, from `(bytes, seconds)` as
    measured.

    seconds │                     ·'   beyond the last point: the fit's bandwidth
            │               ·--·'
            │        ·---·'            between points: straight lines, never falling
            │  ·--·'
            │-'                        below the first: towards the fit's latency
            └──────────────────── bytes

    Noise can make a larger size look faster; such neighbours are pooled to their mean, so that the
    curve never falls.

    Raises:
        ValueError: no points, or sizes and times that are not positive and finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(_checked(self.points)))

    @cached_property
    def fit(self) -> Fit:
        return Fit.of(self.points)

    @cached_property
    def _rising(self) -> list[tuple[float, float]]:
        """The points with seconds that never fall: pool adjacent violators."""
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
        """Seconds for `nbytes`; nothing takes no time.

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
    """A positive value at `at` from values at scattered places: geometric mean weighted by
    distance^-power, in logarithms (Shepard 1968).

    It is the measured value at a measured place and stays between the least and the greatest
    everywhere: a rate is never extrapolated to what no measurement has shown.

    Raises:
        ValueError: nothing is known, or a coordinate is not positive.
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
    """Sorted by size, one point a size (the mean of its times)."""
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
