"""Room `cli`: the command `onefold`."""

from __future__ import annotations

import sys

NEEDED = ("typer", "rich", "pydantic", "yaml")


def main() -> None:
    """Entry point of the console script."""
    try:
        from onefold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(f"the onefold command needs {error.name}, which is not installed: pip install 'onefold[train]'")
    app()


__all__ = ["main"]
