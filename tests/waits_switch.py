"""Which wait is taken out now, for a copy of the source in which `waits_taken_out.py` has put a
switch at every wait.

It works in every process that has the copy: in ranks too, which are forked when the package is
already imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The folder of two files: `out` holds the number of the wait that is taken out, `reached` the
#: numbers of the waits that a test has come to.
FOLDER = "ONEFOLD_TEST_WAITS"

_out: int | None = None
_reached: set[int] = set()


def forget() -> None:
    """Read again which wait is out, and note again which are reached."""
    global _out
    _out = None
    _reached.clear()


os.register_at_fork(after_in_child=forget)


def nothing(*_: object, **__: object) -> None:
    """In the place of a wait: its arguments are computed all the same."""


def no_context(*_: object, **__: object) -> Any:
    """In the place of a context."""
    return contextlib.nullcontext()


def switched(number: int, plain: Callable[..., Any], context: bool) -> Callable[..., Any]:
    """Return what is called at the wait with this number."""
    global _out
    if _out is None:
        _out = int((Path(os.environ[FOLDER]) / "out").read_text() or -1)
    if number not in _reached:
        _reached.add(number)
        with open(Path(os.environ[FOLDER]) / "reached", "a") as file:
            file.write(f"{number}\n")
    if number != _out:
        return plain
    return no_context if context else nothing
