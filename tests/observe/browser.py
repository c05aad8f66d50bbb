"""A headless Chromium for tests of the report: the system's, or the one that playwright installed.

`python tests/observe/browser.py RUN` writes the screenshots of a run's report that stand in the
docs.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: A chart that has been drawn.
DRAWN = ".plotly-graph-div .main-svg"


class NoBrowserError(Exception):
    """There is no browser to test in; the message says how to get one."""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A running browser.

    Raises:
        NoBrowserError: playwright or Chromium is not installed.
    """
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ModuleNotFoundError:
        raise NoBrowserError("playwright is not installed: pip install playwright") from None
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            raise NoBrowserError(
                "no Chromium was found: apt-get install chromium, or playwright install chromium"
            )
        # In containers tests run as root, whom Chromium's sandbox refuses; the page is our own.
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page that has drawn all its charts, and what went wrong on the way."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def opened(browser: Any, path: Path, width: int) -> Iterator[Opened]:
    """`path` in a window `width` pixels wide, without any network."""
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    try:
        seen = Opened(context.new_page())
        seen.page.set_default_timeout(300_000)  # ms; it only bounds a hang
        seen.page.on(
            "console",
            lambda m: (
                seen.problems.append(f"{m.type}: {m.text}")
                if m.type in ("error", "warning")
                else None
            ),
        )
        seen.page.on("pageerror", lambda error: seen.problems.append(f"uncaught: {error}"))
        seen.page.on(
            "request",
            lambda r: seen.requests.append(r.url) if not r.url.startswith("data:") else None,
        )
        seen.page.goto(path.resolve().as_uri())
        seen.page.wait_for_selector(DRAWN, state="attached")
        yield seen
    finally:
        context.close()


def screenshots(report: Path, folder: Path) -> list[Path]:
    """Write `report-1280.png`, in few colours, hence small."""
    image = importlib.import_module("PIL.Image")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report-1280.png"
    with chromium() as browser, opened(browser, report, 1280) as seen:
        seen.page.screenshot(path=str(path), full_page=True)
    image.open(path).convert("RGB").quantize(200).save(path, optimize=True)
    return [path]


if __name__ == "__main__":
    from onefold.observe.report import write_report

    for path in screenshots(
        write_report(sys.argv[1]), Path(__file__).parents[2] / "docs" / "images"
    ):
        print(path)
