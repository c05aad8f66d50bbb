"""A copy of the package with a few lines more, and a function of a test that runs with it in a process
of its own.

What a page says of a new codec or tier ("it needs these files") is tried with one that is made up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "src" / "onefold"
#: What is in place of what, by file of the package; a file that is not there yet, whole.
Changes = Mapping[str, Mapping[str, str] | str]


def extended(folder: Path, changes: Changes) -> Path:
    """Copy the package to `folder`, with these changes; each text has to be there once."""
    copy = folder / "onefold"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, new in changes.items():
        path = copy / name
        if isinstance(new, str):
            assert not path.exists(), name
            path.write_text(new, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        for before, after in new.items():
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        path.write_text(text, encoding="utf-8")
    return folder


def run_there(folder: Path, function: Callable[..., Any], *args: str) -> Any:
    """Return what `function` of a test module returns (plain data) where `folder` has the package."""
    room = Path(function.__code__.co_filename).resolve().parent
    script = (
        f"import json, sys, onefold, {function.__module__} as there;"
        f" assert onefold.__file__.startswith({str(folder)!r}), onefold.__file__;"
        f" print(json.dumps(there.{function.__name__}(*sys.argv[1:])))"
    )
    path = os.pathsep.join(map(str, (folder, HERE, room)))
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
