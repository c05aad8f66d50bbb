"""Changes of a checkpoint: in silence, or with checksums that are right again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line

Change = Callable[[dict[str, Any]], object]


def flip(file: Path, at: int = -3, by: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= by
    file.write_bytes(data)


def write_manifest(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    (folder / CHECKSUM).write_text(checksum_line(text.encode()))


def change_manifest(folder: Path, change: Change) -> None:
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    write_manifest(folder, json.dumps(body))


def write_state(folder: Path, text: str) -> None:
    (folder / STATE).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    record = {"sha256": digest, "tensors": False}
    change_manifest(folder, lambda body: body["files"].update({STATE: record}))


def change_state(folder: Path, change: Change) -> None:
    state = json.loads((folder / STATE).read_text())
    change(state)
    write_state(folder, json.dumps(state))
