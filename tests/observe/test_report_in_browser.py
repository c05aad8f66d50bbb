"""The report in a real, headless Chromium: charts are drawn, nothing complains, nothing sticks out,
at 1280 and at 400 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, NoBrowserError, chromium, opened
from synthetic_run import BLOCKS, write_run

from onefold.observe import write_report

pytest.importorskip("plotly", reason="plotly is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.one_in(4)]
CHARTS = ["loss", "throughput", "memory", "timeline", "traffic", "imbalance"]

#: Of each chart: its name, how many marks with an extent it has drawn, and its size.
MARKS = """() => [...document.querySelectorAll('.chart')].map(chart => {
  const marks = [...chart.querySelectorAll('.scatterlayer path, .barlayer path')].filter(path => {
    const box = path.getBBox(); return box.width > 0 || box.height > 0; });
  const box = chart.getBoundingClientRect();
  return [chart.dataset.figure, marks.length, box.width, box.height]; })"""
#: Everything of the page whose right edge lies outside of the window.
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1) && !e.closest('svg') && !e.closest('.plot-container'); })
  .map(e => e.tagName + '.' + e.className)"""
#: Texts of the charts that stick out of their chart, and the smallest size of letters.
TEXTS = """() => { const out = [], sizes = [];
  for (const chart of document.querySelectorAll('.chart')) {
    const frame = chart.getBoundingClientRect();
    for (const text of chart.querySelectorAll('svg.main-svg text')) {
      const box = text.getBoundingClientRect();
      if (!box.width || !text.textContent.trim()) continue;
      sizes.push(parseFloat(getComputedStyle(text).fontSize));
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        out.push(chart.dataset.figure + ': ' + text.textContent); }
  }
  return [out, Math.min(...sizes)]; }"""


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


def assert_fits(page: Any) -> None:
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, (
        f"the page scrolls sideways: {page.evaluate(OUTSIDE)}"
    )
    assert page.evaluate(OUTSIDE) == []
    clipped, smallest = page.evaluate(TEXTS)
    assert clipped == [], "texts stick out of their chart"
    assert smallest >= 9.5, f"letters of {smallest} px"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn_and_nothing_complains(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    with opened(browser, report, width, scheme) as seen:
        drawn = {
            name: (marks, across, down) for name, marks, across, down in seen.page.evaluate(MARKS)
        }
        assert list(drawn) == CHARTS
        assert drawn["memory"][0] >= 7 + 2, "seven categories, the plan's peak and its bound"
        assert drawn["timeline"][0] >= 5 * BLOCKS, (
            "forward, backward, two gathers and a reduction of each block"
        )
        assert (
            drawn["traffic"][0] >= 2 * BLOCKS
            and drawn["imbalance"][0] >= 4 * 3
            and drawn["loss"][0] >= 3
        )
        assert all(
            0.6 * width <= across <= width and down >= 150
            for _, across, down in drawn.values()
            if across > 600 or width == 400
        ), drawn
        assert_fits(seen.page)
        assert seen.problems == []
        assert seen.requests == [report.resolve().as_uri()], "the page is to open offline"
