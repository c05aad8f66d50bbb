"""Where results of the commands lie: one name, one file an ending."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def keep(result: dict[str, Any], markdown: str, output: Path, name: str) -> None:
    """`name`.json and `name`.md in `output`, which is made. Each file is replaced whole, so that a
    kill leaves the former one.
    """
    output.mkdir(parents=True, exist_ok=True)
    for ending, text in (("json", json.dumps(result, indent=1) + "\n"), ("md", markdown)):
        part = output / f".{name}.{ending}.part"
        part.write_text(text)
        part.replace(output / f"{name}.{ending}")
