"""What `--data` names, as documents. Needs no torch, so that what cannot be read is told before
anything is loaded.

    topics                        Python's reference text
    a folder                      its text files, a document each; else its Parquet, Arrow and JSON-lines files
    a file of JSON lines          `text` or `messages` of each line, or --text-field
    a Parquet or Arrow file       the same of each row
    any other file                one document
    org/name/CONFIG:SPLIT         a dataset of the hub, by way of `datasets`; without :SPLIT its split `train`

Several are written a.jsonl:0.7,b.parquet:0.3: the numbers say which share of the samples each gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.data.tables import (
    HubData,
    Row,
    check_hub_data,
    column_of,
    dataset_rows,
    kind_of_value,
    table_rows,
)
from onefold.wording import TrainError

#: ("text", [str, ...]) or ("messages", [[{"role": ..., "content": ...}, ...], ...]).
Documents = tuple[str, list[Any]]
#: What a folder is searched for.
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv", ".log", ".text"})
LINES, TABLES = (".jsonl", ".ndjson"), (".parquet", ".arrow")
#: Bytes up to which data is read at once. A text file above comes in pieces.
SMALL = 16 << 20
#: Bytes of such a piece, about.
PIECE = 1 << 20
#: Bytes at a file's beginning by which text is told from what is none.
_LOOK = 1 << 16
#: Share of characters there that are no UTF-8 from which on a file is none in UTF-8.
_NO_TEXT = 0.1
_WEIGHT = re.compile(r"(.+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Part:
    """One of the things that `--data` names. `weight`: its share of the samples, None if none of
    them has one.
    """

    name: str
    weight: float | None = None


def parts_of(data: str) -> list[Part]:
    """Raises TrainError for weights that some have and others have not."""
    if "," not in data or os.path.exists(data):
        return [Part(data)]
    found = []
    for text in filter(None, (part.strip() for part in data.split(","))):
        weighed = None if os.path.exists(text) else _WEIGHT.fullmatch(text)
        found.append(Part(weighed[1], float(weighed[2])) if weighed else Part(text))
    without = [part.name for part in found if part.weight is None]
    if without and len(without) < len(found):
        raise TrainError(
            f"--data {data}: {without[0]} has no weight, and others have; write {without[0]}:0.5,"
            " or none at all."
        )
    if any(part.weight == 0 for part in found) or not found:
        raise TrainError(f"--data {data}: expected names with weights above 0, as in a:0.7,b:0.3.")
    return found


def is_small(data: str) -> bool:
    """Whether it is read at once: text and JSON lines of a few MiB, without weights."""
    parts = parts_of(data)
    if len(parts) > 1:
        return False
    if data == "topics":
        return True
    try:
        files = files_of(Path(data))
        size = sum(file.stat().st_size for file in files)
    except (OSError, TrainError):
        return _of_hub(data) is None  # told when it is read
    return size <= SMALL and not any(file.suffix.lower() in TABLES for file in files)


def read_documents(name: str, field: str | None = None) -> Documents:
    """What a `--data` value names, at once. Raises TrainError if it is not there or cannot be
    read.
    """
    rows = list(rows_of(name, field, piecewise=False))
    if not any(row for _, row, _ in rows):
        raise TrainError(f"--data {name}: there is nothing in it, expected text.")
    return rows[0][0], [row for _, row, _ in rows]


def check_data(data: str, seq: int, field: str | None = None, seconds: float = 1.0) -> None:
    """Raise TrainError if `--data` is not there, unreadable or too little for one sequence, as far
    as so many seconds of reading tell.
    """
    kinds: dict[str, str] = {}
    end = time.monotonic() + seconds
    for part in parts_of(data):
        if part.name == "topics":
            kinds["text"] = part.name
            continue
        if hub := _of_hub(part.name):
            check_hub_data(part.name, hub)
            continue
        most, whole = 0, False
        for kind, row, _ in rows_of(part.name, field, only_look=True):
            kinds[kind] = part.name
            # No tokenizer makes more tokens than bytes, and two beside
            most += bool(row) * (len(row.encode()) + 2 if kind == "text" else 1)
            if time.monotonic() > end:
                break
        else:
            whole = True
        if whole and not most:
            raise TrainError(f"--data {part.name}: there is nothing in it, expected text.")
        if whole and "messages" not in kinds and most < min(seq, _LOOK):
            raise TrainError(
                f"--data {part.name} has at most {most} tokens, less than one sequence of --seq"
                f" {seq}: more text or a shorter --seq."
            )
    refuse_two_kinds(data, kinds)


def refuse_two_kinds(data: str, kinds: Mapping[str, str]) -> None:
    """Raise TrainError for text beside conversations. `kinds`: {kind: a part of that kind}."""
    if len(kinds) > 1:
        raise TrainError(
            f"--data {data}: {kinds['text']} holds text and {kinds['messages']} conversations; use"
            " one kind in a run."
        )


def rows_of(
    name: str, field: str | None = None, only_look: bool = False, piecewise: bool = True
) -> Iterator[Row]:
    """All there is, in order.

    Args:
        field: the column or key to read; None for `text` or `messages`, whichever is there.
        only_look: the beginning of a text file, and a table's first rows.
        piecewise: give a text file above `SMALL` in pieces.

    Raises:
        TrainError: it is not there, or cannot be read.
    """
    if name == "topics":
        from pydoc_data.topics import topics

        yield from (("text", topics[key], True) for key in sorted(topics))
        return
    path = Path(name)
    try:
        if not path.is_dir() and not path.is_file():
            if hub := _of_hub(name):
                yield from dataset_rows(name, hub, field)
                return
            raise TrainError(
                f"--data {path}: expected topics, a text file, a folder, a .jsonl, .parquet or .arrow"
                " file, or org/name, and there is no such file."
            )
        for file in files_of(path):
            yield from _file(file, field, only_look, piecewise)
    except OSError as error:
        raise TrainError(
            f"--data {error.filename or path} cannot be read: {error.strerror or error}."
        ) from None


def key_of(name: str, field: str | None) -> str:
    """The same for the same content, as far as sizes, times of change and samples of the bytes of
    its files tell.
    """
    said = hashlib.sha256(repr(field).encode())
    path = Path(name)
    if not path.exists():
        said.update(name.encode())
    for file in files_of(path) if path.exists() else ():
        found = file.stat()
        said.update(f"{file.suffix} {found.st_size} {found.st_mtime_ns}".encode())
        for some in probed(file):
            said.update(some)
    return said.hexdigest()[:24]


# -- files -----------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """A file itself; of a folder what is read of it: its text files; else its tables and JSON
    lines. Raises TrainError if it has none.
    """
    if not folder.is_dir():
        return [folder]
    if (folder / "dataset_dict.json").is_file():  # of splits, by `save_to_disk`
        folder = folder / "train"
    every = sorted(p for p in folder.rglob("*") if p.is_file())
    text = [p for p in every if p.suffix.lower() in TEXT_ENDINGS]
    found = text or [p for p in every if p.suffix.lower() in (*LINES, *TABLES)]
    if not found:
        known = sorted(TEXT_ENDINGS | {*LINES, *TABLES})
        raise TrainError(f"--data {folder}: no text file in this folder ({', '.join(known)}).")
    # Of several splits the one to train on
    training = [] if text else [p for p in found if p.name.startswith("train")]
    return training or found


def _file(path: Path, field: str | None, only_look: bool, piecewise: bool) -> Iterator[Row]:
    ending = path.suffix.lower()
    if ending in LINES:
        for kind, row in _json_lines(path, field):
            yield kind, row, True
    elif ending in TABLES:
        yield from table_rows(path, field, only_look)
    else:
        yield from _text(path, only_look, piecewise)


def _text(path: Path, only_look: bool, piecewise: bool) -> Iterator[Row]:
    """A text file as one document, in pieces that end with a line if it is large."""
    with path.open("rb") as file:
        head = file.read(_LOOK)
        _refuse_what_is_no_text(path, head)
        if only_look or not piecewise or path.stat().st_size <= SMALL:
            data = head if only_look else head + file.read()
            yield "text", data.decode("utf-8", errors="replace"), True
            return
        rest = head
        while more := file.read(PIECE):
            rest += more
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > 8 * PIECE:  # one line: between two characters
                cut = len(rest)
                while cut and rest[cut - 1] & 0xC0 == 0x80:
                    cut -= 1
                cut -= bool(cut)
            if cut:
                yield "text", rest[:cut].decode("utf-8", errors="replace"), False
                rest = rest[cut:]
        yield "text", rest.decode("utf-8", errors="replace"), True


def _refuse_what_is_no_text(path: Path, head: bytes) -> None:
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TrainError(
            f"--data {path} is text in UTF-16; expected UTF-8. Convert it: iconv -f UTF-16 -t"
            " UTF-8."
        )
    at = head.find(b"\0")
    if at >= 0:
        raise TrainError(
            f"--data {path} is no text: byte {at} is 0. Expected text in UTF-8, or JSON lines in a"
            " file that ends in .jsonl."
        )
    text = head.decode("utf-8", errors="replace")
    wrong = text.count("\ufffd")
    if wrong > _NO_TEXT * len(text):
        raise TrainError(
            f"--data {path} is no text in UTF-8: {wrong} of its first {len(text)} characters are"
            " none. Convert it (iconv)."
        )


def _json_lines(path: Path, field: str | None) -> Iterator[tuple[str, Any]]:
    first = ""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            where = f"--data {path}, line {number}:"
            row = _json(where, raw)
            if not isinstance(row, dict):
                raise TrainError(
                    f"{where} expected a key `{field or 'text'}`{'' if field else ' or `messages`'},"
                    f" found {type(row).__name__}."
                )
            key = column_of(where, "key", list(row), field)
            kind = kind_of_value(where, key, row[key])
            first = first or kind
            if kind != first:
                raise TrainError(
                    f"{where} has `{key}`, the lines before the other; use one per file."
                )
            yield kind, row[key]
    if not first:
        raise TrainError(f"--data {path}: the file has no lines.")


def _json(where: str, raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TrainError(
            f"{where} byte {error.start} is no UTF-8. Expected JSON in UTF-8, a line each."
        ) from None
    except json.JSONDecodeError as error:
        raise TrainError(f"{where} not JSON ({error.msg}).") from None
    except RecursionError:
        raise TrainError(f"{where} nested too deeply.") from None


def _of_hub(name: str) -> HubData | None:
    """The dataset of the hub that it names: not a file that is missing."""
    file = Path(name.partition(":")[0])
    if file.suffix.lower() in (*TEXT_ENDINGS, *LINES, *TABLES) or os.path.exists(name):
        return None
    return HubData.of(name)


def needs_hub(data: str) -> bool:
    """Whether a part of `--data` is a dataset of the hub."""
    return any(_of_hub(part.name) is not None for part in parts_of(data))


#: Places of a file that a digest reads.
_PROBES = 64


def probed(file: Path) -> Iterator[bytes]:
    """Some bytes of a file, from places spread over all of it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for number in range(_PROBES):
            stream.seek(number * size // _PROBES)
            yield stream.read(4096)
