"""Summarize the contents of a checkpoint from its manifest, its values and the sizes of its files,
as rows for tables. Tensors are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.source import KINDS, Source
from onefold.checkpoint.tensorfile import numel_of
from onefold.reading import short

Row = dict[str, Any]
#: What resumes besides the model and the optimizer.
VALUES = ("scheduler", "scaler", "data", "extra")


def summarize(source: Source, path: Path) -> dict[str, Any]:
    """Summarize `source`, which was opened from `path`: {title: a value, or rows}.
    Raises: CheckpointError: its values cannot be read.
    """
    folder, others = source.folder or path, source.other_names()
    each: list[Row] = []
    sorts: dict[tuple[str, ...], Row] = {}
    for item, stored in source.items().items():
        dtype, numel = str(stored.dtype).removeprefix("torch."), numel_of(stored.shape)
        size = {"elements": numel, "bytes": numel * stored.dtype.itemsize}
        tied = {"also called": ", ".join(others.get(item.name, ()))}
        each.append({**asdict(item), "dtype": dtype, "shape": list(stored.shape), **size, **tied})
        kind = {"kind": item.kind, "state": item.state, "dtype": dtype}
        sort = sorts.setdefault(
            tuple(kind.values()), {**kind, **dict.fromkeys(("tensors", *size), 0)}
        )
        for name, count in {"tensors": 1, **size}.items():
            sort[name] += count
    numels = {row["name"]: row["elements"] for row in each if row["kind"] == "parameter"}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
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
        yield "random states", f"ranks: {ranks}"
    for name in VALUES:
        # The JSON value itself, so that its tensors are not read
        value = source.state.get(name) if isinstance(source, FolderSource) else source.value(name)
        if value is not None:
            yield name, short(value)
