"""A checkpoint folder as a `Source`: reads pieces of its files and computes their checksums."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.manifest import (
    STATE,
    Manifest,
    Record,
    key_of,
    path_in,
    read_manifest,
)
from onefold.checkpoint.source import Item, Source, Stored
from onefold.checkpoint.tensorfile import DTYPES, TensorFile, joined
from onefold.checkpoint.values import decode

#: The most files that are open at a time.
OPEN = 64


@dataclass(frozen=True, order=True)
class RangeRead:
    """A record of a read: elements `[start, stop)` of an item, and the CRC-32 of their bytes."""

    item: Item
    start: int
    stop: int
    crc: int


class FolderSource(Source):
    """An Onefold checkpoint folder to load from; see `Source`.

    Attributes:
        checks: reads whose checksums have not been compared yet.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, or is of a later version.
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
        self.checks: list[RangeRead] = []
        self._files: dict[str, TensorFile] = {}
        self._state: dict[str, Any] | None = None

    @property
    def describe(self) -> str:
        return f"checkpoint {self.folder}"

    @property
    def state(self) -> dict[str, Any]:
        """The contents of state.json, checksum verified."""
        if self._state is None:
            path = self._path(STATE)
            try:
                text = path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
            record = self.manifest.files.get(STATE)
            if record is None or hashlib.sha256(text).hexdigest() != record.sha256:
                raise DamagedCheckpoint(
                    f"{path} is damaged: its SHA-256 is not the one in the manifest."
                )
            self._state = json.loads(text)
        return self._state

    def _path(self, name: str) -> Path:
        path = path_in(self.folder, name)
        if not path.exists():
            raise DamagedCheckpoint(f"{path} is missing: the checkpoint is not whole any more.")
        return path

    def value(self, key: str) -> Any:
        """Return a value of state.json, with its tensors; None if there is none."""
        if key not in self.state:
            return None
        return decode(self.state[key], lambda number: self.whole(Item("extra", str(number))))

    def whole(self, item: Item) -> torch.Tensor:
        """Return a whole tensor on the host, checksums verified."""
        before, out = len(self.checks), super().whole(item)
        self.compare_with(self.checks[before:])
        return out

    def stored(self, item: Item) -> Stored:
        if item not in self._items:
            raise CheckpointError(f"{self.describe} holds no {item}.")
        return self._items[item]

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        record = self.records[item]
        first = max(0, bisect_right([p.start for p in record.pieces], start) - 1)
        for piece in record.pieces[first:]:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a >= b:
                if piece.start >= stop:
                    break
                continue
            file, key = self._open(piece.file), key_of(item, piece.start)
            entry = file.header.get(key)
            expected = DTYPES[record.dtype], (piece.stop - piece.start,)
            if entry is None or (entry.dtype, entry.shape) != expected:
                raise DamagedCheckpoint(
                    f"{file.path} does not hold {item} as the manifest says: it belongs to another"
                    " checkpoint, or is damaged."
                )
            crc = file.read(key, a - piece.start, b - piece.start, out[a - start : b - start])
            self.checks.append(RangeRead(item, a, b, crc))

    def _open(self, name: str) -> TensorFile:
        if name not in self._files:
            while len(self._files) >= OPEN:
                self._files.pop(next(iter(self._files))).close()
            path = self._path(name)
            file = TensorFile(path)
            record = self.manifest.files.get(name)
            if record is None or hashlib.sha256(file.head).hexdigest() != record.sha256:
                file.close()
                raise DamagedCheckpoint(
                    f"{path} is damaged: its header is not the one in the manifest."
                )
            self._files[name] = file
        return self._files[name]

    def scalars(self, name: str) -> Mapping[str, Any]:
        known = self.state.get("scalars", {}).get(name, {})
        return {key: decode(value) for key, value in known.items()}

    def groups(self) -> list[list[dict[str, Any]]] | None:
        optimizers = self.state.get("optimizers") or ()
        return [[decode(group) for group in o["groups"]] for o in optimizers] or None

    def compare(self) -> None:
        checks, self.checks = self.checks, []
        self.compare_with(checks)

    def compare_with(self, checks: list[RangeRead]) -> None:
        """Compare the checksums of reads, of this and other ranks, with the manifest. The checksums
        of several reads of one piece are combined.

        Pieces of which only a part was read are skipped.

        Raises:
            CheckpointError: bytes have changed since they were written. The message names file and
                tensor.
        """
        by_item: dict[Item, list[RangeRead]] = {}
        for check in sorted(set(checks)):
            by_item.setdefault(check.item, []).append(check)
        bad = []
        for item, parts in by_item.items():
            size = DTYPES[self.records[item].dtype].itemsize
            for piece in self.records[item].pieces:
                inside = [c for c in parts if piece.start <= c.start and c.stop <= piece.stop]
                starts, ends = [c.start for c in inside], [c.stop for c in inside]
                if [piece.start, *ends] != [*starts, piece.stop]:
                    continue
                if joined((c.crc, (c.stop - c.start) * size) for c in inside) != piece.crc:
                    where = f"elements {piece.start} to {piece.stop}"
                    bad.append(f"{self.folder / piece.file}: {item}, {where}")
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise DamagedCheckpoint(
                f"bytes have changed since they were written: {'; '.join(bad[:3])}{more}. Load an"
                " earlier checkpoint; `onefold checkpoint verify` lists all that is damaged."
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
