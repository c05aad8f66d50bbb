"""Summarize the contents of a checkpoint from its manifest, its values and the sizes of its files.
Tensors are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import is_unfinished
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, path_in, read_manifest
from onefold.checkpoint.source import KINDS, Item, Source
from onefold.checkpoint.tensorfile import CODES, DTYPES, numel_of
from onefold.inspection.verify import is_like_a_checkpoint
from onefold.wording import few


@dataclass(frozen=True)
class SortSummary:
    """All tensors of one kind, state and dtype: their number, elements and bytes."""

    kind: str
    state: str
    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class TensorSummary:
    """One tensor. `files`: the files that hold its pieces."""

    item: Item
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    aliases: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupSummary:
    """A parameter group. `number`: its optimizer's number. `index`: the group's index in it."""

    optimizer: str
    number: int
    index: int
    names: tuple[str, ...]
    elements: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """The contents of a checkpoint.

    Attributes:
        form: "Onefold", "Hugging Face" or "DeepSpeed".
        created: ISO date and time, UTC; "" if it is not known.
        saved_by: versions, ranks, stage and recipe of the run that saved.
        resumes: the other things that a run resumes, described in words.
        files: {name: size in bytes}.
    """

    path: Path
    form: str
    step: int | None
    created: str
    saved_by: Mapping[str, Any]
    sorts: tuple[SortSummary, ...]
    tensors: tuple[TensorSummary, ...]
    groups: tuple[GroupSummary, ...]
    resumes: Mapping[str, str]
    files: Mapping[str, int]

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters. Tied parameters count once."""
        return sum(s.elements for s in self.sorts if s.kind == "parameter")

    @property
    def model_files(self) -> list[str]:
        """Files for other libraries: config.json, a tokenizer."""
        own = (MANIFEST, CHECKSUM, STATE)
        return [n for n in self.files if n not in own and not n.endswith((".safetensors", ".pt"))]


def summarize(source: Source, path: Path) -> Summary:
    """Summarize `source`, which was opened from `path`.
    Raises: CheckpointError: its values cannot be read.
    """
    own = source if isinstance(source, FolderSource) else None
    folder, tensors = source.folder or path, tuple(_tensors(source, own))
    numels = {t.item.name: numel_of(t.shape) for t in tensors if t.item.kind == "parameter"}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return Summary(
        path=folder,
        form=source.form,
        step=source.step,
        created=source.created,
        saved_by=source.saved_by,
        sorts=tuple(_sorts(tensors)),
        tensors=tensors,
        groups=tuple(_groups(source, own, numels)),
        resumes=_resumes(own, source),
        files={p.relative_to(folder).as_posix(): p.stat().st_size for p in files},
    )


def _tensors(source: Source, own: FolderSource | None) -> Iterator[TensorSummary]:
    names = source.other_names()
    for item, stored in source.items().items():
        aliases = tuple(names.get(item.name, ())) if item.kind == "parameter" else ()
        for record in own.records_of(item) if own else ():
            files = tuple(dict.fromkeys(piece.file for piece in record.pieces))
            nbytes = sum(p.stop - p.start for p in record.pieces) * DTYPES[record.dtype].itemsize
            yield TensorSummary(record.item, record.dtype, record.shape, nbytes, aliases, files)
        if own is None:
            code = CODES.get(stored.dtype, str(stored.dtype).removeprefix("torch."))
            nbytes = numel_of(stored.shape) * stored.dtype.itemsize
            yield TensorSummary(item, code, tuple(stored.shape), nbytes, aliases)


def _sorts(tensors: Iterable[TensorSummary]) -> list[SortSummary]:
    counts: dict[tuple[str, str, str], list[int]] = {}
    for t in tensors:
        count = counts.setdefault((t.item.kind, t.item.state, t.dtype), [0, 0, 0])
        for i, n in enumerate((1, numel_of(t.shape), t.nbytes)):
            count[i] += n
    order = {kind: i for i, kind in enumerate(KINDS)}
    keys = sorted(counts, key=lambda key: (order.get(key[0], len(order)), *key[1:]))
    return [SortSummary(*key, *counts[key]) for key in keys]


def _groups(
    source: Source, own: FolderSource | None, numels: Mapping[str, int]
) -> Iterator[GroupSummary]:
    stored = source.groups() or []
    classes = [o.get("class", "") for o in own.state.get("optimizers", [])] if own else []
    for number, groups in enumerate(stored):
        for index, group in enumerate(groups):
            names = tuple(group["params"])
            options = {key: value for key, value in group.items() if key != "params"}
            name = classes[number] if number < len(classes) else ""
            numel = sum(numels.get(n, 0) for n in names)
            yield GroupSummary(name or "optimizer", number, index, names, numel, options)


def _resumes(own: FolderSource | None, source: Source) -> dict[str, str]:
    out = {}
    if source.groups():
        states = sorted({item.state for item in source.items() if item.kind == "state"})
        out["optimizer"] = ", ".join(states) if states else "groups alone: it has not stepped"
    state = own.state if own is not None else {}
    for name in ("scheduler", "scaler"):
        # The JSON value itself, so that its tensors are not read
        value = state.get(name) if own is not None else source.value(name)
        if value is not None:
            out[name] = _in_short(value)
    if own is None:
        return out
    if (data := state.get("data")) is not None:
        each = f"a position for each of {len(data.get('ranks', ()))} ranks"
        out["data"] = _in_short(data["all"]) if "all" in data else each
    ranks = sum(item.kind == "rng" for item in own.records)
    if ranks:
        out["random states"] = f"of {ranks} rank{'s' if ranks > 1 else ''}"
    if state.get("extra") is not None:
        out["extra"] = _in_short(state["extra"])
    return out


def _in_short(value: Any, most: int = 100) -> str:
    """Return a value of state.json as one line of text."""
    text = str(value)
    if isinstance(value, dict) and value and not next(iter(value)).startswith("$"):
        plain = {k: v for k, v in value.items() if isinstance(v, (bool, int, float, str, NoneType))}
        named = [f"{k} {v}" for k, v in plain.items()]
        text = ", ".join([*named, *(k for k in value if k not in plain)])
    return text if len(text) <= most else text[: most - 4] + " ..."


# -- a folder of checkpoints -----------------------------------------------------------------------


LEFT = "belongs to a save under way, or a killed one has left it: the next start removes it"


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a folder. `wrong`: why it is not complete, judged by names and sizes only."""

    path: Path
    step: int | None = None
    created: str = ""
    ranks: int | None = None
    nbytes: int = 0
    wrong: str = ""
    saved_by: Mapping[str, Any] = field(default_factory=dict)


def listed(root: Path) -> list[Listed]:
    """List the checkpoints in `root`, newest first; damaged and unfinished ones are last."""
    found = []
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if is_unfinished(folder):
            found.append(Listed(folder, wrong=LEFT))
        elif not folder.name.startswith(".") and is_like_a_checkpoint(folder):
            found.append(glance(folder))
    steps = {c.path: -1 if c.step is None else c.step for c in found}
    return sorted(found, key=lambda c: (c.step is not None, steps[c.path], c.path.name))[::-1]


def glance(folder: Path) -> Listed:
    """Describe a checkpoint by its manifest and by the names and sizes of its files."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Listed(folder, wrong=str(error))
    wrong = []
    for name, recorded in manifest.files.items():
        try:
            path = path_in(folder, name)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif (size := path.stat().st_size) != recorded.nbytes:
            wrong.append(f"{name} has {size} bytes and should have {recorded.nbytes}")
    nbytes = sum(f.nbytes for f in manifest.files.values())
    ranks = manifest.saved_by.get("world_size")
    what = few(wrong, 3, "; ")
    return Listed(folder, manifest.step, manifest.created, ranks, nbytes, what, manifest.saved_by)
