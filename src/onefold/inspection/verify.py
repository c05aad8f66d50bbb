"""Verify a checkpoint: read every byte as a load does and compare it with the manifest's checksums.
Problems are reported by file and tensor.

    manifest.sha256 ──► manifest.json ──► SHA-256 of each small file, and of each tensor file's header and checksums
                                          └──► CRC-32 of each block of each tensor

No ranks and no model are needed. Several threads read pieces in parallel: computing a checksum
releases the GIL. Each reads a few MiB at a time, so memory is bounded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.folder import in_words
from onefold.checkpoint.folder_source import state_of_text
from onefold.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    STATE,
    FileRecord,
    Record,
    StoredPiece,
    key_of,
    path_in,
    read_manifest,
)
from onefold.checkpoint.tensorfile import CHUNK, DTYPES, TensorFile
from onefold.checkpoint.values import decode
from onefold.reading import open_regular
from onefold.wording import few

Advance = Callable[[int], object]
#: (a tensor, one of its pieces in a file).
Inside = tuple[Record, StoredPiece]


@dataclass(frozen=True)
class Problem:
    """A difference from what was saved. `tensor`: the affected tensor; "" for the whole file."""

    file: str
    tensor: str
    what: str


@dataclass
class Examination:
    """The result of verifying a checkpoint."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    nbytes: int = 0


def examine(folder: Path | str, advance: Advance | None = None) -> Examination:
    """Read and check every byte of the checkpoint in `folder`. If the result has no `problems`, the
    checkpoint is as it was saved. If its manifest is damaged, nothing else can be checked.

    Args:
        advance: called, from several threads, with the bytes of tensors read since its last call.

    Raises:
        CheckpointError: it is not a checkpoint, or it is of another version.
    """
    out = Examination(Path(folder))
    if not is_like_a_checkpoint(out.folder):
        there = f"it has no {MANIFEST}" if out.folder.is_dir() else "it is a file"
        there = there if out.folder.exists() else "there is no such folder"
        raise CheckpointError(f"{folder} is no Onefold checkpoint: {there}.")
    try:
        manifest = read_manifest(out.folder)
    except DamagedCheckpoint as error:
        out.problems = [Problem(name, "", str(error)) for name in (MANIFEST, CHECKSUM)]
        return out
    inside: dict[str, list[Inside]] = {name: [] for name in manifest.files}
    for record in manifest.records:
        for piece in record.pieces:
            inside.setdefault(piece.file, []).append((record, piece))
    small = sum((out.folder / name).stat().st_size for name in (MANIFEST, CHECKSUM))
    out.nbytes = small + sum(file.nbytes for file in manifest.files.values())
    out.files, out.tensors = len(manifest.files) + 2, len(manifest.records)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "onefold-verify") as pool:
        for name, within in inside.items():
            try:
                for tensor, what in _check(out.folder, name, manifest.files, within, pool, advance):
                    out.problems.append(Problem(name, tensor, what))
            except (CheckpointError, OSError) as error:
                said = in_words(error) if isinstance(error, OSError) else str(error)
                lost = few((str(record.item) for record, _ in within), 3)
                what = f"{said} It holds a part of {lost}." if lost else said
                out.problems.append(Problem(name, "", what))
    return out


def is_like_a_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint or the remains of one."""
    return folder.is_dir() and (
        (folder / MANIFEST).exists()
        or (folder / CHECKSUM).exists()
        or any(folder.glob("rank-[0-9]*.safetensors"))
    )


def _check(
    folder: Path,
    name: str,
    files: Mapping[str, FileRecord],
    inside: list[Inside],
    pool: ThreadPoolExecutor,
    advance: Advance | None,
) -> Iterator[tuple[str, str]]:
    """Yield ("" or a tensor of it, what is wrong) of a file.
    Raises: CheckpointError, OSError: it cannot be read at all.
    """
    path, recorded = path_in(folder, name), files.get(name)
    if recorded is None:
        yield "", f"{MANIFEST} names it and does not list it."
    elif recorded.tensors:
        with TensorFile(path, checked=True) as file:
            if file.digest != recorded.sha256:
                yield "", "its header (names and places of tensors) or its checksums are damaged."
                return
            for (record, _), what in zip(
                inside, pool.map(partial(_wrong_in, file, advance), inside), strict=True
            ):
                if what:
                    yield str(record.item), what
    else:
        with open(path, "rb", opener=open_regular) as whole:
            if hashlib.file_digest(whole, "sha256").hexdigest() != recorded.sha256:
                yield "", "its bytes are not those that were saved."
            elif name == STATE:
                whole.seek(0)
                decode(state_of_text(whole.read(), path), lambda number: torch.empty(0))


def _wrong_in(file: TensorFile, advance: Advance | None, inside: Inside) -> str:
    """Return what is wrong with a piece; "" if nothing is."""
    record, piece = inside
    key, dtype, numel = key_of(record.item, piece.where), DTYPES[record.dtype], piece.where.numel
    span = file.header.get(key)
    if span is None or (span.dtype, span.shape) != (dtype, (numel,)):
        return "it is not there as the manifest says."
    step = CHUNK // dtype.itemsize
    for start in range(0, numel, step):
        out = torch.empty(min(step, numel - start), dtype=dtype, device="cpu")
        try:
            file.read(key, start, start + out.numel(), out)
        except DamagedCheckpoint:
            return f"elements {start} to {start + out.numel()}: the bytes are not those that were saved."
        if advance is not None:
            advance(out.nbytes)
    return ""
