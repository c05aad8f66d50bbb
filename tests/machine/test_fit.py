"""Measured points between and beyond themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.machine.fit import Curve, Fit

SIZE = st.floats(1, 1e10)
SECONDS = st.floats(1e-7, 1e3)
POINTS = st.lists(st.tuples(SIZE, SECONDS), min_size=1, max_size=8)


@given(
    st.floats(0, 1e-2),
    st.floats(1e6, 1e12),
    st.lists(st.floats(1e3, 1e9), min_size=2, max_size=6, unique=True),
)
def test_a_fit_finds_the_latency_and_the_bandwidth_that_made_the_points(
    latency: float, bandwidth: float, sizes: list[float]
) -> None:
    if max(sizes) < 2 * min(sizes):
        sizes = [*sizes, 4 * min(sizes)]
    points = [(x, latency + x / bandwidth) for x in sizes]
    found = Fit.of(points)
    for x, y in points:
        assert found.seconds(x) == pytest.approx(y, rel=1e-3)


@given(POINTS, SIZE, SIZE)
def test_more_bytes_never_take_less_time(
    points: list[tuple[float, float]], a: float, b: float
) -> None:
    curve = Curve(tuple(points))
    assert curve.seconds(min(a, b)) <= curve.seconds(max(a, b)) * (1 + 1e-9)
