"""The report without a browser: what is on the page, what is said to be missing, and that nothing
of it can break out of its place.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_run import (
    account,
    recorded,
    write_metrics,
    write_run,
)

from onefold.observe import RunFileError, write_observed, write_report
from onefold.observe.report import build
from onefold.observe.report.tables import read_metrics
from onefold.plan.schema import Account
from onefold.recipe import Recipe

pytest.importorskip("plotly", reason="plotly is not installed")
SECTIONS = {
    "loss",
    "throughput",
    "memory",
    "timeline",
    "traffic",
    "comparison",
    "recipe",
    "imbalance",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a-run")


class Outline(HTMLParser):
    """Its tags, and what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attrs
            if name in ("src", "href") and value and not value.startswith("data:")
        ]


def outline(path: Path) -> Outline:
    found = Outline()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def test_a_whole_run_has_every_section_and_misses_nothing(run: Path) -> None:
    report = build(run)
    assert report.missing == {}
    assert set(report.figures) | set(report.tables) == SECTIONS


def test_the_page_is_one_file_that_loads_nothing(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page = outline(path)
    assert page.loads == [] and "iframe" not in page.tags
    assert page.tags.count("h2") == len(SECTIONS)


def test_predicted_stands_beside_measured_with_a_verdict(run: Path) -> None:
    lines = {line.name: line for line in build(run).tables["comparison"]}
    assert lines["at rest: all"].verdict == "close" and lines["at rest: all"].ratio == "1.000"
    assert lines["time: exposed communication"].verdict == "far"
    assert lines["bound of the peak"].measured == "–" and lines["bound of the peak"].verdict == ""
    assert lines["MFU"].predicted == "43.0%"


@pytest.mark.parametrize("kept", ["metrics", "observed", "bare"])
def test_what_is_missing_is_named_with_how_to_get_it(tmp_path: Path, kept: str) -> None:
    if kept == "metrics":
        write_metrics(tmp_path, steps=3)
        expected = SECTIONS - {"loss", "throughput"}
    elif kept == "observed":
        write_run(tmp_path)
        (tmp_path / "metrics.jsonl").unlink()
        expected = {"loss", "throughput"}
    else:
        write_observed(tmp_path, 0, 1, Account())
        expected = SECTIONS
    report = build(tmp_path)
    assert set(report.missing) == expected
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count('class="missing"') == len(expected)


def test_names_of_a_run_are_text_on_the_page_and_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    step = recorded()
    step.moves = [
        type(m)(m.move, evil, m.nbytes, m.dtype, m.phase, m.launched, m.landed, m.exposed)
        for m in step.moves
    ]
    write_observed(
        tmp_path, 0, 4, account(step), step=step, facts={evil: evil}, recipe=Recipe.zero(3)
    )
    path = write_report(tmp_path)
    assert "b" not in outline(path).tags
    assert "<script>alert" not in path.read_text(encoding="utf-8")


def test_an_interrupted_metrics_file_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    write_metrics(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + '\n{"step": 5, "lo')
    found = read_metrics(tmp_path)
    assert (
        found is not None
        and [row["step"] for row in found.rows] == [1, 2, 3, 4]
        and found.summary == {}
    )
    path.write_text("\n".join([lines[0], "{broken", lines[1]]))
    with pytest.raises(RunFileError, match=r"metrics\.jsonl, line 2, is not JSON"):
        read_metrics(tmp_path)


def test_what_is_no_run_is_refused_with_a_sentence(tmp_path: Path, run: Path) -> None:
    with pytest.raises(RunFileError, match="is not a folder: give the output folder of a run"):
        write_report(tmp_path / "nothing")
    with pytest.raises(RunFileError, match=r"holds neither metrics\.jsonl nor observed\.json"):
        write_report(tmp_path)
    with pytest.raises(RunFileError, match="is a folder: name the file to write"):
        write_report(run, tmp_path)
