"""Verify a checkpoint: read every byte and compare it with the manifest's checksums. Problems are
reported by file and tensor.

    manifest.sha256 ──► manifest.json ──► SHA-256 of each small file, and of each tensor file's header
                                     └──► CRC-32 of each piece of each tensor (header and pieces make up a tensor file)

No ranks and no model are needed. Pieces are divided into segments, which several threads check in
parallel: computing a checksum releases the GIL. Each thread has one buffer, so memory is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import OWNER, in_words
from onefold.checkpoint.folder_source import state_of_text
from onefold.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    STATE,
    VERSION,
    FileRecord,
    Manifest,
    Record,
    StoredPiece,
    checksum_line,
    key_of,
    path_in,
)
from onefold.checkpoint.tensorfile import (
    CHUNK,
    DTYPES,
    LARGEST_HEADER,
    TensorSpan,
    crc32,
    joined,
    numel_of,
    parse_header,
)
from onefold.checkpoint.values import decode
from onefold.reading import open_regular, parse_json, read_bytes

#: Bytes of a tensor that one thread checks at a time.
SEGMENT = 64 << 20
#: Two SHA-256s with this many equal digits, of 64, are not alike by chance: one of them is damaged.
_ALIKE = 40
_FORM = re.compile(rb"[0-9a-f]{64}  " + re.escape(MANIFEST.encode()) + rb"\n")

Advance = Callable[[int], object]
#: (a tensor, one of its pieces in a file).
Inside = tuple[Record, StoredPiece]


@dataclass(frozen=True)
class Problem:
    """A difference from what was saved. `tensor`: the affected tensor; "" for the whole file."""

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.what}"


@dataclass
class Examination:
    """The result of verifying a checkpoint. `notes`: remarks that are not problems."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    nbytes: int = 0

    def add(self, file: str, what: str, tensor: object = "") -> None:
        self.problems.append(Problem(file, str(tensor), what))

    def note(self, file: str, what: str, tensor: str = "") -> None:
        self.notes.append(Problem(file, tensor, what))


def examine(folder: Path | str, advance: Advance | None = None) -> Examination:
    """Read and check every byte of the checkpoint in `folder`. If the result has no `problems`, the
    checkpoint is as it was saved.

    Args:
        advance: called, from several threads, with the bytes of tensor files read since its last
            call.

    Raises:
        CheckpointError: there is no such folder, it is not a checkpoint, or it is of a later
            version.
    """
    out = Examination(Path(folder))
    manifest = _manifest(out)
    if manifest is None:
        return out
    doubtful = bool(out.problems)
    try:
        _check_files(out, manifest, advance)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if not doubtful:
            raise
        # A damaged manifest may contain other values where numbers are expected
        out.note(MANIFEST, f"not all could be checked by it: {type(error).__name__}: {error}")
    if doubtful:
        _doubt_manifest(out)
    return out


def is_like_a_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint or the remains of one."""
    return folder.is_dir() and (
        (folder / MANIFEST).exists()
        or (folder / CHECKSUM).exists()
        or any(folder.glob("rank-[0-9]*.safetensors"))
    )


# -- the manifest ----------------------------------------------------------------------------------


def _manifest(out: Examination) -> Manifest | None:
    """Return the manifest, even one with a wrong checksum; None if it cannot be read."""
    folder = out.folder
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; name a checkpoint's folder."
            if folder.exists()
            else f"there is no folder {folder}."
        )
    if not is_like_a_checkpoint(folder):
        raise CheckpointError(f"{folder} is no Onefold checkpoint: it has no {MANIFEST}.")
    text, line = _small(out, MANIFEST), _small(out, CHECKSUM)
    if text is None:
        return None
    sound = line is not None and line == checksum_line(text).encode()
    if line is not None and not sound:
        _blame(out, text, line)
    try:
        return Manifest.from_text(text, folder / MANIFEST)
    except CheckpointError as error:
        if sound and _is_later(text):
            raise
        out.add(MANIFEST, f"it cannot be read: {error}")
    return None


def _small(out: Examination, name: str) -> bytes | None:
    with _told(out, name):
        data = read_bytes(path_in(out.folder, name))
        out.files, out.nbytes = out.files + 1, out.nbytes + len(data)
        return data
    return None


@contextlib.contextmanager
def _told(out: Examination, name: str, lost: str = "") -> Iterator[None]:
    """Add a problem if the block cannot read file `name`. `lost`: the file's contents, for the
    message if it is missing.
    """
    try:
        yield
    except CheckpointError as error:
        out.add(name, str(error))
    except FileNotFoundError:
        out.add(name, f"it is missing.{lost}")
    except OSError as error:
        out.add(name, f"it cannot be read: {in_words(error)}.")


def _blame(out: Examination, text: bytes, line: bytes) -> None:
    """Add a problem for the manifest (`text`) or for its checksum (`line`), which do not agree.

    If most digits of the recorded checksum are right, the checksum file is damaged. If they have
    nothing in common, the manifest is reported: a changed byte changes the whole checksum. The same
    is seen if the checksum file belongs to another manifest.
    """
    right = checksum_line(text).encode()
    alike = sum(a == b for a, b in zip(right[:64], line[:64], strict=False))
    if alike >= _ALIKE or not _FORM.fullmatch(line):
        out.add(CHECKSUM, f"it should read {right.decode().strip()!r}, and reads {_shown(line)}.")
    else:
        says = f"{CHECKSUM} says {_shown(line[:64])}."
        out.add(MANIFEST, f"its SHA-256 is {right[:64].decode()}, {says}")


def _doubt_manifest(out: Examination) -> None:
    """Add to all problems that the manifest, by which they were found, is itself in doubt."""
    own = [p for p in out.problems if p.file in (MANIFEST, CHECKSUM)]
    rest = [p for p in out.problems if p.file not in (MANIFEST, CHECKSUM)]
    if not any(p.file == MANIFEST for p in own):
        return
    if not rest and len(own) == 1:
        what = (
            f"or it is this file that is not the right one: all other files agree with {MANIFEST}."
        )
        own.append(Problem(CHECKSUM, "", what))
    out.problems = own + [
        Problem(p.file, p.tensor, f"{p.what} So says the manifest, which is damaged itself.")
        for p in rest
    ]


def _shown(line: bytes) -> str:
    return repr(line[:90].decode(errors="replace").strip())


def _is_later(text: bytes) -> bool:
    """Return whether a later version wrote this manifest, which is then not damaged."""
    try:
        version = parse_json(text)["version"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(version, int) and version > VERSION


# -- the other files -------------------------------------------------------------------------------


def _check_files(out: Examination, manifest: Manifest, advance: Advance | None) -> None:
    """Check all files except the manifest itself."""
    out.tensors = len(manifest.records)
    inside: dict[str, list[Inside]] = {}
    for record in manifest.records:
        for piece in record.pieces:
            if piece.file not in manifest.files:
                what = f"a piece of it lies in {piece.file}, which the manifest does not list."
                out.add(MANIFEST, what, record.item)
            inside.setdefault(piece.file, []).append((record, piece))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "onefold-verify") as pool:
        reading = _Reading(pool, advance)
        try:
            for name, recorded in manifest.files.items():
                _check_file(out, name, recorded, inside.get(name, []), reading)
        finally:
            pool.shutdown(cancel_futures=True)
            out.nbytes += reading.nbytes
    # A save that was killed right after the rename leaves its file `owner`
    known = {MANIFEST, CHECKSUM, OWNER, *manifest.files}
    for path in sorted(out.folder.rglob("*")):
        name = path.relative_to(out.folder).as_posix()
        if name not in known and not path.is_dir():
            out.note(name, "the manifest does not know this file: nothing reads it.")


def _check_file(
    out: Examination, name: str, recorded: FileRecord, inside: list[Inside], reading: _Reading
) -> None:  # fmt: skip
    names = ", ".join(str(r.item) for r, _ in inside[:3]) + (", ..." if inside[3:] else "")
    holds = f" It holds a part of {len(inside)} tensors: {names}." if inside else ""
    with _told(out, name, holds):
        path = path_in(out.folder, name)
        file = open_regular(path)
        size = os.fstat(file).st_size
        os.close(file)
        out.files += 1
        if size != recorded.nbytes:
            how = "it was cut short" if size < recorded.nbytes else "something was added"
            out.add(name, f"it has {size} bytes and should have {recorded.nbytes}: {how}.")
        if recorded.head_only:
            _check_tensors(out, name, recorded, inside, reading)
        else:
            _check_whole(out, name, recorded, named=size == recorded.nbytes)


def _check_whole(out: Examination, name: str, recorded: FileRecord, named: bool) -> None:
    """Check a file that has one checksum. `named`: report a wrong checksum. False if a wrong size
    has been reported already.
    """
    with open(out.folder / name, "rb", opener=open_regular) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        out.nbytes += file.tell()
    if digest != recorded.sha256:
        if named:
            sums = f"(SHA-256 {digest}, saved {recorded.sha256})"
            out.add(name, f"its bytes are not those that were saved {sums}.")
    elif name == STATE:
        try:
            state = state_of_text(read_bytes(out.folder / name), out.folder / name)
            decode(state, lambda number: torch.empty(0, device="cpu"))
        except CheckpointError as error:
            out.add(name, str(error))


def _check_tensors(
    out: Examination, name: str, recorded: FileRecord, inside: list[Inside], reading: _Reading
) -> None:  # fmt: skip
    """Check a tensor file: its header, then every piece."""
    path = out.folder / name
    length = recorded.nbytes - sum((p.stop - p.start) * DTYPES[r.dtype].itemsize for r, p in inside)
    with open(path, "rb", opener=open_regular) as file:
        head = file.read(min(max(0, length), LARGEST_HEADER, recorded.nbytes))
        if not _is_head(head, recorded):
            # The manifest may leave tensors of the file out (checkpoint/stages.py): ask the file
            file.seek(0)
            own = 8 + int.from_bytes(file.read(8), "little")
            file.seek(0)
            shorter = file.read(own) if own < length else b""
            head = shorter if _is_head(shorter, recorded) else head
    out.nbytes += len(head)
    if not _is_head(head, recorded):
        of = f"(the first {length} bytes: names and places of its {len(inside)} tensors)"
        out.add(name, f"its head {of} is damaged.")
        return
    spans = parse_header(head)  # the file may be shorter than its header says
    pieces = []
    for record, piece in inside:
        key = key_of(record.item, piece.start, piece.box)
        span = spans.pop(key, None)
        if span is None:
            out.add(name, f"the file has no tensor {key!r}.", record.item)
        elif span.dtype != DTYPES[record.dtype] or numel_of(span.shape) != piece.stop - piece.start:
            there = f"{span.dtype} {list(span.shape)}"
            what = f"it is {there} there, the manifest says {record.dtype}."
            out.add(name, what, record.item)
        else:
            pieces.append((record, piece, span))
    for key in spans:
        out.note(name, "the manifest does not know this tensor: nothing reads it.", key)
    for record, piece, what in reading.wrong(path, pieces):
        out.add(name, f"elements {piece.start} to {piece.stop}: {what}", record.item)


def _is_head(head: bytes, recorded: FileRecord) -> bool:
    return hashlib.sha256(head).hexdigest() == recorded.sha256


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """Threads that compute checksums, each with its own buffer.

    Attributes:
        nbytes: bytes read so far.
    """

    pool: ThreadPoolExecutor
    advance: Advance | None
    nbytes: int = 0
    local: threading.local = field(default_factory=threading.local)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(
        self, path: Path, pieces: Iterable[tuple[Record, StoredPiece, TensorSpan]]
    ) -> Iterator[tuple[Record, StoredPiece, str]]:
        """Yield the pieces whose bytes differ from what was saved, with a description."""
        with open(path, "rb", opener=open_regular) as file:
            waiting = [
                (r, p, [self.pool.submit(self._crc, file.fileno(), *ab) for ab in _segments(span)])
                for r, p, span in pieces
            ]
            for record, piece, segments in waiting:
                try:
                    found = joined(s.result() for s in segments)
                except EOFError:
                    yield record, piece, "the file ends before them."
                except OSError as error:
                    yield record, piece, f"they cannot be read: {in_words(error)}."
                else:
                    if found != piece.crc:
                        sums = f"(CRC-32 {found:08x}, saved {piece.crc:08x})"
                        yield record, piece, f"the bytes are not those that were saved {sums}."

    def _crc(self, file: int, begin: int, end: int) -> tuple[int, int]:
        """Return (CRC-32, length) of bytes `[begin, end)`."""
        if not hasattr(self.local, "buffer"):
            self.local.buffer = memoryview(bytearray(CHUNK))
        buffer, at, crc = self.local.buffer, begin, 0
        while at < end:
            got = os.preadv(file, [buffer[: min(CHUNK, end - at)]], at)
            if got == 0:
                raise EOFError
            crc, at = crc32(buffer[:got], crc), at + got
            with self.lock:
                self.nbytes += got
            if self.advance is not None:
                self.advance(got)
        return crc, end - begin


def _segments(span: TensorSpan) -> Iterator[tuple[int, int]]:
    for begin in range(span.begin, span.end, SEGMENT):
        yield begin, min(begin + SEGMENT, span.end)
