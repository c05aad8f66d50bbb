"""The report in a real, headless Chromium: charts are drawn, nothing complains, nothing sticks out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NoBrowserError, chromium, opened
from synthetic_run import BLOCKS, write_run

from onefold.observe.report import write_report

pytest.importorskip("plotly", reason="plotly is not installed")
pytestmark = pytest.mark.slow
CHARTS = ["loss", "tokens", "memory", "timeline", "traffic", "parts of steps"]

#: Of each chart: how many marks with an extent it has drawn, and its size.
MARKS = """() => [...document.querySelectorAll('.plotly-graph-div')].map(chart => {
  const marks = [...chart.querySelectorAll('.scatterlayer path, .barlayer path')].filter(path => {
    const box = path.getBBox(); return box.width > 0 || box.height > 0; });
  const box = chart.getBoundingClientRect();
  return [marks.length, box.width, box.height]; })"""
#: Everything of the page whose right edge lies outside of the window.
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1) && !e.closest('svg') && !e.closest('.plot-container'); })
  .map(e => e.tagName + '.' + e.className)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with chromium() as running:
            yield running
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("runs") / "a-run"))


def test_every_chart_is_drawn_and_nothing_complains(browser: Any, report: Path) -> None:
    with opened(browser, report, 1280) as seen:
        found = seen.page.evaluate(MARKS)
        marked = [marks for marks, across, down in found if across > 500 and down > 150]
        drawn = dict(zip(CHARTS, marked, strict=True))
        assert drawn["memory"] >= 7, "seven categories"
        assert drawn["timeline"] >= 3 * BLOCKS, "two gathers and a reduction of each block"
        assert drawn["traffic"] >= 2 * BLOCKS and drawn["loss"] >= 2
        assert seen.page.evaluate(OUTSIDE) == []
        assert seen.problems == []
        assert seen.requests == [report.resolve().as_uri()], "the page is to open offline"
