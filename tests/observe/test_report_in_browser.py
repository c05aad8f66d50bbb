"""The report in a real, headless Chromium: charts are drawn, nothing complains, nothing sticks out,
at 1280 and at 400 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import WIDTHS, NoBrowserError, chromium, opened
from synthetic_run import BLOCKS, account, beyond, recorded, write_metrics, write_run

from onefold.observe import write_observed, write_report
from onefold.plan.schema import Account
from onefold.recipe import Recipe

pytest.importorskip("plotly", reason="plotly is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.one_in(4)]
TEXT = (
    "h1",
    "h2",
    ".headline",
    ".note",
    ".label",
    ".tile-note",
    "tbody td",
    "thead th",
    "footer p",
)
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
#: Every chart is as wide as its place.
SETTLED = """() => [...document.querySelectorAll('.chart')].every(chart => Number(chart.dataset.width) === chart.clientWidth
  && Math.abs(chart.querySelector('svg.main-svg').clientWidth - chart.clientWidth) <= 1)"""
#: Contrast (WCAG 2, relative luminance) of an element's text on the first opaque ground behind it.
CONTRAST = """selector => { const lum = rgb => { const [r, g, b] = rgb.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const element = document.querySelector(selector); let ground = element;
  const clear = e => getComputedStyle(e).backgroundColor.startsWith('rgba(0, 0, 0, 0');
  while (clear(ground) && ground.parentElement) ground = ground.parentElement;
  const [a, b] = [lum(getComputedStyle(element).color), lum(getComputedStyle(ground).backgroundColor)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05); }"""


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


@pytest.mark.slow
def test_choosing_a_rank_shows_that_ranks_step(browser: Any, report: Path) -> None:
    end = "() => document.querySelector('[data-figure=timeline]').layout.xaxis.range[1]"
    with opened(browser, report, 1280) as seen:
        for rank in (0, 2, 0):
            seen.page.select_option("#rank", str(rank))
            seen.page.wait_for_function(f"({end})() > 0")
            assert seen.page.evaluate(end) == pytest.approx(1000 * recorded(rank).seconds, abs=0.01)
        assert seen.problems == []


@pytest.mark.slow
def test_a_window_that_is_made_narrow_and_wide_again_keeps_fitting(
    browser: Any, report: Path
) -> None:
    with opened(browser, report, 1280) as seen:
        for width in (400, 760, 1280):
            seen.page.set_viewport_size({"width": width, "height": 900})
            seen.page.wait_for_function(SETTLED)
            assert_fits(seen.page)
        assert seen.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(browser: Any, report: Path, scheme: str) -> None:
    with opened(browser, report, 1280, scheme) as seen:
        for selector in (*TEXT, ".verdict.close", ".verdict.near", ".verdict.far"):
            contrast = seen.page.evaluate(CONTRAST, selector)
            assert contrast >= 4.5, (
                f"{selector} has a contrast of {contrast:.2f} in the {scheme} scheme"
            )
        shade = seen.page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (shade < 60) == (scheme == "dark")


@pytest.mark.slow
def test_headings_form_an_outline_and_charts_have_names(browser: Any, report: Path) -> None:
    with opened(browser, report, 1280) as seen:
        headings = seen.page.evaluate(
            "[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)"
        )
        assert headings == ["H1"] + ["H2"] * 8
        named = seen.page.evaluate(
            "[...document.querySelectorAll('.chart')].every(c => c.role === 'img' && c.ariaLabel)"
        )
        titled = """[...document.querySelectorAll('section')].every(
            s => s.ariaLabel || document.getElementById(s.getAttribute('aria-labelledby')))"""
        assert named and seen.page.evaluate(titled)
        assert seen.page.evaluate(
            "document.querySelector('label[for=rank]') !== null && document.documentElement.lang"
            " === 'en'"
        )


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["metrics alone", "bare", "off the device", "crowded"])
def test_poor_and_crowded_runs_fit_too(browser: Any, tmp_path: Path, kind: str, width: int) -> None:
    if kind == "metrics alone":
        write_metrics(tmp_path, steps=1)
        charts = ["loss", "throughput"]
    elif kind == "bare":
        write_observed(tmp_path, 0, 1, Account())
        charts = []
    elif kind == "off the device":
        step = beyond(recorded())
        write_observed(tmp_path, 0, 1, account(step), step=step, recipe=Recipe.zero(3))
        charts = ["memory", "host", "nvme", "timeline", "traffic"]
    else:
        crowd(tmp_path)
        charts = ["memory", "timeline", "traffic", "imbalance"]
    with opened(browser, write_report(tmp_path), width) as seen:
        drawn = seen.page.evaluate(MARKS)
        assert [name for name, *_ in drawn] == charts and all(marks for _, marks, *_ in drawn), (
            drawn
        )
        assert (
            seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            and seen.page.evaluate(OUTSIDE) == []
        )
        assert seen.problems == []


def crowd(folder: Path) -> None:
    """Sixty ranks on two nodes, ninety units with long names, a recipe with all of ZeRO++, and a
    fact that is one long word.
    """
    base = recorded()
    recipe = Recipe.zero(
        3, precision="bf16", second_copy=True, gather_codec="int8", reduce_codec="int4"
    )
    for rank in range(60):
        step = recorded(rank)
        step.moves = [
            replace(
                m,
                unit=f"module.base_model.transformer.layers.{i % 90}",
                between=m.nbytes // 2,
                plain=2 * m.nbytes,
            )
            for i, m in enumerate(base.moves * 8)
        ]
        step.borders = "2 nodes"
        facts = {"checkpoint": "x" * 300}
        write_observed(
            folder,
            rank,
            60,
            account(step),
            recipe=recipe,
            step=step if rank < 3 else None,
            facts=facts,
        )
