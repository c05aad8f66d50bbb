"""The progress of `onefold doctor --calibrate` on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Progress:
    """A progress bar on standard error in a terminal, else one line; nothing if silent."""

    def __init__(self, total: int, counts: list[int], silent: bool) -> None:
        self.total, self.counts, self.silent = total, counts, silent
        self.bar: Any = None
        self.task: Any = None

    def say(self, text: str) -> None:
        """Show that the next measurement begins."""
        if self.bar is not None:
            advance = 1 if self.bar.tasks[0].description else 0
            self.bar.update(self.task, advance=advance, description=text)

    def __enter__(self) -> Callable[[str], None]:
        if self.silent:
            return self.say
        if not sys.stderr.isatty():
            counts = ", ".join(map(str, self.counts))
            print(f"measuring; numbers of ranks: {counts}", file=sys.stderr, flush=True)
            return self.say
        from rich import progress as rich_progress
        from rich.console import Console

        bar, elapsed = rich_progress.BarColumn(), rich_progress.TimeElapsedColumn()
        columns = (bar, elapsed, rich_progress.TextColumn("{task.description}"))
        self.bar = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("", total=self.total)
        self.bar.start()
        return self.say

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
