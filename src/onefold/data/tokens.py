"""Tokens on disk. One rank writes them, and all ranks map them into memory.

    TOKENS/KEY/meta.json       a description; written last, so a folder that has it is complete
               tokens.bin      int32: the tokens of all documents in a row, an end token after each text
               ends.bin        int64: where each document ends
               said.bin        uint8: whether a token counts in the loss       } only for
               first.bin       int64: the first token that counts, or -1       } conversations

KEY is a hash of the content and the tokenizer. The tokens do not depend on the sequence length.
Documents are read, tokenized and written a few at a time: 10 GB of text take as much memory as
10 MB (benchmarks/results/large_data.json).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder import Unfinished
from onefold.data.sources import Part, key_of, parts_of, refuse_two_kinds, rows_of
from onefold.data.text import Tokenizer, encode_chat
from onefold.wording import TrainError

if TYPE_CHECKING:
    from onefold.processes.ranks import Ranks

#: Version of the format.
VERSION = 1
#: Characters tokenized at a time.
BATCH = 1 << 20
#: Seconds that the first rank tokenizes before it tells the waiting ranks, which would time out.
TURN = 20.0
#: The columns: {attribute of `Tokens` and name of the file: dtype}.
COLUMNS = {"tokens": np.int32, "ends": np.int64, "said": np.uint8, "first": np.int64}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one part of the data, mapped from disk.

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
        columns: dict[str, Any] = {}
        for of, dtype in COLUMNS.items():
            file = folder / f"{of}.bin"
            columns[of] = np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)
        return cls(name, meta["kind"], whole=int(meta["whole"]), **columns)


def tokens_of(
    data: str,
    field: str | None,
    tokenizer: Tokenizer,
    root: Path,
    ranks: Ranks,
    note: Callable[[str], None],
) -> list[Tokens]:
    """Return the tokens of each part of `--data` from the folder `root`. If they are not there, the
    first rank tokenizes the data. Collective.
    Raises TrainError on every rank if the data cannot be read or the tokens cannot be written.
    """
    found = []
    for part in parts_of(data):

        def place(part: Part = part) -> tuple[Path, bool]:
            folder = root / _key(part, field, tokenizer)
            return folder, is_complete(folder)

        folder, there = ranks.on_first(place)
        if not there:
            note(f"tokenizing {part.name} into {folder}")
            turn = partial(next, _write(part.name, field, tokenizer, folder), None)
            while (count := ranks.on_first(turn)) is not None:
                note(f"tokenizing {part.name}: {count:,} tokens")
        found.append(Tokens.open(folder, part.name))
    refuse_two_kinds(data, {tokens.kind: tokens.name for tokens in found})
    return found


class _Unfinished(Unfinished):
    """A folder of tokens that is being written. Its name says what is in it, so it may replace another."""

    what, kind = "tokens cannot be written to", "folder of tokens"

    def is_own(self) -> bool:
        return True


def _write(name: str, field: str | None, tokenizer: Any, folder: Path) -> Iterator[int]:
    """Write the tokens of one part of the data. Yields the number of tokens so far, every `TURN`
    seconds. Raises TrainError, and leaves nothing then.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    kind, count, whole, turn = "", 0, 0, time.monotonic()
    try:
        with _Unfinished(folder, overwrite=True) as made, contextlib.ExitStack() as stack:
            files = {
                of: stack.enter_context((made.folder / f"{of}.bin").open("wb", buffering=BATCH))
                for of in COLUMNS
            }

            def put(**columns: Any) -> None:
                for of, values in columns.items():
                    files[of].write(np.asarray(values, COLUMNS[of]).tobytes())

            for now, rows in _some(rows_of(name, field)):
                kind = kind or now
                if now != kind:
                    raise TrainError(f"--data {name}: some of it is text, some conversations.")
                if kind == "messages":
                    for messages, _ in rows:
                        chat, said = encode_chat(tokenizer, messages)
                        whole, count = whole + (said is None), count + len(chat)
                        counts = np.ones(len(chat)) if said is None else np.asarray(said)
                        later = np.flatnonzero(counts[1:])
                        first = [later[0] + 1 if len(later) else -1]
                        put(tokens=chat, said=counts, first=first, ends=[count])
                else:
                    texts = [text for text, _ in rows]  # in one call
                    found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
                    for ids, (_, last) in zip(found["input_ids"], rows, strict=True):
                        put(tokens=ids)
                        count += len(ids)
                        if last:
                            count += len(end)
                            put(tokens=end, ends=[count])
                if time.monotonic() - turn > TURN:
                    yield count
                    turn = time.monotonic()
            if not count:
                raise TrainError(f"--data {name}: there is nothing in it, expected text.")
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
            meta = {"data": name, "kind": kind, "tokens": count, "whole": whole}
            text = json.dumps(meta) + "\n"
            (made.folder / "meta.json").write_text(text, encoding="utf-8")
            if is_complete(folder):  # another run has just made them, and its ranks map them by now
                made.discard()
            else:
                made.commit(overwrite=True)
    except CheckpointError as error:
        raise TrainError(
            f"{error} Free space there, or name another folder with --data-cache."
        ) from error


def _some(rows: Iterable[tuple[str, Any, bool]]) -> Iterator[tuple[str, list[tuple[Any, bool]]]]:
    """Yield (kind, [(document or a piece of it, whether the document ends with it)]) of some rows:
    one conversation, or texts of about `BATCH` characters.
    """
    some: list[tuple[Any, bool]] = []
    held, of = 0, ""
    for kind, document, last in rows:
        if some and (kind != of or held >= BATCH):
            yield of, some
            some, held = [], 0
        some.append((document, last))
        held, of = held + (len(document) if kind == "text" else BATCH), kind
    if some:
        yield of, some


def is_complete(folder: Path) -> bool:
    """Return whether a folder of tokens is there and complete: its description is written last."""
    return (folder / "meta.json").is_file()


def _key(part: Part, field: str | None, tokenizer: Any) -> str:
    """Return the name of the folder for one part of the data and one tokenizer."""
    said = hashlib.sha256(f"{VERSION} {key_of(part.name, field)} {tokenizer.eos_token_id}".encode())
    said.update(type(tokenizer).__name__.encode())
    said.update(str(getattr(tokenizer, "chat_template", None)).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        said.update(backend.to_str().encode())
    elif callable(getattr(tokenizer, "get_vocab", None)):
        said.update(repr(sorted(tokenizer.get_vocab().items())).encode())
    return said.hexdigest()[:24]
