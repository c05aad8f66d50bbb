"""The commands' tables in a terminal, without lines."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str, *columns: str) -> Table:
    """Make a table. Columns that begin with a space hold figures and are aligned to the right."""
    found = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for name in columns:
        found.add_column(
            name.strip(), justify="right" if name.startswith(" ") else "left", no_wrap=True
        )
    return found
