"""Summarize the contents of a checkpoint from its manifest, its values and the sizes of its files,
as rows for tables. Tensors are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import is_unfinished
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import path_in, read_manifest
from onefold.checkpoint.source import KINDS, Item, Source, Stored
from onefold.checkpoint.tensorfile import DTYPES, numel_of
from onefold.inspection.verify import is_like_a_checkpoint
from onefold.wording import few

Row = dict[str, Any]
#: What resumes besides the model and the optimizer.
VALUES = ("scheduler", "scaler", "data", "extra")


def summarize(source: Source, path: Path) -> dict[str, Any]:
    """Summarize `source`, which was opened from `path`: {title: a value, or rows}.
    Raises: CheckpointError: its values cannot be read.
    """
    folder, each = source.folder or path, list(_tensors(source))
    numels = {row["name"]: row["elements"] for row in each if row["kind"] == "parameter"}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    sorts: dict[tuple[str, ...], Row] = {}
    for row in each:
        key = {name: row[name] for name in ("kind", "state", "dtype")}
        sort = sorts.setdefault(
            tuple(key.values()), {**key, "tensors": 0, "elements": 0, "bytes": 0}
        )
        for name, n in (("tensors", 1), ("elements", row["elements"]), ("bytes", row["bytes"])):
            sort[name] += n
    return {
        "path": str(folder),
        "form": source.form,
        "step": source.step,
        "created": source.created,
        "saved by": dict(source.saved_by),
        "parameters": sum(numels.values()),
        "tensors": sorted(sorts.values(), key=lambda row: KINDS.index(row["kind"])),
        "groups": list(_groups(source, numels)),
        "resumes": [{"what": name, "is": value} for name, value in _resumes(source)],
        "files": [
            {"name": p.relative_to(folder).as_posix(), "bytes": p.stat().st_size} for p in files
        ],
        "each tensor": each,
    }


def _tensors(source: Source) -> Iterator[Row]:
    if isinstance(source, FolderSource):
        for r in source.manifest.records:
            numel = sum(piece.where.numel for piece in r.pieces)
            within = few(dict.fromkeys(piece.file for piece in r.pieces), 2)
            yield _tensor(r.item, Stored(DTYPES[r.dtype], r.shape), numel, r.aliases) | {
                "in": within
            }
    else:
        names = source.other_names()
        for item, stored in source.items().items():
            yield _tensor(item, stored, numel_of(stored.shape), names.get(item.name, ()))


def _tensor(item: Item, stored: Stored, numel: int, aliases: Iterable[str]) -> Row:
    return {
        **asdict(item),
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": list(stored.shape),
        "elements": numel_of(stored.shape),
        "bytes": numel * stored.dtype.itemsize,
        "also called": ", ".join(aliases),
    }


def _groups(source: Source, numels: Mapping[str, int]) -> Iterator[Row]:
    own = source.state.get("optimizers", []) if isinstance(source, FolderSource) else []
    for number, groups in enumerate(source.groups() or []):
        name = own[number].get("class") if number < len(own) else None
        for index, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "params"}
            yield {
                "optimizer": name or "optimizer",
                "number": number,
                "group": index,
                "tensors": len(group["params"]),
                "elements": sum(numels.get(n, 0) for n in group["params"]),
                "options": options,
            }


def _resumes(source: Source) -> Iterator[tuple[str, str]]:
    if source.groups():
        states = sorted({item.state for item in source.items() if item.kind == "state"})
        yield "optimizer", ", ".join(states) or "groups alone: it has not stepped"
    if ranks := sum(item.kind == "rng" for item in source.items()):
        yield "random states", f"of {ranks} rank{'s' if ranks > 1 else ''}"
    for name in VALUES:
        # The JSON value itself, so that its tensors are not read
        value = source.state.get(name) if isinstance(source, FolderSource) else source.value(name)
        if value is not None:
            text = str(value)
            yield name, text if len(text) <= 100 else f"{text[:96]} ..."


def listed(root: Path) -> list[Row]:
    """List the checkpoints in `root`, newest first; damaged and unfinished ones are last. `wrong`: why one is
    not complete, judged by names and sizes only.
    """
    left = "belongs to a save under way, or a killed one has left it: the next start removes it"
    found: list[Row] = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if is_unfinished(folder):
            found.append({"name": folder.name, "step": None, "wrong": left})
        elif not folder.name.startswith(".") and is_like_a_checkpoint(folder):
            found.append(glance(folder))
    return sorted(found, key=lambda row: (-1 if row["step"] is None else row["step"], row["name"]))[
        ::-1
    ]


def glance(folder: Path) -> Row:
    """Describe a checkpoint by its manifest and by the names and sizes of its files."""
    row: Row = {"name": folder.name, "step": None}
    wrong = []
    try:
        manifest = read_manifest(folder)
        row |= {
            "step": manifest.step,
            "saved": manifest.created,
            "ranks": manifest.saved_by.get("world_size"),
            "bytes": sum(file.nbytes for file in manifest.files.values()),
        }
        for name, recorded in manifest.files.items():
            path = path_in(folder, name)
            if not path.is_file():
                wrong.append(f"{name} is missing")
            elif (size := path.stat().st_size) != recorded.nbytes:
                wrong.append(f"{name} has {size} bytes and should have {recorded.nbytes}")
    except CheckpointError as error:
        wrong.append(str(error))
    return {**row, "wrong": few(wrong, 3, "; ")}
