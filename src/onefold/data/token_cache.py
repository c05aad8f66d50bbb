"""A cache of tokens on disk. One rank writes it, and all ranks map it into memory.

    TOKENS/KEY/meta.json       a description; written last, so a folder that has it is complete
               tokens.bin      int32: the tokens of all documents in a row, an end token after each text
               ends.bin        int64: where each document ends
               said.bin        uint8: whether a token counts in the loss       } only for
               first.bin       int64: the first token that counts, or -1       } conversations

KEY is a hash of the content and the tokenizer. The cache does not depend on the sequence length.
Documents are read, tokenized and written a few at a time: 10 GB of text take as much memory as
10 MB (benchmarks/results/large_data.json).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from onefold.data.sources import Part, key_of, parts_of, refuse_two_kinds, rows_of
from onefold.data.tables import Row
from onefold.data.text import ByteTokenizer, Tokenizer, encode_chat
from onefold.wording import TrainError, readable

if TYPE_CHECKING:
    from onefold.processes.ranks import Ranks

#: Version of the cache's format.
VERSION = 1
#: Characters tokenized at a time.
BATCH = 1 << 20
#: Seconds that the first rank tokenizes before it sends a message to the waiting ranks.
TURN = 20.0
#: Seconds after which an unfinished cache that nobody writes to is removed.
ABANDONED = 3600.0
#: Seconds between two notes on the progress.
NOTES = 30.0


#: The columns of the cache: {attribute of `Tokens` and name of the file: dtype}.
COLUMNS = {"tokens": np.int32, "ends": np.int64, "said": np.uint8, "first": np.int64}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one part of the data, in memory or mapped from disk.

    Attributes:
        kind: "text" or "messages". tokens: int32 [tokens]. ends: int64 [documents].
        said, first: uint8 [tokens] and int64 [documents], for conversations only.
        whole: number of conversations that count as a whole, because the assistant's turns could
            not be located.
    """

    name: str
    kind: str
    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    said: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int64]
    whole: int = 0

    @classmethod
    def open(cls, folder: Path, name: str) -> Tokens:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        columns = {of: _mapped(folder / f"{of}.bin", dtype) for of, dtype in COLUMNS.items()}
        return cls(name, meta["kind"], whole=int(meta["whole"]), **columns)


def in_memory(name: str, kind: str, documents: list[Any], tokenizer: Tokenizer) -> Tokens:
    """Tokenize small data in memory."""
    made: dict[str, list[npt.NDArray[Any]]] = {}
    into = Encoder(tokenizer, lambda name, values: made.setdefault(name, []).append(values))
    if kind == "messages":
        for messages in documents:
            into.conversation(messages)
    else:
        into.texts(documents, [True] * len(documents))

    def column(of: str, dtype: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *made.get(of, ())])

    columns = {of: column(of, dtype) for of, dtype in COLUMNS.items()}
    return Tokens(name, kind, whole=into.whole, **columns)


def _mapped(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if not path.is_file() or not path.stat().st_size:
        return np.empty(0, dtype)
    # Copy-on-write pages, because torch requires writable memory
    return np.memmap(path, dtype, mode="c")


def tokens_of(
    data: str,
    field: str | None,
    tokenizer: Tokenizer,
    root: Path,
    ranks: Ranks,
    note: Callable[[str], None],
) -> list[Tokens]:
    """Return the tokens of each part of `--data` from the cache in `root`. If they are not cached,
    the first rank tokenizes the data. Collective.
    Raises TrainError on every rank if the data cannot be read or the cache cannot be written.
    """
    found = []
    for part in parts_of(data):

        def place(part: Part = part) -> tuple[Path, bool]:
            folder = root / _key(part, field, tokenizer)
            return folder, is_complete(folder)

        folder, there = ranks.on_first(place)
        if not there:
            note(f"tokenizing {part.name} into {folder}")
            _make(part, field, tokenizer, folder, ranks, note)
        found.append(Tokens.open(folder, part.name))
    refuse_two_kinds(data, {tokens.kind: tokens.name for tokens in found})
    return found


def _make(
    part: Part, field: str | None, tokenizer: Tokenizer, folder: Path, ranks: Ranks,
    note: Callable[[str], None],
) -> None:  # fmt: skip
    """Fill the folder on the first rank, in turns of `TURN` seconds. After each turn it sends a
    message to the other ranks, whose waits would otherwise time out.
    """
    maker: list[_Maker] = []

    def turn() -> tuple[bool, int]:
        try:
            if not maker:
                maker.append(_Maker(rows_of(part.name, field), tokenizer, folder, part.name))
            return maker[0].advance(TURN), maker[0].count
        except OSError as error:
            raise TrainError(
                f"tokens cannot be written to {folder.parent} ({error.strerror or error}): free"
                " space there, or name another folder with --data-cache."
            ) from error

    told = time.monotonic()
    try:
        done = False
        while not done:
            done, count = ranks.on_first(turn)
            if not done and time.monotonic() - told > NOTES:
                told = time.monotonic()
                note(f"tokenizing {part.name}: {count:,} tokens, {readable(4 * count)}")
    finally:
        if maker:
            maker[0].close()


class Encoder:
    """Tokenizes documents and passes their columns to `put`.

    Attributes:
        count: number of tokens so far. whole: see `Tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, put: Callable[[str, npt.NDArray[Any]], object]
    ) -> None:
        self.count = self.whole = 0
        self._tokenizer, self._put = tokenizer, put
        end = tokenizer.eos_token_id
        self._end = np.array([] if end is None else [end], np.int32)

    def texts(self, texts: list[str], whole: list[bool]) -> None:
        """Tokenize texts. `whole`: for each text, whether a document ends with it."""
        ends = []
        for ids, last in zip(encoded(self._tokenizer, texts), whole, strict=True):
            self._put("tokens", ids)
            self.count += len(ids)
            if last:
                self._put("tokens", self._end)
                self.count += len(self._end)
                ends.append(self.count)
        self._put("ends", np.array(ends, np.int64))

    def conversation(self, messages: Any) -> None:
        ids, said = encode_chat(self._tokenizer, messages)
        self.whole += said is None
        counts = np.ones(len(ids), np.uint8) if said is None else np.asarray(said, np.uint8)
        later = np.flatnonzero(counts[1:])
        self._put("tokens", np.asarray(ids, np.int32))
        self._put("said", counts)
        self._put("first", np.array([later[0] + 1 if len(later) else -1], np.int64))
        self.count += len(ids)
        self._put("ends", np.array([self.count], np.int64))


class _Maker:
    """Writes the cache folder of one part of the data."""

    def __init__(self, rows: Iterator[Row], tokenizer: Tokenizer, folder: Path, name: str) -> None:
        self.folder, self.name, self.kind = folder, name, ""
        self._rows, self._into = rows, Encoder(tokenizer, self._put)
        self._aside = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        remove_abandoned(folder)
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir(parents=True)
        self._files: dict[str, BinaryIO] = {}

    @property
    def count(self) -> int:
        """Number of tokens so far."""
        return self._into.count

    def advance(self, seconds: float) -> bool:
        """Work for about `seconds`. Returns whether all is done. Raises TrainError, OSError."""
        until = time.monotonic() + seconds
        texts: list[str] = []
        whole: list[bool] = []
        held = 0
        for kind, document, ends in self._rows:
            self.kind = self.kind or kind
            if kind != self.kind:
                raise TrainError(f"--data {self.name}: some of it is text, some conversations.")
            if kind == "messages":
                self._into.conversation(document)
            else:
                texts.append(document)
                whole.append(ends)
                held += len(document)
                if held >= BATCH:
                    self._into.texts(texts, whole)
                    texts, whole, held = [], [], 0
            if not held and time.monotonic() > until:
                return False
        self._into.texts(texts, whole)
        self._finish()
        return True

    def close(self) -> None:
        """Close the files and remove an unfinished folder."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = (self._aside / f"{name}.bin").open("wb", buffering=BATCH)
        self._files[name].write(values.tobytes())

    def _finish(self) -> None:
        if not self.count:
            raise TrainError(f"--data {self.name}: there is nothing in it, expected text.")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        meta = {
            "data": self.name,
            "kind": self.kind,
            "tokens": self.count,
            "whole": self._into.whole,
        }
        (self._aside / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
        with contextlib.suppress(OSError):  # a folder is there
            self._aside.rename(self.folder)
            return
        # Another run has just made it: its ranks map it by now, so it stays. `close` removes ours
        if is_complete(self.folder):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._aside.rename(self.folder)


def is_complete(folder: Path) -> bool:
    """Return whether a cache folder is there and complete: its description is written last."""
    return (folder / "meta.json").is_file()


def remove_abandoned(folder: Path) -> None:
    """Remove stale unfinished folders for the same tokens, left by killed runs. A folder is stale
    if nobody has written to it for an hour: another run may be filling a younger one.
    """
    for partial in folder.parent.glob(f"{folder.name}.*.partial"):
        with contextlib.suppress(OSError):
            last = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            if time.time() - last > ABANDONED:
                shutil.rmtree(partial, ignore_errors=True)


def encoded(tokenizer: Any, texts: list[str]) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the tokens of each text, without special tokens. Fast tokenizers get all texts in one
    call.
    """
    if isinstance(tokenizer, ByteTokenizer):
        for text in texts:
            yield np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
    elif texts and getattr(tokenizer, "is_fast", False):
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        for ids in found["input_ids"]:
            yield np.asarray(ids, np.int32)
    else:
        for text in texts:
            yield np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)


def _key(part: Part, field: str | None, tokenizer: Any) -> str:
    """Return the name of the cache folder for one part of the data and one tokenizer."""
    said = hashlib.sha256(f"{VERSION} {key_of(part.name, field)} {tokenizer.eos_token_id}".encode())
    said.update(type(tokenizer).__name__.encode())
    said.update(str(getattr(tokenizer, "chat_template", None)).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        said.update(backend.to_str().encode())
    elif callable(getattr(tokenizer, "get_vocab", None)):
        said.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return said.hexdigest()[:24]
