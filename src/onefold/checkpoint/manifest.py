"""The manifest: which tensors a checkpoint holds, and in which bytes of which file each element
lies; and the checkpoint as something to read from (`FolderSource`).

    tensor   parameter 'h.0.weight'   float32 [48, 16]                 768 elements
    pieces   |rank-00000: 0 .. 300|rank-00001: 300 .. 768|             tile them exactly

Nothing in it depends on how many ranks, which stage or which tier it was saved from: who loads cuts
the pieces anew. The checker in `Record.__post_init__` verifies that the pieces of a tensor tile it.
The manifest's own SHA-256 lies beside it, in the form that `sha256sum -c manifest.sha256` reads.

[Note: nothing outside the folder] A checkpoint may come from anywhere, and a checksum proves only
that its parts belong together. So `path_in` is the one way from a name to a file: a name that
leaves the folder, by itself or through a symbolic link, is refused.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.source import Item, Source, Stored
from onefold.checkpoint.tensorfile import DTYPES, TensorFile, joined, numel_of
from onefold.checkpoint.values import decode

VERSION = 1
MANIFEST, CHECKSUM, STATE = "manifest.json", "manifest.sha256", "state.json"


@dataclass(frozen=True)
class StoredPiece:
    """Elements `[start, stop)` of a flattened tensor: in `file`, with the CRC-32 of their bytes."""

    file: str
    start: int
    stop: int
    crc: int


def key_of(item: Item, start: int) -> str:
    """What a piece is called in its file."""
    return f"{item.kind}:{item.name}{':' + item.state if item.state else ''}@{start}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def path_in(folder: Path, name: str) -> Path:
    """The file `name` of the checkpoint in `folder`; see [Note: nothing outside the folder].
    Raises: CheckpointError: it lies elsewhere.
    """
    _refuse_outside(name, folder / MANIFEST)
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} is a symbolic link that leads out of the checkpoint, to {path.resolve()}: only"
            " files inside its folder are read. Copy the checkpoint with its links followed (cp"
            " -rL)."
        )
    return path


def _refuse_outside(name: Any, where: Path) -> None:
    """Raises: CheckpointError: `name` is no plain name below the folder."""
    plain = isinstance(name, str) and bool(name) and "\0" not in name and "\\" not in name
    if not plain or name.startswith("/") or not {"..", "."}.isdisjoint(name.split("/")):
        raise CheckpointError(
            f"{where} names the file {name!r}, which is not inside the checkpoint's folder: only"
            " what is inside is read. Onefold did not write this checkpoint; do not use it."
        )


@dataclass(frozen=True)
class Record:
    """A tensor: its identity, what it is, other names of it, its pieces in order."""

    item: Item
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for piece in self.pieces:
            if piece.start != end or piece.stop < piece.start:
                raise DamagedCheckpoint(
                    f"{self.item}: a piece covers elements {piece.start} to {piece.stop}, expected"
                    f" one that begins at {end}."
                )
            end = piece.stop
        if end != numel_of(self.shape):
            raise DamagedCheckpoint(
                f"{self.item}: its pieces cover {end} of its {numel_of(self.shape)} elements."
            )
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.item} has the dtype {self.dtype!r}, which this version of Onefold does not"
                " know."
            )

    def to_json(self, number: Mapping[str, int]) -> dict[str, Any]:
        """`number`: of each file, by its name."""
        return {
            "kind": self.item.kind,
            "name": self.item.name,
            **({"state": self.item.state} if self.item.state else {}),
            "dtype": self.dtype,
            "shape": list(self.shape),
            **({"aliases": list(self.aliases)} if self.aliases else {}),
            "pieces": [[number[p.file], p.start, p.stop, p.crc] for p in self.pieces],
        }

    @classmethod
    def from_json(cls, t: Mapping[str, Any], names: Sequence[str]) -> Record:
        return cls(
            Item(t["kind"], t["name"], t.get("state", "")),
            t["dtype"],
            tuple(t["shape"]),
            tuple(StoredPiece(names[n], a, b, crc) for n, a, b, crc in t["pieces"]),
            tuple(t.get("aliases", ())),
        )


@dataclass(frozen=True)
class FileRecord:
    """A file: its bytes and a SHA-256, of all of it or of the head alone."""

    nbytes: int
    sha256: str
    head_only: bool = False


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    step: as the user counts; None if it was not given. created: ISO date and time, UTC.
    saved_by: versions, world size, stage and recipe of the run that saved (for people; loading
    needs none of it)."""

    records: tuple[Record, ...]
    files: Mapping[str, FileRecord]
    step: int | None = None
    created: str = ""
    saved_by: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_text(self) -> str:
        names = sorted({p.file for r in self.records for p in r.pieces})
        number = {name: i for i, name in enumerate(names)}
        files = {
            name: {"bytes": f.nbytes, "sha256": f.sha256} | ({"of": "head"} if f.head_only else {})
            for name, f in self.files.items()
        }
        body = {
            "format": "onefold checkpoint",
            "version": self.version,
            "created": self.created,
            "step": self.step,
            "saved_by": dict(self.saved_by),
            "files": files,
            "tensor_files": names,
        }
        # A tensor a line: people read it, and two of them compare line by line.
        tensors = ",\n".join(
            "  " + json.dumps(r.to_json(number), separators=(",", ":")) for r in self.records
        )
        return json.dumps(body, indent=1)[:-2] + ',\n "tensors": [\n' + tensors + "\n ]\n}\n"

    @classmethod
    def from_text(cls, text: str, where: Path) -> Manifest:
        """Raises: CheckpointError: it is none, or from a later version."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("format") != "onefold checkpoint":
                raise CheckpointError(f"{where} is no manifest of an Onefold checkpoint.")
            if body["version"] > VERSION:
                raise CheckpointError(
                    f"{where} was written in version {body['version']} of the format, by Onefold"
                    f" {body['saved_by'].get('onefold', '?')}; this Onefold reads versions up to"
                    f" {VERSION}. Install a later Onefold to read it."
                )
            names = body["tensor_files"]
            for name in (*names, *body["files"]):
                _refuse_outside(name, where)
            files = {
                n: FileRecord(f["bytes"], f["sha256"], f.get("of") == "head")
                for n, f in body["files"].items()
            }
            return cls(
                tuple(Record.from_json(t, names) for t in body["tensors"]),
                files,
                *(body[key] for key in ("step", "created", "saved_by", "version")),
            )
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DamagedCheckpoint(
                f"{where} is damaged: {type(error).__name__}: {error}."
            ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises: OSError."""
    text = manifest.to_text().encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(checksum_line(text))


def checksum_line(text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, its checksum verified.
    Raises: CheckpointError: there is none, it is damaged, or from a later version.
    """
    path, check = path_in(folder, MANIFEST), path_in(folder, CHECKSUM)
    try:
        text = path.read_bytes()
        line = check.read_bytes()
    except FileNotFoundError as error:
        if not folder.exists():
            raise CheckpointError(f"there is no {folder}.") from None
        raise DamagedCheckpoint(
            f"{folder} is no whole checkpoint: it has no {Path(str(error.filename)).name}."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from None
    if line != checksum_line(text).encode():
        said = line[:64].decode(errors="replace")
        raise DamagedCheckpoint(
            f"{path} is damaged: its SHA-256 is {hashlib.sha256(text).hexdigest()}, {CHECKSUM} says"
            f" {said}."
        )
    return Manifest.from_text(text.decode(), path)


# -- a checkpoint as a source ----------------------------------------------------------------------

#: Files held open at a time.
OPEN = 64


@dataclass(frozen=True, order=True)
class RangeRead:
    """Elements `[start, stop)` of a piece were read, and their bytes have this CRC-32."""

    item: Item
    start: int
    stop: int
    crc: int


class FolderSource(Source):
    """See `Source`.

    Attributes:
        checks: what was read and not compared yet.

    Raises:
        CheckpointError: the folder is no checkpoint, damaged, or of a later version.
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
        """state.json, its checksum verified."""
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
        """A value of state.json, tensors fetched; None where there is none."""
        if key not in self.state:
            return None
        return decode(self.state[key], lambda number: self.whole(Item("extra", str(number))))

    def whole(self, item: Item) -> torch.Tensor:
        """A whole tensor, on the host, its checksums verified."""
        stored = self.stored(item)
        out = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        before = len(self.checks)
        self.read(item, 0, out.numel(), out.reshape(-1))
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
        """Compare what was read, also by other ranks, with the manifest, piece by piece. What
        several ranks have read of a piece is put together.

        Pieces that were not read wholly are passed over.

        Raises:
            CheckpointError: bytes have changed since they were written; it names file and tensor.
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
