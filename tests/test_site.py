"""The site of docs/ builds without a warning (`make docs`): every link leads somewhere, every page
is in the navigation, every name of the API page has a docstring.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Pages that are no guides: records, tables that programs write, a walk through the code.
OTHERS = {
    "ARCHITECTURE.md", "decisions.md", "drill.md", "habits.md", "reach.md", "validation.md",
}  # fmt: skip


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(
            module, reason=f"{module} is not installed: pip install -e '.[docs]' -c constraints.txt"
        )
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [line for line in done.stderr.splitlines() if re.match(r"(WARNING|ERROR)", line)]
    assert done.returncode == 0 and not told, "\n".join(told) or done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:  # opens without a server, fetches nothing
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(
            r'(?:<script[^>]*src|<link[^>]*href|<img[^>]*src)="(https?:[^"]+)', text
        )
        assert not fetched, f"{page.name} fetches {fetched[0]}"
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert '<script src="iframe-worker.js"' in index  # the search, without a server
    assert (tmp_path / "site" / "search" / "search_index.js").stat().st_size > 100_000
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    rows = re.findall(r'<tr class="doc-section-item">\s*<td>\s*<code>(.*?)</code>', api, re.S)
    pairs = [row for row in rows if re.fullmatch(r"\w+(, \w+)+,?", row)]
    assert len(rows) > 100 and not pairs, f"one parameter a line in docstrings, not {pairs}"


def test_code_on_pages_fits_its_column() -> None:
    """100 characters: what is wider scrolls sideways on a screen of 1280 points."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"(?ms)^```[^\n]*\n(.*?)^```", text):
            wide = [line for line in block.splitlines() if len(line) > 100]
            assert not wide, f"{page.name}: {len(wide[0])} columns: {wide[0]}"


def test_a_page_begins_with_what_most_people_need() -> None:
    """A title, then at most six lines or one short block before the first heading's details."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        lines = page.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# ") and lines[1] == "", page.name
        if page.name in OTHERS:
            continue
        first = lines[2 : lines.index("", 2)]
        assert 2 <= len(first) <= 6, f"{page.name} begins with {len(first)} lines, expected about 5"


def test_paragraphs_are_short() -> None:
    """Four lines at most, besides the lines that a page begins with."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name in OTHERS:
            continue
        prose = re.sub(r"(?ms)^```.*?^```\s*$", "", page.read_text(encoding="utf-8"))
        for part in prose.split("\n\n")[2:]:
            lines = [line for line in part.splitlines() if line.strip()]
            told = [line for line in lines if not re.match(r"\s|[|\-*#<!:]|\d+\.", line)]
            assert len(told) <= 4, f"{page.name}: {len(told)} lines from {told[0]!r}"


def test_every_public_name_is_on_the_api_page() -> None:
    import onefold

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {path.rpartition(".")[2] for path in re.findall(r"(?m)^::: (\S+)$", text)}
    rooms = {"checkpoint", "deepspeed", "ema", "observe", "parallel", "plan"}
    rooms |= {"Engine", "ShardedParameter"}
    missing = sorted(set(onefold.__all__) - rooms - named)
    assert not missing, f"docs/api.md does not have {', '.join(missing)}"
