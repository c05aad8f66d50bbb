"""Tables of the commands, without lines, as people read them in a terminal."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str, *columns: str) -> Table:
    """Names to the left, figures (columns that begin with a space) to the right."""
    found = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for name in columns:
        found.add_column(
            name.strip(), justify="right" if name.startswith(" ") else "left", no_wrap=True
        )
    return found
