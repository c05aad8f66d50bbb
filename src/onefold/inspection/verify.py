"""Verify a checkpoint: read every byte as a load does and compare it with the manifest's checksums.
Problems are reported by file and tensor.

    manifest.sha256 ──► manifest.json ──► SHA-256 of each small file, and of each tensor file's header and checksums
                                          └──► CRC-32 of each block of each tensor

No ranks and no model are needed. Several threads read pieces in parallel: computing a checksum
releases the GIL. Each reads a few MiB at a time, so memory is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, Record, StoredPiece
from onefold.checkpoint.tensorfile import CHUNK, DTYPES
from onefold.checkpoint.values import decode
from onefold.reading import open_regular
from onefold.wording import few, in_words

#: (a tensor, one of its pieces in a file).
Inside = tuple[Record, StoredPiece]


@dataclass(frozen=True)
class Problem:
    """A difference from what was saved. `tensor`: the affected tensor; "" for the whole file."""

    file: str
    tensor: str
    what: str


def examine(folder: Path | str) -> list[Problem]:
    """Read and check every byte of the checkpoint in `folder`. Returns all that differs from what was
    saved. If its manifest is damaged, nothing else can be checked.

    Raises:
        CheckpointError: it is not a checkpoint, or it is of another version.
    """
    root = Path(folder)
    if not [*root.glob("manifest.*"), *root.glob("rank-*")]:
        raise CheckpointError(f"{folder} is no Onefold checkpoint, nor the remains of one.")
    try:
        source = FolderSource(root)
    except DamagedCheckpoint as error:
        return [Problem(name, "", str(error)) for name in (MANIFEST, CHECKSUM)]
    found: list[Problem] = []
    inside: dict[str, list[Inside]] = {name: [] for name in source.manifest.files}
    for record in source.manifest.records:
        for piece in record.pieces:
            inside.setdefault(piece.file, []).append((record, piece))
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "onefold-verify")
    with contextlib.closing(source), pool:
        for name, within in inside.items():
            try:
                _check(source, name)
                wrong = pool.map(partial(_wrong_in, source), within)
                for (record, _), what in zip(within, wrong, strict=True):
                    found += [Problem(name, str(record.item), what)] if what else []
            except (CheckpointError, OSError) as error:
                said = in_words(error) if isinstance(error, OSError) else str(error)
                lost = few((str(record.item) for record, _ in within), 3)
                what = f"{said} It holds a part of {lost}." if lost else said
                found.append(Problem(name, "", what))
    return found


def _check(source: FolderSource, name: str) -> None:
    """Check a file, of tensors its header and checksums.
    Raises: CheckpointError, OSError: it is damaged, or cannot be read.
    """
    recorded = source.manifest.files.get(name)
    if recorded is not None and recorded.tensors:
        source.file(name)
    elif name == STATE:
        decode(source.state, lambda number: torch.empty(0))
    else:
        with open(source.path(name), "rb", opener=open_regular) as file:
            source.compare(name, hashlib.file_digest(file, "sha256").hexdigest())


def _wrong_in(source: FolderSource, inside: Inside) -> str:
    """Return what is wrong with a piece; "" if nothing is."""
    record, piece = inside
    dtype, numel = DTYPES[record.dtype], piece.where.numel
    step = CHUNK // dtype.itemsize
    for start in range(0, numel, step):
        out = torch.empty(min(step, numel - start), dtype=dtype, device="cpu")
        try:
            source.read_piece(record, piece, start, start + out.numel(), out)
        except DamagedCheckpoint as error:
            return str(error)
    return ""
