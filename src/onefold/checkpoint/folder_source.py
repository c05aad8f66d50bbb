"""A checkpoint folder as a `Source`."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.manifest import (
    STATE,
    Manifest,
    Record,
    StoredPiece,
    key_of,
    path_in,
    read_manifest,
)
from onefold.checkpoint.source import Item, Source, Stored, read_common
from onefold.checkpoint.tensorfile import DTYPES, TensorFile
from onefold.checkpoint.values import decode
from onefold.layout.holders import BoxInterval
from onefold.reading import formed, parse_json, read_bytes


class _Group(BaseModel):
    params: list[str]


class _Optimizer(BaseModel):
    groups: list[_Group]


class _Data(BaseModel):
    all: Any = None
    ranks: list[Any] | None = None


class _State(BaseModel):
    """The values of state.json that loads look into; each may be missing or null."""

    optimizers: list[_Optimizer] = []
    scalars: dict[str, dict[str, Any]] = {}
    extra_state: dict[str, Any] = {}
    data: _Data = _Data()
    data_of: list[int] = []


#: The most files that are open at a time.
OPEN = 64


class FolderSource(Source):
    """An Onefold checkpoint folder to load from; see `Source`.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, or is of another version.
    """

    form = "Onefold"
    folder: Path

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        self.step, self.created = self.manifest.step, self.manifest.created
        self.saved_by = self.manifest.saved_by
        self.records: dict[Item, Record] = {r.item: r for r in self.manifest.records}
        self._items = {item: Stored(DTYPES[r.dtype], r.shape) for item, r in self.records.items()}
        self._aliases = {alias: r.item.name for r in self.manifest.records for alias in r.aliases}
        self._files: dict[str, TensorFile] = {}
        self._state: dict[str, Any] | None = None

    @property
    def describe(self) -> str:
        return f"checkpoint {self.folder}"

    @property
    def state(self) -> dict[str, Any]:
        """The contents of state.json, checksum verified."""
        if self._state is None:
            path = self.path(STATE)
            try:
                text = read_bytes(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
            self.compare(STATE, hashlib.sha256(text).hexdigest())
            try:
                state = parse_json(text)
                there = {key: value for key, value in state.items() if value is not None}
                formed(_State, there)
            except (ValueError, AttributeError) as error:
                raise DamagedCheckpoint(f"{path} is not what Onefold writes: {error}.") from None
            self._state = there
        return self._state

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder. Raises: CheckpointError: there is none."""
        path = path_in(self.folder, name)
        if not path.exists():
            raise DamagedCheckpoint(f"{path} is missing: the checkpoint is not whole any more.")
        return path

    def value(self, key: str) -> Any:
        """Return a value of state.json, with its tensors; None if there is none."""
        if key not in self.state:
            return None
        return self._decoded(self.state[key], key)

    def _decoded(self, value: Any, where: str) -> Any:
        try:
            return decode(value, lambda number: self.whole(Item("extra", str(number))))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self.folder / STATE}, {where}: {error}") from None

    def compare(self, name: str, digest: str) -> None:
        """Raise DamagedCheckpoint if the manifest has another checksum for a file."""
        record = self.manifest.files.get(name)
        if record is None or digest != record.sha256:
            raise DamagedCheckpoint(
                f"{self.folder / name} is damaged: its SHA-256 is not the one in the manifest."
            )

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read_box(self, item: Item, wanted: BoxInterval, out: torch.Tensor) -> None:
        record = self.records[item]
        pieces: Sequence[StoredPiece] = record.pieces
        if record.boxes == (wanted.region,):  # the pieces are in order
            first = bisect_right(pieces, wanted.start, key=lambda p: p.where.stop)
            last = bisect_left(pieces, wanted.stop, key=lambda p: p.where.start)
            pieces = pieces[first:last]
        for piece in pieces:
            read = partial(self.read_piece, record, piece)
            read_common(wanted, piece.where, out, DTYPES[record.dtype], read)

    def read_piece(
        self, record: Record, piece: StoredPiece, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Read elements [start, stop) of a piece, counted from its first."""
        file, key = self.file(piece.file), key_of(record.item, piece.where)
        entry = file.header.get(key)
        expected = DTYPES[record.dtype], (piece.where.numel,)
        if entry is None or (entry.dtype, entry.shape) != expected:
            raise DamagedCheckpoint(
                f"{file.path} does not hold {record.item} as the manifest says: it belongs to another"
                " checkpoint, or is damaged."
            )
        file.read(key, start, stop, out)

    def file(self, name: str) -> TensorFile:
        """Open a file of tensors, and check its header and checksums."""
        if name not in self._files:
            while len(self._files) >= OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = file = TensorFile(self.path(name), checked=True)
            self.compare(name, file.digest)
        return self._files[name]

    def scalars(self, name: str) -> Mapping[str, Any]:
        known = self.state.get("scalars", {}).get(name, {})
        return {key: self._decoded(value, f"{key!r} of {name!r}") for key, value in known.items()}

    def groups(self) -> list[list[dict[str, Any]]] | None:
        optimizers = self.state.get("optimizers", ())
        return [
            [self._decoded(group, "a group of its optimizer") for group in o["groups"]]
            for o in optimizers
        ] or None

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
