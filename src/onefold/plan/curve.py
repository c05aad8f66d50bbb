"""Measured points made usable between and beyond them: seconds over bytes, and rates over shapes.

seconds │                     ·'   beyond the last point: the fit's bandwidth
        │               ·--·'
        │        ·---·'            between points: straight lines, never falling
        │  ·--·'
        │-'                        below the first: towards the fit's latency
        └──────────────────── bytes
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + bytes / bytes_per_s. Latency is never negative; the bandwidth is inf
    where more bytes took no longer.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


def fit(points: Iterable[tuple[float, float]]) -> Fit:
    """Least squares of the relative error over `(bytes, seconds)`, so that small messages count as
    much as large ones.

    The least of sum(((a + b·x - y) / y)²) with a, b >= 0; where the free solution leaves that
    quarter, it lies on an edge.

    Raises:
        ValueError: no points, or sizes and times that are not positive and finite.
    """
    points = _checked(points)
    s1 = sum(1 / y**2 for _, y in points)
    sx = sum(x / y**2 for x, y in points)
    sxx = sum((x / y) ** 2 for x, y in points)
    sy = sum(1 / y for _, y in points)
    sxy = sum(x / y for x, y in points)
    determinant = s1 * sxx - sx * sx
    latency, per_byte = -1.0, 0.0
    if len({x for x, _ in points}) > 1 and determinant > 0:
        latency, per_byte = (sy * sxx - sxy * sx) / determinant, (s1 * sxy - sx * sy) / determinant
    if per_byte < 0:
        latency, per_byte = sy / s1, 0.0
    elif latency < 0:
        latency, per_byte = 0.0, sxy / sxx
    return Fit(latency, 1 / per_byte if per_byte else math.inf)


@dataclass(frozen=True)
class Curve:
    """Seconds of something that takes longer the more bytes it has, from `(bytes, seconds)` as
    measured.

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
        return fit(self.points)

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
        first = (0.0, min(self.fit.latency_s, points[0][1]))
        known = [first, *points]
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
    here = [math.log(c) for c in at]
    weights, logs = [], []
    for place, value in known:
        distance = math.dist(here, [math.log(c) for c in place])
        if distance < 1e-9:
            return value
        weights.append(distance**-power)
        logs.append(math.log(value))
    mean = math.exp(sum(w * v for w, v in zip(weights, logs, strict=True)) / sum(weights))
    values = [value for _, value in known]
    return min(max(mean, min(values)), max(values))


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
