"""A checkpoint folder as a `Source`: reads pieces of its files and computes their checksums."""

from __future__ import annotations

import hashlib
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
    StoredPiece,
    key_of,
    path_in,
    read_manifest,
)
from onefold.checkpoint.source import Item, Source, Stored, read_common
from onefold.checkpoint.tensorfile import DTYPES, TensorFile, combine
from onefold.checkpoint.values import decode, short
from onefold.layout.holders import BoxInterval, TensorBox, whole_region
from onefold.quant import moment_packing
from onefold.reading import parse_json, read_bytes
from onefold.recipe.moments import BLOCK, SIGNED, grain_of, items_of, packed
from onefold.wording import few

#: The values of state.json that loads look into; each may be missing or null. A list stands for any
#: number of such values, a key of `str` for any key.
_FORM: dict[str, Any] = {
    "optimizers": [{"groups": [{"params": [str]}]}],
    "scalars": {str: {str: object}},
    "extra_state": {str: object},
    "data": dict,
    "data_of": [int],
    "wire": dict,
}

#: The most files that are open at a time.
OPEN = 64


@dataclass(frozen=True, order=True)
class RangeRead:
    """A record of a read: elements `[start, stop)` of an item, or of its box that begins at `box`,
    and the CRC-32 of their bytes.
    """

    item: Item
    box: tuple[int, ...]
    start: int
    stop: int
    crc: int


class FolderSource(Source):
    """An Onefold checkpoint folder to load from; see `Source`.

    Moments that are packed in blocks of boxes are listed as what they stand for, in fp32, and
    decoded when they are read; `packed_in` has the codes.

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
        # {a moment that is packed in blocks of boxes: the records of its codes and its scales}
        self._moments: dict[Item, list[Record]] = {}
        for item, record in self.records.items():
            if record.boxed and (part := packed(item.state)) is not None:
                moment = Item(item.kind, item.name, part.key)
                del self._items[item]
                self._items[moment] = Stored(torch.float32, record.shape)
                self._moments.setdefault(moment, []).append(record)
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
                text = read_bytes(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
            record = self.manifest.files.get(STATE)
            if record is None or hashlib.sha256(text).hexdigest() != record.sha256:
                raise DamagedCheckpoint(
                    f"{path} is damaged: its SHA-256 is not the one in the manifest."
                )
            self._state = state_of_text(text, path)
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
        return self._decoded(self.state[key], key)

    def _decoded(self, value: Any, where: str) -> Any:
        try:
            return decode(value, lambda number: self.whole(Item("extra", str(number))))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self.folder / STATE}, {where}: {error}") from None

    def whole(self, item: Item) -> torch.Tensor:
        """Return a whole tensor on the host, checksums verified."""
        self.stored(item)
        for record in self.records_of(item):  # before memory of this size is asked for
            for piece in record.pieces:
                self._place_of(record, piece)
        before, out = len(self.checks), super().whole(item)
        self.compare_with(self.checks[before:])
        return out

    def stored(self, item: Item) -> Stored:
        if item not in self._items:
            raise CheckpointError(f"{self.describe} holds no {item}.")
        return self._items[item]

    def records_of(self, item: Item) -> list[Record]:
        """Return the record of a tensor in `items`; of a moment that is packed in blocks of boxes,
        those of its codes and scales.
        """
        return self._moments.get(item) or [self.records[item]]

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        if item in self._moments or self.records[item].boxed:
            self.read_box(item, whole_region(self.stored(item).shape), start, stop, out)
            return
        record = self.records[item]
        first = max(0, bisect_right([p.start for p in record.pieces], start) - 1)
        for piece in record.pieces[first:]:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a >= b:
                if piece.start >= stop:
                    break
                continue
            self._read(record, piece, a, b, out[a - start : b - start])

    def read_box(
        self, item: Item, region: TensorBox, start: int, stop: int, out: torch.Tensor
    ) -> None:
        wanted = BoxInterval(region, start, stop)
        if item in self._moments:
            for box in self._moments[item][0].boxes:
                read_common(
                    wanted, BoxInterval(box, 0, box.numel), out, torch.float32,
                    lambda a, b, into, box=box: self._decode(item, box, a, b, into),  # type: ignore[misc]
                )  # fmt: skip
            return
        record = self.records[item]
        whole = whole_region(record.shape)
        if region == whole and not record.boxed:
            self.read(item, start, stop, out)
            return
        for piece in record.pieces:
            if (box := piece.box or whole) == region:
                a, b = max(start, piece.start), min(stop, piece.stop)
                if a < b:
                    self._read(record, piece, a, b, out[a - start : b - start])
                continue
            there = BoxInterval(box, piece.start, piece.stop)
            read_common(
                wanted, there, out, DTYPES[record.dtype],
                lambda a, b, into, piece=piece: self._read(  # type: ignore[misc]
                    record, piece, piece.start + a, piece.start + b, into
                ),
            )  # fmt: skip

    def packed_in(self, name: str, region: TensorBox) -> Mapping[Item, Stored]:
        found = [r for i, both in self._moments.items() if i.name == name for r in both]
        return {
            r.item: Stored(DTYPES[r.dtype], (-(-region.numel // grain_of(r.item.state)),))
            for r in found
            if region in r.boxes
        }

    def _decode(
        self, moment: Item, box: TensorBox, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Read elements [start, stop) of a box of a packed moment into `out`, in fp32."""
        a, b = start // BLOCK * BLOCK, min(box.numel, -(-stop // BLOCK) * BLOCK)
        read: dict[bool, torch.Tensor] = {}  # the codes, and the scales
        for record in self._moments[moment]:
            part = packed(record.item.state)
            assert part is not None, "by it the moment was found"
            i, j = items_of(a, b, part.grain)
            format = part.format
            read[part.scale] = torch.empty(j - i, dtype=part.dtype, device="cpu")
            self.read_box(record.item, box, i, j, read[part.scale])
        values = moment_packing.decode(format, read[False], read[True], b - a, SIGNED[moment.state])
        out.copy_(values[start - a : stop - a])

    def _read(
        self, record: Record, piece: StoredPiece, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Read elements [start, stop) of the flattened tensor or box, which are in `piece`."""
        file, key = self._place_of(record, piece)
        crc = file.read(key, start - piece.start, stop - piece.start, out)
        self.checks.append(RangeRead(record.item, _offset(piece), start, stop, crc))

    def _place_of(self, record: Record, piece: StoredPiece) -> tuple[TensorFile, str]:
        """Return the file that holds a piece, and the piece's name there."""
        file, key = self._open(piece.file), key_of(record.item, piece.start, piece.box)
        entry = file.header.get(key)
        expected = DTYPES[record.dtype], (piece.stop - piece.start,)
        if entry is None or (entry.dtype, entry.shape) != expected:
            raise DamagedCheckpoint(
                f"{file.path} does not hold {record.item} as the manifest says: it belongs to another"
                " checkpoint, or is damaged."
            )
        return file, key

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
        return {key: self._decoded(value, f"{key!r} of {name!r}") for key, value in known.items()}

    def groups(self) -> list[list[dict[str, Any]]] | None:
        optimizers = self.state.get("optimizers", ())
        return [
            [self._decoded(group, "a group of its optimizer") for group in o["groups"]]
            for o in optimizers
        ] or None

    def compare(self) -> None:
        checks, self.checks = self.checks, []
        self.compare_with(checks)

    def compare_with(self, checks: list[RangeRead]) -> None:
        """Compare the checksums of reads, of this and other ranks, with the manifest. The checksums
        of several reads of one piece are combined. Reads that overlap must agree wherever two of
        them, or two sequences of them, end at the same element.

        Pieces of which only a part was read are skipped.

        Raises:
            CheckpointError: bytes have changed since they were written. The message names file and
                tensor.
        """
        by_item: dict[Item, dict[tuple[int, ...], list[RangeRead]]] = {}
        for check in sorted(set(checks)):
            by_item.setdefault(check.item, {}).setdefault(check.box, []).append(check)
        bad = []
        for item, by_box in by_item.items():
            size = DTYPES[self.records[item].dtype].itemsize
            for piece in self.records[item].pieces:
                parts = by_box.get(_offset(piece), ())
                inside = [c for c in parts if piece.start <= c.start and c.stop <= piece.stop]
                if not _sound(piece, inside, size):
                    where = f"elements {piece.start} to {piece.stop}"
                    if piece.box is not None:
                        where += f" of the box at {piece.box.offset} of {piece.box.shape}"
                    bad.append(f"{self.folder / piece.file}: {item}, {where}")
        if bad:
            raise DamagedCheckpoint(
                f"bytes have changed since they were written: {few(bad, 3, '; ')}. Load an"
                " earlier checkpoint; `onefold checkpoint verify` lists all that is damaged."
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def state_of_text(text: bytes, where: Path) -> dict[str, Any]:
    """Parse a state.json. Raises: CheckpointError: it is none."""
    try:
        state = parse_json(text)
    except ValueError as error:
        raise DamagedCheckpoint(f"{where} is no JSON: {error}.") from None
    wrong = _wrong_in(state, dict, "it")
    there = {} if wrong else {key: value for key, value in state.items() if value is not None}
    for key in there.keys() & _FORM.keys():
        wrong = wrong or _wrong_in(there[key], _FORM[key], key)
    if wrong:
        raise DamagedCheckpoint(f"{where} is not what Onefold writes: {wrong}.")
    return there


def _wrong_in(value: Any, form: Any, where: str) -> str:
    """Return in what a JSON value differs from `form` (see `_FORM`); "" if in nothing."""
    kind: Any = form if isinstance(form, type) else type(form)
    if not isinstance(value, kind):
        return f"{where} is {short(value)}, expected {kind.__name__}"
    inside: list[tuple[Any, Any, str]] = []
    if isinstance(form, list):
        inside = [(v, form[0], f"{where}[{i}]") for i, v in enumerate(value)]
    elif isinstance(form, dict) and str in form:
        inside = [(v, form[str], f"{where}[{key!r}]") for key, v in value.items()]
    elif isinstance(form, dict):
        inside = [(value.get(key), f, f"{where}[{key!r}]") for key, f in form.items()]
    return next(filter(None, (_wrong_in(*each) for each in inside)), "")


def _offset(piece: StoredPiece) -> tuple[int, ...]:
    """Return where a piece's box begins; () for a whole tensor."""
    return () if piece.box is None else piece.box.offset


def _sound(piece: StoredPiece, inside: list[RangeRead], size: int) -> bool:
    """Return whether reads inside a piece, in order, contradict neither its checksum nor each other.
    `size`: bytes of an element.
    """
    # {element: the checksum of all bytes of the piece before it}
    known = {piece.start: 0}
    for c in inside:
        if c.start in known:
            crc = combine(known[c.start], c.crc, (c.stop - c.start) * size)
            if known.setdefault(c.stop, crc) != crc:
                return False
    return known.get(piece.stop, piece.crc) == piece.crc
