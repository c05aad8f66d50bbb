"""The manifest: it lists the tensors of a checkpoint, and the file and elements of each piece.
`FolderSource` (folder_source.py) reads the pieces.

    tensor   parameter 'h.0.weight'   float32 [48, 16]                 768 elements
    pieces   |rank-00000: 0 .. 300|rank-00001: 300 .. 768|             tile them exactly

    saved on a mesh with tensor parallelism: each piece is an interval of a flattened box
    box at (0, 0) of [24, 16]    |rank-00000: 0 .. 200|rank-00002: 200 .. 384|    the boxes tile the tensor,
    box at (24, 0) of [24, 16]   |rank-00001: 0 .. 200|rank-00003: 200 .. 384|    their pieces tile them

A load does not depend on the number of ranks, the mesh, the stage or the tier of the save: it
divides the elements anew. `Record.__post_init__` verifies that the pieces of a tensor tile it. The
manifest's own SHA-256 is stored in a second file, in the form that `sha256sum -c manifest.sha256`
reads.

| version | is written if                                | a tensor has                                     |
|---------|----------------------------------------------|--------------------------------------------------|
| 1       | every piece is an interval of a whole tensor | "pieces": [[file, start, stop, crc], ...]        |
| 2       | some tensor has boxes                        | also "boxes": [[offset, shape], ...], the number |
|         |                                              | of its box at the end of each of its pieces      |

A packed moment of a parameter that is saved in boxes is packed in blocks of each box. Its record has
the shape of the parameter, and its pieces count the codes (or scales) of a box.

[Note: nothing outside the folder] A checkpoint may come from an untrusted source, and checksums
prove only that its parts belong together. Every file name is therefore turned into a path by
`path_in`, which refuses names that lead out of the folder, directly or through a symbolic link.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.source import KINDS, Item
from onefold.checkpoint.tensorfile import DTYPES, numel_of
from onefold.layout.holders import TensorBox, tile, whole_region
from onefold.reading import LARGEST, parse_json, read_bytes
from onefold.recipe.moments import grain_of
from onefold.wording import readable

#: The latest version of the format, see above.
VERSION = 2
MANIFEST, CHECKSUM, STATE = "manifest.json", "manifest.sha256", "state.json"


@dataclass(frozen=True)
class StoredPiece:
    """Elements `[start, stop)` of a flattened tensor, or of a flattened `box` of it, stored in
    `file`. `crc`: CRC-32 of their bytes.
    """

    file: str
    start: int
    stop: int
    crc: int
    box: TensorBox | None = None


def key_of(item: Item, start: int, box: TensorBox | None = None) -> str:
    """Return the name of a piece in its file."""
    at = "" if box is None else ".".join(map(str, box.offset)) + "+"
    return f"{item.kind}:{item.name}{':' + item.state if item.state else ''}@{at}{start}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def path_in(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`; see [Note: nothing outside the folder].
    Raises: CheckpointError: the path leads out of the folder.
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
    """Check a file name in the manifest `where`.
    Raises: CheckpointError: `name` is not a plain relative path below the folder.
    """
    plain = isinstance(name, str) and bool(name) and "\0" not in name and "\\" not in name
    if not plain or name.startswith("/") or not {"..", "."}.isdisjoint(name.split("/")):
        raise CheckpointError(
            f"{where} names the file {name!r}, which is not inside the checkpoint's folder: only"
            " what is inside is read. Onefold did not write this checkpoint; do not use it."
        )


@dataclass(frozen=True)
class Record:
    """A stored tensor: its identity, dtype, shape, other names, and its pieces in order."""

    item: Item
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.boxed:
            self._check(self.pieces, numel_of(self.shape), "")
        else:
            self._check_boxes()
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.item} has the dtype {self.dtype!r}, which this version of Onefold does not"
                " know."
            )

    def _check_boxes(self) -> None:
        if why := tile(self.shape, self.boxes):
            raise DamagedCheckpoint(f"{self.item}: its pieces do not tile it: {why}.")
        in_box: dict[TensorBox | None, list[StoredPiece]] = {}
        for piece in self.pieces:
            in_box.setdefault(piece.box, []).append(piece)
        for box in self.boxes:
            where = f" of the box at {box.offset} of {box.shape}"
            items = -(-box.numel // grain_of(self.item.state))
            self._check(in_box.get(box, []), items, where)

    def _check(self, pieces: Sequence[StoredPiece], numel: int, where: str) -> None:
        """Check that `pieces` tile `numel` elements, in order. `where`: the end of messages."""
        end = 0
        for piece in pieces:
            if piece.start != end or piece.stop < piece.start:
                raise DamagedCheckpoint(
                    f"{self.item}: a piece covers elements {piece.start} to {piece.stop}{where},"
                    f" expected one that begins at {end}."
                )
            end = piece.stop
        if end != numel:
            raise DamagedCheckpoint(
                f"{self.item}: its pieces cover {end} of its {numel} elements{where}."
            )

    @property
    def boxed(self) -> bool:
        """Whether pieces are intervals of boxes."""
        return any(piece.box is not None for piece in self.pieces)

    @property
    def boxes(self) -> tuple[TensorBox, ...]:
        """The box of each piece, each once: the whole tensor, unless the record is `boxed`."""
        whole = whole_region(self.shape)
        return tuple(dict.fromkeys(p.box or whole for p in self.pieces))

    def to_json(self, number: Mapping[str, int]) -> dict[str, Any]:
        """Return the record as JSON values. `number`: the number of each file, by its name."""
        boxes = {box: i for i, box in enumerate(self.boxes)} if self.boxed else {}
        whole = whole_region(self.shape)
        return {
            "kind": self.item.kind,
            "name": self.item.name,
            **({"state": self.item.state} if self.item.state else {}),
            "dtype": self.dtype,
            "shape": list(self.shape),
            **({"aliases": list(self.aliases)} if self.aliases else {}),
            **({"boxes": [[list(b.offset), list(b.shape)] for b in boxes]} if boxes else {}),
            "pieces": [
                [
                    number[p.file],
                    p.start,
                    p.stop,
                    p.crc,
                    *([boxes[p.box or whole]] if boxes else []),
                ]
                for p in self.pieces
            ],
        }

    @classmethod
    def from_json(cls, t: Mapping[str, Any], names: Sequence[str]) -> Record:
        boxes = [TensorBox(_sizes(offset), _sizes(shape)) for offset, shape in t.get("boxes", ())]
        texts = [t["kind"], t["name"], t.get("state", ""), t["dtype"], *t.get("aliases", ())]
        if {*map(type, texts)} != {str}:
            raise ValueError(f"{str(texts)[:60]} where texts are expected")
        # Of ranks, or of large values in state.json
        if t["kind"] not in KINDS or (
            t["kind"] in ("rng", "extra") and not re.fullmatch("[0-9]{1,9}", t["name"])
        ):
            raise ValueError(f"a tensor is {t['kind'][:60]!r} {t['name'][:60]!r}")
        return cls(
            Item(*texts[:3]),
            t["dtype"],
            _sizes(t["shape"]),
            tuple(
                StoredPiece(names[n], a, b, crc, *(boxes[i] for i in box))
                for n, a, b, crc, *box in map(_sizes, t["pieces"])
            ),
            tuple(texts[4:]),
        )


def _expect(value: Any, kind: type) -> Any:
    """Return `value`. Raises: ValueError: it is no `kind`."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{repr(value)[:60]} where {kind.__name__} is expected")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    """Return a list of sizes. Raises: ValueError: it is none of 64 bits each."""
    right = type(values) is list and len(values) <= 64 and {*map(type, values)} <= {int}
    if right and (not values or (min(values) >= 0 and max(values) < 1 << 62)):
        return tuple(values)
    raise ValueError(f"{str(values)[:60]} where sizes are expected")


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes and a SHA-256, of the whole file or (`head_only`) of its header."""

    nbytes: int
    sha256: str
    head_only: bool = False


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Attributes:
        step: the step given to `save`, if any. created: ISO date and time, UTC.
        saved_by: versions, world size, stage and recipe of the run that saved. For information
            only: no load needs it.
        version: of the format; 0: the earliest that can hold the records.
    """

    records: tuple[Record, ...]
    files: Mapping[str, FileRecord]
    step: int | None = None
    created: str = ""
    saved_by: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0

    def __post_init__(self) -> None:
        if not self.version:
            boxed = any(record.boxed for record in self.records)
            object.__setattr__(self, "version", 2 if boxed else 1)

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
        # One tensor per line: easy to read, and two manifests can be compared by `diff`
        tensors = ",\n".join(
            "  " + json.dumps(r.to_json(number), separators=(",", ":")) for r in self.records
        )
        return json.dumps(body, indent=1)[:-2] + ',\n "tensors": [\n' + tensors + "\n ]\n}\n"

    @classmethod
    def from_text(cls, text: str | bytes, where: Path) -> Manifest:
        """Parse a manifest.
        Raises: CheckpointError: the text is no manifest, or one of a later version.
        """
        try:
            body = parse_json(text)
            if not isinstance(body, dict) or body.get("format") != "onefold checkpoint":
                raise CheckpointError(f"{where} is no manifest of an Onefold checkpoint.")
            if _expect(body["version"], int) > VERSION:
                raise CheckpointError(
                    f"{where} was written in version {body['version']} of the format, by Onefold"
                    f" {_expect(body['saved_by'], dict).get('onefold', '?')}; this Onefold reads versions up to"
                    f" {VERSION}. Install a later Onefold to read it."
                )
            names = body["tensor_files"]
            for name in (*names, *body["files"]):
                _refuse_outside(name, where)
            files = {
                n: FileRecord(
                    _sizes([f["bytes"]])[0], _expect(f["sha256"], str), f.get("of") == "head"
                )
                for n, f in body["files"].items()
            }
            records = tuple(Record.from_json(t, names) for t in body["tensors"])
            if len({record.item for record in records}) < len(records):
                raise ValueError("a tensor is listed twice")
            step = None if body["step"] is None else _sizes([body["step"]])[0]
            created, saved_by = _expect(body["created"], str), _expect(body["saved_by"], dict)
            return cls(records, files, step, created, saved_by, body["version"])
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DamagedCheckpoint(
                f"{where} is damaged: {type(error).__name__}: {error}."
            ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum. Raises: OSError; CheckpointError: it is too large."""
    text = manifest.to_text().encode()
    if len(text) > LARGEST:
        raise CheckpointError(
            f"{len(manifest.records)} tensors make a manifest of {readable(len(text))}, and at most"
            f" {readable(LARGEST)} are read: save the model in several checkpoints."
        )
    (folder / MANIFEST).write_bytes(text)
    (folder / CHECKSUM).write_text(checksum_line(text))


def checksum_line(text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify its checksum.
    Raises: CheckpointError: there is none, it is damaged, or it is of a later version.
    """
    path, check = path_in(folder, MANIFEST), path_in(folder, CHECKSUM)
    try:
        text = read_bytes(path)
        line = read_bytes(check)
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
    return Manifest.from_text(text, path)
