"""The room is quick to import: what draws, serves a browser or writes event files comes when it is
asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ranks import absolute_path


def test_importing_the_room_brings_no_library_of_the_report() -> None:
    code = (
        "import json, sys, onefold.observe, onefold.observe.report; print(json.dumps([m for m in"
        " ('plotly', 'tensorboard', 'typer', 'rich', 'pydantic', 'transformers') if m in"
        " sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": absolute_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout) == []
