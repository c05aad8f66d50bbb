"""Measured points between and beyond themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.machine.fit import Curve, Fit, nearest_mean

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


@given(POINTS)
def test_a_fit_is_never_negative(points: list[tuple[float, float]]) -> None:
    found = Fit.of(points)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_a_fit_weighs_the_relative_error() -> None:
    # Off by a factor at 1 GB and exact at small sizes: the absolute error would let the large one
    # decide alone.
    points = [(1e3, 1e-4 + 1e3 / 1e9), (1e4, 1e-4 + 1e4 / 1e9), (1e9, 1.5)]
    assert Fit.of(points).latency_s == pytest.approx(1e-4, rel=0.1)


def test_a_falling_series_has_no_bandwidth_limit() -> None:
    assert Fit.of([(1e3, 2e-3), (1e6, 1e-3)]).bytes_per_s == math.inf


def test_one_point_is_all_bandwidth() -> None:
    found = Fit.of([(1e6, 1e-3)])
    assert (found.latency_s, found.bytes_per_s) == (0.0, pytest.approx(1e9))


@given(POINTS, SIZE, SIZE)
def test_more_bytes_never_take_less_time(
    points: list[tuple[float, float]], a: float, b: float
) -> None:
    curve = Curve(tuple(points))
    assert curve.seconds(min(a, b)) <= curve.seconds(max(a, b)) * (1 + 1e-9)


@given(st.lists(st.tuples(SIZE, SECONDS), min_size=1, max_size=8, unique_by=lambda p: p[0]))
def test_a_curve_passes_through_points_that_rise(points: list[tuple[float, float]]) -> None:
    rising = list(zip(sorted(x for x, _ in points), sorted(y for _, y in points), strict=True))
    curve = Curve(tuple(rising))
    for x, y in rising:
        assert curve.seconds(x) == pytest.approx(y)


def test_noise_that_falls_is_pooled() -> None:
    curve = Curve(((1e3, 1.0), (1e4, 3.0), (1e5, 2.0), (1e6, 4.0)))
    assert [curve.seconds(x) for x in (1e3, 1e4, 1e5, 1e6)] == pytest.approx([1.0, 2.5, 2.5, 4.0])


def test_nothing_takes_no_time_and_a_byte_takes_the_latency() -> None:
    curve = Curve(tuple((x, 1e-4 + x / 1e9) for x in (1e4, 1e5, 1e6)))
    assert curve.seconds(0) == 0
    assert curve.seconds(1) == pytest.approx(1e-4, rel=1e-3)


def test_beyond_the_last_point_the_bandwidth_goes_on() -> None:
    curve = Curve(tuple((x, 1e-4 + x / 1e9) for x in (1e4, 1e5, 1e6)))
    assert curve.seconds(5e6) == pytest.approx(1e-4 + 5e6 / 1e9, rel=1e-6)


@pytest.mark.parametrize(
    "points",
    [(), ((0.0, 1.0),), ((1.0, 0.0),), ((1.0, math.nan),), ((-1.0, 1.0),), ((1.0, math.inf),)],
)
def test_what_is_no_measurement_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Curve(points)
    with pytest.raises(ValueError, match="expected"):
        Fit.of(points)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        Curve(((1.0, 1.0),)).seconds(-1)


KNOWN = st.lists(
    st.tuples(st.tuples(st.floats(1, 1e5), st.floats(1, 1e5)), st.floats(1e6, 1e15)),
    min_size=1,
    max_size=6,
)


@given(KNOWN, st.tuples(st.floats(1, 1e5), st.floats(1, 1e5)))
def test_a_rate_between_places_stays_between_their_rates(
    known: list[tuple[tuple[float, ...], float]], at: tuple[float, float]
) -> None:
    found = nearest_mean(known, at)
    assert min(v for _, v in known) <= found <= max(v for _, v in known)


def test_a_rate_at_a_place_is_the_one_measured_there() -> None:
    known = [((64.0, 64.0), 1e9), ((256.0, 256.0), 7e9), ((1024.0, 64.0), 3e9)]
    assert [nearest_mean(known, place) for place, _ in known] == [1e9, 7e9, 3e9]


def test_the_nearest_place_counts_most() -> None:
    known = [((64.0,), 1e9), ((4096.0,), 9e9)]
    assert nearest_mean(known, (96.0,)) < 3e9 < nearest_mean(known, (3000.0,))


def test_no_places_and_no_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        nearest_mean([], (1.0,))
    with pytest.raises(ValueError, match="expected positive sizes"):
        nearest_mean([((1.0,), 1.0)], (0.0,))
