"""Room `cli`: the command `onefold`.

main ─► listen (Ctrl-C ends at once) ─► options, checks that need no torch ─► torch and the rest of Onefold
"""

from __future__ import annotations

import sys

from onefold.processes.signals import listen

NEEDED = ("typer", "rich", "pydantic", "yaml")


def main() -> None:
    """Entry point of the console script."""
    listen()
    from onefold.processes.signals import quiet_third_parties

    quiet_third_parties()
    try:
        from onefold.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        sys.exit(
            f"the onefold command needs {error.name}, which is not installed: pip install"
            " 'onefold[train]'"
        )
    app()


__all__ = ["main"]
