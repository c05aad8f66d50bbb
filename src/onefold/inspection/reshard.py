"""Rewrite a checkpoint in another number of files: one for each of N ranks, or a single one.

A load does not need this, because it can read pieces of any size. It is useful to copy a checkpoint
(64 files into one), and for programs that read one file per process.

    tensor          0 ............................. 768
    before  rank-00000 |        | rank-00001           |
    after   rank-00000 | rank-00001 | rank-00002       |

Parameters and optimizer states are divided evenly; everything else is in the first file. What is read
is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Unfinished, flush
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FileRecord,
    Manifest,
    Record,
    StoredPiece,
    key_of,
    path_in,
    rank_file,
    write_manifest,
)
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import DTYPES, Planned, numel_of, write_tensors
from onefold.layout.holders import BoxInterval, whole_region
from onefold.reading import read_bytes

#: Bytes of a tensor in memory at a time.
BLOCK = 64 << 20

Advance = Callable[[int], object]
Cut = tuple[Record, BoxInterval]


def reshard(
    source: Path | str,
    target: Path | str,
    ranks: int,
    *,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Path:
    """Write the checkpoint `source` to `target`, in files for `ranks` ranks.

    Args:
        overwrite: replace a checkpoint at `target` (which may be `source`) after the new one is
            complete.
        advance: called with the bytes of tensors written since its last call.

    Returns:
        target.

    Raises:
        CheckpointError: the source is damaged, or `target` cannot be written to. No part of the new
            checkpoint remains.
    """
    if ranks < 1:
        raise CheckpointError(f"a checkpoint for {ranks} ranks was asked for; expected 1 or more.")
    target, opened = Path(target), FolderSource(Path(source))
    with contextlib.closing(opened), Unfinished(target, overwrite) as made:
        write_manifest(made.folder, _write(opened, made.folder, ranks, advance or (lambda n: None)))
        for name in (MANIFEST, CHECKSUM):
            flush(made.folder / name)
        made.commit(overwrite)
    return target


def _write(source: FolderSource, folder: Path, ranks: int, advance: Advance) -> Manifest:
    """Write all files except the manifest, which is returned."""
    manifest = source.manifest
    files: dict[str, FileRecord] = {}
    pieces: dict[Item, list[StoredPiece]] = {record.item: [] for record in manifest.records}
    for rank, cuts in enumerate(_cuts(manifest, ranks)):
        name = rank_file(rank)
        planned = [
            Planned(key_of(r.item, where), DTYPES[r.dtype], (where.numel,), partial(_read, source, r, where, advance))
            for r, where in cuts
        ]  # fmt: skip
        files[name] = FileRecord(*write_tensors(folder / name, planned), tensors=True)
        for r, where in cuts:
            pieces[r.item].append(StoredPiece(name, where))
    for name, recorded in manifest.files.items():
        if not recorded.tensors:
            files[name] = _copy(source.folder, folder, name, recorded)
    records = tuple(replace(r, pieces=tuple(pieces[r.item])) for r in manifest.records)
    saved_by = {**manifest.saved_by, "resharded_for": ranks}
    return Manifest(records, files, manifest.step, manifest.created, saved_by)


def _cuts(manifest: Manifest, ranks: int) -> list[list[Cut]]:
    """Return the contents of each rank's file: tensors, and which elements of them."""
    out: list[list[Cut]] = [[] for _ in range(ranks)]
    for record in manifest.records:
        numel, whole = numel_of(record.shape), whole_region(record.shape)
        shares = ranks if record.item.kind in ("parameter", "state") else 1
        for rank in range(shares):
            where = BoxInterval(whole, numel * rank // shares, numel * (rank + 1) // shares)
            out[rank] += [(record, where)] if where.numel else []
    return out


def _read(
    source: FolderSource, record: Record, where: BoxInterval, advance: Advance
) -> Iterator[torch.Tensor]:
    step = BLOCK // DTYPES[record.dtype].itemsize
    for _, part in source.blocks(record.item, where.start, where.stop, step):
        yield part
        advance(part.nbytes)


def _copy(source: Path, folder: Path, name: str, recorded: FileRecord) -> FileRecord:
    """Copy a small file unchanged and verify its checksum."""
    path = path_in(source, name)
    data = read_bytes(path) if path.exists() else b""
    if hashlib.sha256(data).hexdigest() != recorded.sha256:
        raise CheckpointError(
            f"{path} is missing or damaged. Run `onefold checkpoint verify {source}` to see what else"
            " is."
        )
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    flush(folder / name)
    return recorded
