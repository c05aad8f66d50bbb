"""Read `--data` as documents. This module does not import torch, so errors in the data are reported
before anything is loaded.

    topics                        Python's reference text
    a folder                      its text files, one document each; if it has none, its Parquet, Arrow and JSON-lines files
    a file of JSON lines          `text` or `messages` of each line, or --text-field
    a Parquet or Arrow file       the same of each row, read by `datasets`
    any other file                one document
    org/name/CONFIG:SPLIT         a dataset of the hub, read by `datasets`; without :SPLIT its split `train`

Several parts are written a.jsonl:0.7,b.parquet:0.3. The numbers are their shares of the samples.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.reading import parse_json
from onefold.wording import TrainError, did_you_mean

#: (kind, a document or a piece of one, whether the document ends with it). Kinds are "text" (a
#: string) and "messages" (a list of {"role": ..., "content": ...}).
Row = tuple[str, Any, bool]
#: Endings of the text files that are read in a folder.
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv", ".log", ".text"})
LINES, TABLES = (".jsonl", ".ndjson"), (".parquet", ".arrow")
#: Bytes up to which a text file is read at once; larger ones in pieces of about so many characters.
SMALL, PIECE = 16 << 20, 1 << 20
#: Rows of a table, and characters of a text file, that are looked at before a run.
_ROWS, _LOOK = 1024, 1 << 16
#: A file is refused if more than this fraction of its first characters is not valid UTF-8.
_NO_TEXT = 0.1
_WEIGHT = re.compile(r"(.+):(\d+(?:\.\d+)?)")
#: org/name, org/name/CONFIG, org/name:SPLIT, org/name/CONFIG:SPLIT
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([\w.+-]+))?(?::(\S+))?")


@dataclass(frozen=True)
class Part:
    """A part of `--data`. `weight`: its share of the samples; None if the parts have no weights."""

    name: str
    weight: float | None = None


def parts_of(data: str) -> list[Part]:
    """Split `--data` into its parts. Raises TrainError if only some of them have weights."""
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


def check_data(data: str, field: str | None = None, seconds: float = 1.0) -> None:
    """Raise TrainError if `--data` is missing or unreadable. Reads for at most about `seconds`, and
    nothing of the hub, so it may miss errors further on.
    """
    kinds: dict[str, str] = {}
    end = time.monotonic() + seconds
    for part in parts_of(data):
        for kind, _, _ in (
            rows_of(part.name, field, only_look=True) if _hub(part.name) is None else ()
        ):
            kinds[kind] = part.name
            if time.monotonic() > end:
                break
    refuse_two_kinds(data, kinds)


def refuse_two_kinds(data: str, kinds: Mapping[str, str]) -> None:
    """Raise TrainError for both text and conversations. `kinds`: {kind: a part of that kind}."""
    if len(kinds) > 1:
        raise TrainError(
            f"--data {data}: {kinds['text']} holds text and {kinds['messages']} conversations; use"
            " one kind in a run."
        )


def rows_of(name: str, field: str | None = None, only_look: bool = False) -> Iterator[Row]:
    """Yield all documents of one part of `--data`, in order.

    Args:
        field: the column or key to read; None for `text` or `messages`, whichever exists.
        only_look: read only the beginning of a text file, and only the first rows of a table.

    Raises:
        TrainError: the part is missing, or cannot be read.
    """
    if name == "topics":
        from pydoc_data.topics import topics

        yield from (("text", topics[key], True) for key in sorted(topics))
        return
    path = Path(name)
    try:
        if (hub := _hub(name)) is not None:
            split = hub[3] or "train"
            # Offline: read the cache. Online: stream, which stores nothing on disk, but no slices
            streaming = not is_offline() and not set("[+") & set(split)
            yield from _table(name, field, hub[1], hub[2], split=split, streaming=streaming)
            return
        if not path.is_dir() and not path.is_file():
            raise TrainError(
                f"--data {path}: expected topics, a text file, a folder, a .jsonl, .parquet or .arrow"
                " file, or org/name, and there is no such file."
            )
        for file in files_of(path):
            ending = file.suffix.lower()
            if ending in LINES:
                yield from ((*row, True) for row in _json_lines(file, field))
            elif ending in TABLES:
                how = {"data_files": str(file), "split": "train", "streaming": True}
                found = _table(str(file), field, ending.removeprefix("."), **how)
                yield from itertools.islice(found, _ROWS if only_look else None)
            else:
                yield from _text(file, only_look)
    except OSError as error:
        raise TrainError(
            f"--data {error.filename or path} cannot be read: {error.strerror or error}."
        ) from None


def key_of(name: str, field: str | None) -> str:
    """Return a key for the content of one part: a hash of its files' sizes, times of change and
    sampled bytes.
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


def files_of(folder: Path) -> list[Path]:
    """Return the files that are read: a file itself; in a folder its text files or, if it has none,
    its tables and JSON lines. Raises TrainError if there are none.
    """
    if not folder.is_dir():
        return [folder]
    if (folder / "dataset_dict.json").is_file():  # several splits, written by `save_to_disk`
        folder = folder / "train"
    every = sorted(p for p in folder.rglob("*") if p.is_file())
    text = [p for p in every if p.suffix.lower() in TEXT_ENDINGS]
    found = text or [p for p in every if p.suffix.lower() in (*LINES, *TABLES)]
    if not found:
        known = sorted(TEXT_ENDINGS | {*LINES, *TABLES})
        raise TrainError(f"--data {folder}: no text file in this folder ({', '.join(known)}).")
    # If there are files of several splits, read those of the training split
    training = [] if text else [p for p in found if p.name.startswith("train")]
    return training or found


def _text(path: Path, only_look: bool) -> Iterator[Row]:
    """Yield a text file as one document: a large one in pieces of whole lines, if lines are not longer
    than 8 pieces.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        piece = file.read(_LOOK)
        if "\0" in piece or piece.count("\ufffd") > _NO_TEXT * len(piece):
            raise TrainError(
                f"--data {path} is no text in UTF-8. Convert it (iconv -t UTF-8); JSON lines belong in"
                " a file that ends in .jsonl."
            )
        if path.stat().st_size <= SMALL:
            piece += file.read()
        elif not only_look:
            piece += file.readline(8 * PIECE)
            while more := file.read(PIECE) + file.readline(8 * PIECE):
                yield "text", piece, False
                piece = more
        yield "text", piece, True


def _json_lines(path: Path, field: str | None) -> Iterator[tuple[str, Any]]:
    first = ""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            where = f"--data {path}, line {number}:"
            row = _json(where, raw)
            if not isinstance(row, dict):
                raise TrainError(f"{where} expected an object, found {type(row).__name__}.")
            key = _column(where, "key", list(row), field)
            kind = _kind(where, key, row[key])
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
        row = parse_json(raw.decode("utf-8"))
        if b"\\ud" in raw.lower():  # half of a character is no text
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        return row
    except (UnicodeError, json.JSONDecodeError) as error:
        raise TrainError(f"{where} not JSON in UTF-8 ({error}).") from None


def _table(name: str, field: str | None, *what: Any, **how: Any) -> Iterator[Row]:
    """Yield the rows of what `datasets.load_dataset(*what, **how)` opens, as documents."""
    where = f"--data {name}:"
    try:
        import datasets
    except ModuleNotFoundError:
        raise TrainError(f"{where} this needs: pip install datasets.") from None
    try:
        found = datasets.load_dataset(*what, **how)
        column = _column(where, "column", list(found.column_names or next(iter(found))), field)
        for number, row in enumerate(found.select_columns([column])):
            if (value := row[column]) is not None:
                yield _kind(f"{where} row {number}:", column, value), value, True
    except TrainError:
        raise
    except Exception as error:  # any error of a file, the network, the hub or a loading script
        raise TrainError(
            f"{where} `datasets` cannot open it ({' '.join(str(error).split())[:300]}). Expected a"
            " file, or org/name/CONFIG:SPLIT."
        ) from error


def _column(where: str, what: str, there: list[str], field: str | None) -> str:
    """Return the key or column to read. Raises TrainError if it does not exist."""
    if field is not None and field not in there:
        raise TrainError(
            f"{where} has no {what} {field!r}, which --text-field names."
            f" {did_you_mean(field, there) if there else 'It has none.'}"
        )
    found = field or next((name for name in ("messages", "text") if name in there), "")
    if not found:
        more = " Name one with --text-field." if there else ""
        raise TrainError(
            f"{where} expected a {what} `text` or `messages`, found {', '.join(there) or 'none'}.{more}"
        )
    return found


def _kind(where: str, key: str, value: Any) -> str:
    """Return the kind of a value, "text" or "messages". Raises TrainError if it is neither."""
    if isinstance(value, str) and key != "messages":
        return "text"
    chat = isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )
    if chat and value and key != "text":
        return "messages"
    kinds = {"text": "a string", "messages": 'a list of {"role": ..., "content": ...}'}
    raise TrainError(f"{where} `{key}` must be {kinds.get(key, ' or '.join(kinds.values()))}.")


def _hub(name: str) -> re.Match[str] | None:
    """Return the parts of the hub's dataset that `name` may be; None for a file, existing or
    missing.
    """
    file = Path(name.partition(":")[0])
    if file.suffix.lower() in (*TEXT_ENDINGS, *LINES, *TABLES) or os.path.exists(name):
        return None
    return _HUB.fullmatch(name)


def needs_hub(data: str) -> bool:
    """Return whether a part of `--data` is a dataset of the hub."""
    return any(_hub(part.name) is not None for part in parts_of(data))


def is_offline() -> bool:
    """Return whether the user has forbidden the hub's library to use the network."""
    said = {os.environ.get(n, "").upper() for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    return bool(said & {"1", "ON", "YES", "TRUE"})


#: Number of places in a file that are sampled for a digest.
_PROBES = 64


def probed(file: Path) -> Iterator[bytes]:
    """Yield sampled bytes of a file, from places spread over all of it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for number in range(_PROBES):
            stream.seek(number * size // _PROBES)
            yield stream.read(4096)
