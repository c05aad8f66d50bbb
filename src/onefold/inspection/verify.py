"""Is a checkpoint what was saved? Every byte is read and checked against the manifest; what is
wrong is named by file and tensor.

    manifest.sha256 ──► manifest.json ──► SHA-256 of each small file, and of each tensor file's head
                                     └──► CRC-32 of each piece of each tensor (head and pieces are all of a tensor file)

No rank and no model is needed. Memory is bounded: threads (a checksum lets go of the interpreter)
share the pieces, cut into segments, and each reads through one buffer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import OWNER, in_words
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

#: Bytes of a tensor that one thread checks at a time.
SEGMENT = 64 << 20
#: Digits of two SHA-256s, of 64, that agree by chance far less often than once in a lifetime.
_ALIKE = 40
_FORM = re.compile(rb"[0-9a-f]{64}  " + re.escape(MANIFEST.encode()) + rb"\n")

Advance = Callable[[int], object]
#: A piece that lies in a file, and of which tensor it is.
Inside = tuple[Record, StoredPiece]


@dataclass(frozen=True)
class Problem:
    """What is not as it was saved: the file, the tensor in it ("" for all of it), and how."""

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.what}"


@dataclass
class Examination:
    """What came of reading a checkpoint. `notes`: what is no problem but worth a word."""

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
    """Read every byte of the checkpoint in `folder`; without `problems` it is what was saved.

    Args:
        advance: called, from several threads, with the bytes of tensor files read since its last
            call.

    Raises:
        CheckpointError: there is no such folder, it is no checkpoint at all, or one from a later
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
        # A number that has become something else
        out.note(MANIFEST, f"not all could be checked by it: {type(error).__name__}: {error}")
    if doubtful:
        _doubt_manifest(out)
    return out


def is_like_a_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint or what is left of one."""
    return folder.is_dir() and (
        (folder / MANIFEST).exists()
        or (folder / CHECKSUM).exists()
        or any(folder.glob("rank-[0-9]*.safetensors"))
    )


# -- the manifest ----------------------------------------------------------------------------------


def _manifest(out: Examination) -> Manifest | None:
    """The manifest as far as it can be read."""
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
        return Manifest.from_text(text.decode(), folder / MANIFEST)
    except CheckpointError as error:
        if sound and _is_later(text):
            raise
        out.add(MANIFEST, f"it cannot be read: {error}")
    except UnicodeDecodeError as error:
        out.add(MANIFEST, f"it cannot be read: byte {error.start} is no UTF-8.")
    return None


def _small(out: Examination, name: str) -> bytes | None:
    with _told(out, name):
        data = path_in(out.folder, name).read_bytes()
        out.files, out.nbytes = out.files + 1, out.nbytes + len(data)
        return data
    return None


@contextlib.contextmanager
def _told(out: Examination, name: str, lost: str = "") -> Iterator[None]:
    """A file that cannot be read is a problem; `lost`: what it held, said if it is missing."""
    try:
        yield
    except CheckpointError as error:
        out.add(name, str(error))
    except FileNotFoundError:
        out.add(name, f"it is missing.{lost}")
    except OSError as error:
        out.add(name, f"it cannot be read: {in_words(error)}.")


def _blame(out: Examination, text: bytes, line: bytes) -> None:
    """The two do not agree: which one is damaged?

    A checksum that lost some digits still has the others in common with the right one. A manifest
    with a changed byte has a checksum that has nothing in common with it; and so has a sound
    manifest beside another one's checksum.
    """
    right = checksum_line(text).encode()
    alike = sum(a == b for a, b in zip(right[:64], line[:64], strict=False))
    if alike >= _ALIKE or not _FORM.fullmatch(line):
        out.add(CHECKSUM, f"it should read {right.decode().strip()!r}, and reads {_shown(line)}.")
    else:
        says = f"{CHECKSUM} says {_shown(line[:64])}."
        out.add(MANIFEST, f"its SHA-256 is {right[:64].decode()}, {says}")


def _doubt_manifest(out: Examination) -> None:
    """The manifest and its checksum differ: say so of all that was found by it."""
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
    """Whether a later version wrote this manifest (which is no damage)."""
    try:
        version = json.loads(text)["version"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(version, int) and version > VERSION


# -- the other files -------------------------------------------------------------------------------


def _check_files(out: Examination, manifest: Manifest, advance: Advance | None) -> None:
    """Everything but the manifest itself."""
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
    # A kill right after the commit leaves the owner
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
        size = path.stat().st_size
        if not path.is_file():
            out.add(name, "it is a folder; expected a file.")
            return
        out.files += 1
        if size != recorded.nbytes:
            how = "it was cut short" if size < recorded.nbytes else "something was added"
            out.add(name, f"it has {size} bytes and should have {recorded.nbytes}: {how}.")
        if recorded.head_only:
            _check_tensors(out, name, recorded, inside, reading)
        else:
            _check_whole(out, name, recorded, named=size == recorded.nbytes)


def _check_whole(out: Examination, name: str, recorded: FileRecord, named: bool) -> None:
    """A file with one checksum. `named`: say so if it is wrong; otherwise that is clear already."""
    with (out.folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        out.nbytes += file.tell()
    if digest != recorded.sha256:
        if named:
            sums = f"(SHA-256 {digest}, saved {recorded.sha256})"
            out.add(name, f"its bytes are not those that were saved {sums}.")
    elif name == STATE:
        try:
            json.loads((out.folder / name).read_bytes())
        except ValueError as error:
            out.add(name, f"it is no JSON: {error}.")


def _check_tensors(
    out: Examination, name: str, recorded: FileRecord, inside: list[Inside], reading: _Reading
) -> None:  # fmt: skip
    """A tensor file: its head, then every piece."""
    path = out.folder / name
    length = recorded.nbytes - sum((p.stop - p.start) * DTYPES[r.dtype].itemsize for r, p in inside)
    with path.open("rb") as file:
        head = file.read(min(max(0, length), LARGEST_HEADER, recorded.nbytes))
    out.nbytes += len(head)
    if hashlib.sha256(head).hexdigest() != recorded.sha256:
        of = f"(the first {length} bytes: names and places of its {len(inside)} tensors)"
        out.add(name, f"its head {of} is damaged.")
        return
    spans = parse_header(head)  # the file behind it may be shorter than it says
    pieces = []
    for record, piece in inside:
        key = key_of(record.item, piece.start)
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


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """Threads that take checksums, each with a buffer of its own.

    Attributes:
        nbytes: read so far.
    """

    pool: ThreadPoolExecutor
    advance: Advance | None
    nbytes: int = 0
    local: threading.local = field(default_factory=threading.local)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(
        self, path: Path, pieces: Iterable[tuple[Record, StoredPiece, TensorSpan]]
    ) -> Iterator[tuple[Record, StoredPiece, str]]:
        """The pieces whose bytes are not those that were saved, and what is wrong with them."""
        with path.open("rb") as file:
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
        """(CRC-32, length) of bytes `[begin, end)`."""
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
