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

A tensor has "boxes": [[offset, shape], ...], one that is all of it or several that tile it, and "pieces":
[[file, box, start, stop], ...] by the numbers of file and box. The format is version 3; files of others are refused.

[Note: nothing outside the folder] A checkpoint may come from an untrusted source, and checksums
prove only that its parts belong together. Every file name is therefore turned into a path by
`path_in`, which refuses names that lead out of the folder, directly or through a symbolic link.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from onefold.checkpoint.errors import CheckpointError, DamagedCheckpoint
from onefold.checkpoint.source import KINDS, Item
from onefold.checkpoint.tensorfile import DTYPES
from onefold.layout.holders import BoxInterval, TensorBox, tile, whole_region
from onefold.reading import LARGEST, formed, parse_json, read_bytes
from onefold.wording import readable

#: The version of the format, see above.
VERSION = 3
MANIFEST, CHECKSUM, STATE = "manifest.json", "manifest.sha256", "state.json"


@dataclass(frozen=True)
class StoredPiece:
    """The elements `where` of a tensor, stored in `file`."""

    file: str
    where: BoxInterval


def key_of(item: Item, where: BoxInterval) -> str:
    """Return the name of a piece in its file."""
    at = ".".join(map(str, where.region.offset))
    return f"{item.kind}:{item.name}{':' + item.state if item.state else ''}@{at}+{where.start}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def path_in(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`; see [Note: nothing outside the folder].
    Raises: CheckpointError: the path leads out of the folder.
    """
    path = folder / name
    try:
        end = Path(os.path.realpath(path))  # which takes a link to itself too
    except ValueError as error:
        raise DamagedCheckpoint(f"{name!r} cannot be the name of a file: {error}.") from None
    if not end.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} leads out of the checkpoint, to {end}: only files inside its folder are read. If"
            " it is a symbolic link, copy the checkpoint with its links followed (cp -rL)."
        )
    return path


@dataclass(frozen=True)
class Record:
    """A stored tensor: its identity, dtype, shape, other names, and its pieces in order."""

    item: Item
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if why := tile(self.shape, self.boxes):
            raise DamagedCheckpoint(f"{self.item}: its pieces do not tile it: {why}.")
        ends = dict.fromkeys(self.boxes, 0)
        for where in (piece.where for piece in self.pieces):
            if where.start != ends[where.region] or where.stop < where.start:
                raise DamagedCheckpoint(
                    f"{self.item}: a piece covers elements {where.start} to {where.stop} of the box at"
                    f" {where.region.offset}, expected one that begins at {ends[where.region]}."
                )
            ends[where.region] = where.stop
        if cut := next((box for box, end in ends.items() if end != box.numel), None):
            raise DamagedCheckpoint(
                f"{self.item}: its pieces cover {ends[cut]} of the {cut.numel} elements of the box at"
                f" {cut.offset} of {cut.shape}."
            )
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.item} has the dtype {self.dtype!r}, which this version of Onefold does not"
                " know."
            )

    @cached_property
    def boxes(self) -> tuple[TensorBox, ...]:
        """The box of each piece, each once: the whole tensor, unless a mesh has divided it."""
        return tuple(dict.fromkeys(p.where.region for p in self.pieces)) or (
            whole_region(self.shape),
        )

    def to_json(self, number: Mapping[str, int]) -> dict[str, Any]:
        """Return the record as JSON values. `number`: the number of each file, by its name."""
        boxes = {box: i for i, box in enumerate(self.boxes)}
        return {
            **asdict(self.item),
            "dtype": self.dtype,
            "shape": self.shape,
            "aliases": self.aliases,
            "boxes": [[box.offset, box.shape] for box in boxes],
            "pieces": [
                [number[p.file], boxes[p.where.region], p.where.start, p.where.stop]
                for p in self.pieces
            ],
        }


@dataclass(frozen=True)
class FileRecord:
    """A SHA-256 of a file, of all of it or (`tensors`) of its header and checksums."""

    sha256: str
    tensors: bool = False


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    Attributes:
        step: the step given to `save`, if any. created: ISO date and time, UTC.
        saved_by: versions, world size, stage and recipe of the run that saved. For information
            only: no load needs it.
    """

    records: tuple[Record, ...]
    files: Mapping[str, FileRecord]
    step: int | None = None
    created: str = ""
    saved_by: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        names = sorted({p.file for r in self.records for p in r.pieces})
        number = {name: i for i, name in enumerate(names)}
        body = {
            "format": "onefold checkpoint",
            "version": VERSION,
            "created": self.created,
            "step": self.step,
            "saved_by": dict(self.saved_by),
            "files": {name: asdict(file) for name, file in self.files.items()},
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
        Raises: CheckpointError: the text is no manifest, or one of another version.
        """
        try:
            body = parse_json(text)
            if not isinstance(body, dict) or body.get("format") != "onefold checkpoint":
                raise CheckpointError(f"{where} is no manifest of an Onefold checkpoint.")
            if body.get("version") != VERSION:
                raise CheckpointError(
                    f"{where} was written in version {body.get('version')} of the format, and this"
                    f" Onefold reads version {VERSION}. Load it with the Onefold that saved it, or"
                    " save it anew."
                )
            said = formed(_Body, body)
            records = tuple(_record(t, said.tensor_files) for t in said.tensors)
            if len({record.item for record in records}) < len(records):
                raise ValueError("a tensor is listed twice")
            return cls(records, said.files, said.step, said.created, said.saved_by)
        except CheckpointError:
            raise
        except (ValueError, IndexError) as error:
            raise DamagedCheckpoint(
                f"{where} is damaged: {type(error).__name__}: {error}."
            ) from None


#: A size as a file of a stranger may have it: of 64 bits. Shapes have as many dimensions as torch takes.
Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]
Sizes = Annotated[tuple[Size, ...], Field(max_length=64)]


class _Tensor(BaseModel):
    """A tensor as `Record.to_json` writes it."""

    kind: str
    name: str
    state: str
    dtype: str
    shape: Sizes
    aliases: tuple[str, ...]
    boxes: list[tuple[Sizes, Sizes]]
    pieces: list[tuple[Size, Size, Size, Size]]


class _Body(BaseModel):
    """The manifest as `Manifest.to_text` writes it."""

    created: str
    step: Size | None
    saved_by: dict[str, Any]
    files: dict[str, FileRecord]
    tensor_files: list[str]
    tensors: list[_Tensor]


def _record(t: _Tensor, names: Sequence[str]) -> Record:
    # Of ranks, or of large values in state.json
    numbered = t.kind in ("rng", "extra")
    if t.kind not in KINDS or (numbered and not re.fullmatch("[0-9]{1,9}", t.name)):
        raise ValueError(f"a tensor is {t.kind[:60]!r} {t.name[:60]!r}")
    boxes = [TensorBox(*box) for box in t.boxes]
    pieces = (StoredPiece(names[n], BoxInterval(boxes[i], a, b)) for n, i, a, b in t.pieces)
    return Record(Item(t.kind, t.name, t.state), t.dtype, t.shape, tuple(pieces), t.aliases)


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
    Raises: CheckpointError: there is none, it is damaged, or it is of another version.
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
