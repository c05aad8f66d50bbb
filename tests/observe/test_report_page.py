"""The report without a browser: what is on the page, and that nothing of it can break out of its
place.
"""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_run import (
    account,
    recorded,
    write_metrics,
    write_run,
)

from onefold.observe.report import sections, write_report
from onefold.observe.runfile import RunFileError, read_metrics, write_observed
from onefold.plan.schema import Account

pytest.importorskip("plotly", reason="plotly is not installed")
OF = "rank 0, which held most"
SECTIONS = [
    "Run",
    "Loss",
    "Tokens a second",
    "Predicted and measured",
    f"Memory of {OF}: device",
    f"Timeline of {OF}",
    f"MiB sent in a step by {OF}",
    "Parts of each rank's step",
    "Recipe",
]


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


def test_the_page_has_every_section_in_one_file_that_loads_nothing(run: Path) -> None:
    assert list(sections(run)) == SECTIONS
    path = write_report(run)
    assert path == run / "report.html"
    page = outline(path)
    assert page.loads == [] and "iframe" not in page.tags
    assert page.tags.count("h2") == len(SECTIONS)


def test_predicted_stands_beside_measured(run: Path) -> None:
    rows = {row["of one rank"]: row for row in sections(run)["Predicted and measured"]}
    assert rows["at rest"]["measured ÷ predicted"] == "1.000"
    assert rows["at rest"]["predicted"] == rows["at rest"]["measured"]
    assert float(rows["a step takes: exposed communication"]["measured ÷ predicted"]) < 0.9
    assert rows["MFU"]["predicted"] == "43.0%"


@pytest.mark.parametrize("kept", ["metrics", "observed", "bare"])
def test_what_a_run_did_not_leave_has_no_section(tmp_path: Path, kept: str) -> None:
    if kept == "metrics":
        write_metrics(tmp_path, steps=3)
        expected = {"Loss", "Tokens a second"}
    elif kept == "observed":
        write_run(tmp_path)
        (tmp_path / "metrics.jsonl").unlink()
        expected = {*SECTIONS} - {"Loss", "Tokens a second"}
    else:
        write_observed(tmp_path, 0, 1, Account())
        expected = {"Run"}
    assert set(sections(tmp_path)) == expected
    assert outline(write_report(tmp_path)).tags.count("h2") == len(expected)


def test_names_of_a_run_are_text_on_the_page_and_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    step = recorded()
    step.moves = [replace(m, unit=evil) for m in step.moves]
    facts = {evil: evil, "recipe": evil}
    write_observed(tmp_path, 0, 4, account(step), step=step, facts=facts)
    path = write_report(tmp_path)
    assert "b" not in outline(path).tags
    assert "<script>alert" not in path.read_text(encoding="utf-8")


def test_an_interrupted_metrics_file_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    write_metrics(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + '\n{"step": 5, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    for broken in ("{broken", '{"a":' * 100_000, '{"step": ' + "9" * 5000 + "}"):
        path.write_text("\n".join([lines[0], broken, lines[1]]))
        with pytest.raises(RunFileError, match=r"metrics\.jsonl, line 2, is not JSON"):
            read_metrics(tmp_path)
