"""Is a checkpoint what was saved? Every byte is read and checked against the manifest; what is
wrong is named by file and tensor.

    manifest.sha256 ──► manifest.json ──► SHA-256 of each small file, and of each tensor file's head
                                     └──► CRC-32 of each piece of each tensor (head and pieces are all of a tensor file)

No rank and no model is needed. Memory is bounded: threads (a checksum lets go of the interpreter)
share the pieces, cut into segments, and each reads through one buffer.
"""

from __future__ import annotations

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
)

#: Bytes of a tensor that one thread checks at a time.
SEGMENT = 64 << 20
#: Digits of two SHA-256s, of 64, that agree by chance far less often than once in a lifetime.
_ALIKE = 40
_FORM = re.compile(rb"[0-9a-f]{64}  " + re.escape(MANIFEST.encode()) + rb"\n")

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Problem:
    """Something is not as it was saved: the file's name in the checkpoint, the tensor in it ("" for
    all of it), what is wrong.
    """

    file: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor + ': ' if self.tensor else ''}{self.what}"


@dataclass
class Examination:
    """What came of reading a checkpoint: its problems, what is no problem but worth a word, and how
    much was read.
    """

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    nbytes: int = 0

    def add(self, file: str, tensor: str, what: str) -> None:
        self.problems.append(Problem(file, tensor, what))


def verify(folder: Path | str, advance: Advance | None = None) -> list[Problem]:
    """What is wrong with the checkpoint in `folder`, nothing if it is whole. See `examine`."""
    return examine(folder, advance).problems


def examine(folder: Path | str, advance: Advance | None = None) -> Examination:
    """Read every byte of the checkpoint in `folder`.

    Args:
        advance: called, from several threads, with the bytes of tensor files read since its last
            call.

    Raises:
        CheckpointError: there is no such folder, it is no checkpoint at all, or one from a later
            version.
    """
    folder = Path(folder)
    verdict = Examination(folder)
    manifest = _manifest(verdict)
    if manifest is None:
        return verdict
    if not verdict.problems:
        _check_files(verdict, manifest, advance)
        return verdict
    try:
        _check_files(verdict, manifest, advance)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        # A number that has become something else
        verdict.notes.append(
            Problem(
                MANIFEST, "", f"not all could be checked by it: {type(error).__name__}: {error}"
            )
        )
    _shake(verdict)
    return verdict


def _check_files(verdict: Examination, manifest: Manifest, advance: Advance | None) -> None:
    """Everything but the manifest itself."""
    verdict.tensors = len(manifest.records)
    inside: dict[str, list[tuple[Record, StoredPiece]]] = {}
    for record in manifest.records:
        for piece in record.pieces:
            if piece.file not in manifest.files:
                verdict.add(
                    MANIFEST,
                    str(record.item),
                    f"a piece of it lies in {piece.file}, which the manifest does not list.",
                )
            inside.setdefault(piece.file, []).append((record, piece))
    with _ChecksumThreads(advance) as reader:
        for name, recorded in manifest.files.items():
            _check_file(verdict, name, recorded, inside.get(name, []), reader)
    _note_others(verdict, manifest)


def is_like_a_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint or what is left of one."""
    if not folder.is_dir():
        return False
    return (
        (folder / MANIFEST).exists()
        or (folder / CHECKSUM).exists()
        or any(folder.glob("rank-[0-9]*.safetensors"))
    )


# -- the manifest ----------------------------------------------------------------------------------


def _manifest(verdict: Examination) -> Manifest | None:
    """The manifest as far as it can be read; problems go into the verdict."""
    folder = verdict.folder
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; name a checkpoint's folder."
            if folder.exists()
            else f"there is no folder {folder}."
        )
    if not is_like_a_checkpoint(folder):
        raise CheckpointError(f"{folder} is no Onefold checkpoint: it has no {MANIFEST}.")
    text, line = _small(verdict, MANIFEST), _small(verdict, CHECKSUM)
    if text is None:
        return None
    sound = line is not None and line == checksum_line(text).encode()
    if line is not None and not sound:
        _blame(verdict, text, line)
    try:
        return Manifest.from_text(text.decode(), folder / MANIFEST)
    except CheckpointError as error:
        if sound and _is_later(text):
            raise
        verdict.add(MANIFEST, "", f"it cannot be read: {error}")
    except UnicodeDecodeError as error:
        verdict.add(MANIFEST, "", f"it cannot be read: byte {error.start} is no UTF-8.")
    return None


def _small(verdict: Examination, name: str) -> bytes | None:
    try:
        data = path_in(verdict.folder, name).read_bytes()
    except CheckpointError as error:
        verdict.add(name, "", str(error))
        return None
    except FileNotFoundError:
        verdict.add(name, "", "it is missing.")
        return None
    except OSError as error:
        verdict.add(name, "", f"it cannot be read: {in_words(error)}.")
        return None
    verdict.files, verdict.nbytes = verdict.files + 1, verdict.nbytes + len(data)
    return data


def _blame(verdict: Examination, text: bytes, line: bytes) -> None:
    """The two do not agree: which one is damaged?

    A checksum that lost some digits still has the others in common with the right one. A manifest
    with a changed byte has a checksum that has nothing in common with it; and so has a sound
    manifest beside another one's checksum.
    """
    right = checksum_line(text).encode()
    alike = sum(a == b for a, b in zip(right[:64], line[:64], strict=False))
    if alike >= _ALIKE or not _FORM.fullmatch(line):
        verdict.add(
            CHECKSUM, "", f"it should read {right.decode().strip()!r}, and reads {_shown(line)}."
        )
    else:
        verdict.add(
            MANIFEST,
            "",
            f"its SHA-256 is {right[:64].decode()}, {CHECKSUM} says {_shown(line[:64])}.",
        )


def _shake(verdict: Examination) -> None:
    """The manifest does not agree with its checksum. Say what that means for all that was found by
    it.
    """
    own = [p for p in verdict.problems if p.file in (MANIFEST, CHECKSUM)]
    rest = [p for p in verdict.problems if p.file not in (MANIFEST, CHECKSUM)]
    if not any(p.file == MANIFEST for p in own):
        return
    if not rest and len(own) == 1:
        own.append(
            Problem(
                CHECKSUM,
                "",
                "or it is this file that is not the right one: all other files agree with"
                f" {MANIFEST}.",
            )
        )
    verdict.problems = own + [
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


def _check_file(
    verdict: Examination,
    name: str,
    recorded: FileRecord,
    inside: list[tuple[Record, StoredPiece]],
    reader: _ChecksumThreads,
) -> None:
    try:
        path = path_in(verdict.folder, name)
        size = path.stat().st_size
        if not path.is_file():
            verdict.add(name, "", "it is a folder; expected a file.")
            return
    except CheckpointError as error:
        verdict.add(name, "", str(error))
        return
    except FileNotFoundError:
        names = ", ".join(str(r.item) for r, _ in inside[:3])
        holds = (
            f" It holds a part of {len(inside)} tensors:"
            f" {names}{', ...' if len(inside) > 3 else ''}."
            if inside
            else ""
        )
        verdict.add(name, "", f"it is missing.{holds}")
        return
    except OSError as error:
        verdict.add(name, "", f"it cannot be read: {in_words(error)}.")
        return
    verdict.files += 1
    if size != recorded.nbytes:
        how = "it was cut short" if size < recorded.nbytes else "something was added"
        verdict.add(name, "", f"it has {size} bytes and should have {recorded.nbytes}: {how}.")
    try:
        if recorded.head_only:
            _check_tensors(verdict, name, recorded, inside, reader)
        else:
            _check_whole(verdict, name, recorded, named=size == recorded.nbytes)
    except OSError as error:
        verdict.add(name, "", f"it cannot be read: {in_words(error)}.")


def _check_whole(verdict: Examination, name: str, recorded: FileRecord, named: bool) -> None:
    """A file with one checksum. `named`: say so if it is wrong; otherwise that is clear already."""
    digest = hashlib.sha256()
    with (verdict.folder / name).open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
            verdict.nbytes += len(block)
    if digest.hexdigest() != recorded.sha256:
        if named:
            verdict.add(
                name,
                "",
                f"its bytes are not those that were saved (SHA-256 {digest.hexdigest()}, saved"
                f" {recorded.sha256}).",
            )
    elif name == STATE:
        try:
            json.loads((verdict.folder / name).read_bytes())
        except ValueError as error:
            verdict.add(name, "", f"it is no JSON: {error}.")


def _check_tensors(
    verdict: Examination,
    name: str,
    recorded: FileRecord,
    inside: list[tuple[Record, StoredPiece]],
    reader: _ChecksumThreads,
) -> None:
    """A tensor file: its head, then every piece."""
    path = verdict.folder / name
    length = recorded.nbytes - sum((p.stop - p.start) * DTYPES[r.dtype].itemsize for r, p in inside)
    with path.open("rb") as file:
        head = file.read(min(max(0, length), LARGEST_HEADER, recorded.nbytes))
    verdict.nbytes += len(head)
    if hashlib.sha256(head).hexdigest() != recorded.sha256:
        verdict.add(
            name,
            "",
            f"its head (the first {length} bytes: names and places of its {len(inside)} tensors) is"
            " damaged.",
        )
        return
    entries = _entries(head)
    pieces = []
    for record, piece in inside:
        key = key_of(record.item, piece.start)
        entry = entries.pop(key, None)
        if entry is None:
            verdict.add(name, str(record.item), f"the file has no tensor {key!r}.")
        elif (
            entry.dtype != DTYPES[record.dtype] or numel_of(entry.shape) != piece.stop - piece.start
        ):
            verdict.add(
                name,
                str(record.item),
                f"it is {entry.dtype} {list(entry.shape)} there, the manifest says {record.dtype}.",
            )
        else:
            pieces.append((record, piece, entry))
    for key in entries:
        verdict.notes.append(
            Problem(name, key, "the manifest does not know this tensor: nothing reads it.")
        )
    for record, piece, what in reader.wrong(path, pieces):
        verdict.add(name, str(record.item), f"elements {piece.start} to {piece.stop}: {what}")
    verdict.nbytes += reader.taken()


def _entries(head: bytes) -> dict[str, TensorSpan]:
    """The tensors that a sound head names; the file behind it may be shorter than it says."""
    table = json.loads(head[8:])
    table.pop("__metadata__", None)
    return {
        key: TensorSpan(
            DTYPES[t["dtype"]],
            tuple(t["shape"]),
            len(head) + t["data_offsets"][0],
            len(head) + t["data_offsets"][1],
        )
        for key, t in table.items()
    }


def _note_others(verdict: Examination, manifest: Manifest) -> None:
    # A kill right after the commit leaves the owner
    known = {MANIFEST, CHECKSUM, OWNER, *manifest.files}
    for path in sorted(verdict.folder.rglob("*")):
        name = path.relative_to(verdict.folder).as_posix()
        if name not in known and not path.is_dir():
            verdict.notes.append(
                Problem(name, "", "the manifest does not know this file: nothing reads it.")
            )


# -- reading ---------------------------------------------------------------------------------------


class _ChecksumThreads:
    """Threads that take checksums, each with a buffer of its own."""

    def __init__(self, advance: Advance | None) -> None:
        self._pool = ThreadPoolExecutor(
            min(8, os.cpu_count() or 1), thread_name_prefix="onefold-verify"
        )
        self._local, self._lock = threading.local(), threading.Lock()
        self._advance, self._bytes = advance, 0

    def __enter__(self) -> _ChecksumThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def taken(self) -> int:
        """Bytes read since the last call."""
        with self._lock:
            taken, self._bytes = self._bytes, 0
        return taken

    def wrong(
        self, path: Path, pieces: Iterable[tuple[Record, StoredPiece, TensorSpan]]
    ) -> Iterator[tuple[Record, StoredPiece, str]]:
        """The pieces whose bytes are not those that were saved, and what is wrong with them."""
        file = os.open(path, os.O_RDONLY)
        try:
            waiting = [
                (r, piece, [self._pool.submit(self._crc, file, a, b) for a, b in _segments(entry)])
                for r, piece, entry in pieces
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
                        yield (
                            record,
                            piece,
                            (
                                f"the bytes are not those that were saved (CRC-32 {found:08x},"
                                f" saved {piece.crc:08x})."
                            ),
                        )
        finally:
            os.close(file)

    def _crc(self, file: int, begin: int, end: int) -> tuple[int, int]:
        """(CRC-32, length) of bytes `[begin, end)`."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(CHUNK))
        at, crc = begin, 0
        while at < end:
            got = os.preadv(file, [buffer[: min(CHUNK, end - at)]], at)
            if got == 0:
                raise EOFError
            crc, at = crc32(buffer[:got], crc), at + got
            with self._lock:
                self._bytes += got
            if self._advance is not None:
                self._advance(got)
        return crc, end - begin


def _segments(entry: TensorSpan) -> Iterator[tuple[int, int]]:
    for begin in range(entry.begin, entry.end, SEGMENT):
        yield begin, min(begin + SEGMENT, entry.end)
