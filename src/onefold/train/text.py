"""What `--data` names, as documents, and what turns them into tokens. Needs no torch, so that what
cannot be read is told before anything is loaded.

    topics                        Python's reference text
    a folder                      its text files, a document each
    a file of JSON lines          `text` or `messages` of each line
    any other file                one document
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from onefold.train.errors import TrainError

#: ("text", [str, ...]) or ("messages", [[{"role": ..., "content": ...}, ...], ...]).
Documents = tuple[str, list[Any]]
Message = Mapping[str, str]
#: What a folder is searched for.
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv", ".log", ".text"})
#: Bytes at a file's beginning by which text is told from what is none.
_LOOK = 1 << 16
#: Share of characters there that are no UTF-8 from which on a file is none in UTF-8.
_NO_TEXT = 0.1


def read_documents(name: str) -> Documents:
    """What a `--data` value names. Raises TrainError if it is not there or cannot be read."""
    if name == "topics":
        from pydoc_data.topics import topics

        return "text", [topics[key] for key in sorted(topics)]
    rows = list(_rows(Path(name)))
    if not any(row for _, row in rows):
        raise TrainError(f"--data {name}: there is nothing in it, expected text.")
    return rows[0][0], [row for _, row in rows]


def check_documents(name: str, seq: int, seconds: float = 1.0) -> None:
    """Raise TrainError if `--data` is not there, unreadable or too little for one sequence, as far
    as so many seconds of reading tell.
    """
    if name == "topics":
        return
    end, most, text = time.monotonic() + seconds, 0, True
    for kind, row in _rows(Path(name), only_look=True):
        text = text and kind == "text"
        # No tokenizer makes more tokens than bytes, and two beside
        most += bool(row) * (len(row.encode()) + 2 if kind == "text" else 1)
        if time.monotonic() > end:
            return
    if not most:
        raise TrainError(f"--data {name}: there is nothing in it, expected text.")
    if text and most < min(seq, _LOOK):
        raise TrainError(
            f"--data {name} has at most {most} tokens, less than one sequence of --seq {seq}: more"
            " text or a shorter --seq."
        )


def _rows(path: Path, only_look: bool = False) -> Iterator[tuple[str, Any]]:
    """(kind, document) of all there is; with `only_look` the beginning of a text file."""
    try:
        if path.is_dir():
            files = sorted(
                p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in TEXT_ENDINGS
            )
            if not files:
                raise TrainError(
                    f"--data {path}: no text file in this folder"
                    f" ({', '.join(sorted(TEXT_ENDINGS))})."
                )
            for file in files:
                yield "text", _text(file, only_look)
        elif not path.is_file():
            raise TrainError(
                f"--data {path}: expected topics, a text file, a folder or a .jsonl file, and there"
                " is no such file."
            )
        elif path.suffix.lower() in (".jsonl", ".ndjson"):
            yield from _json_lines(path)
        else:
            yield "text", _text(path, only_look)
    except OSError as error:
        raise TrainError(
            f"--data {error.filename or path} cannot be read: {error.strerror}."
        ) from None


def _text(path: Path, only_look: bool) -> str:
    with path.open("rb") as file:
        head = file.read(_LOOK)
        _refuse_what_is_no_text(path, head)
        data = head if only_look else head + file.read()
    return data.decode("utf-8", errors="replace")


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


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    first = ""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            where = f"--data {path}, line {number}:"
            row = _json(where, raw)
            keys = list(row) if isinstance(row, dict) else []
            key = next((k for k in ("messages", "text") if k in keys), "")
            if not key:
                found = ", ".join(keys) if isinstance(row, dict) else type(row).__name__
                raise TrainError(
                    f"{where} expected a key `text` or `messages`, found {found or 'none'}."
                )
            if not (isinstance(row[key], str) if key == "text" else _are_messages(row[key])):
                kind = "a string" if key == "text" else 'a list of {"role": ..., "content": ...}'
                raise TrainError(f"{where} `{key}` must be {kind}.")
            first = first or key
            if key != first:
                raise TrainError(
                    f"{where} has `{key}`, the lines before the other; use one per file."
                )
            yield key, row[key]
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


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


# -- tokens ----------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """The little that training needs; every Hugging Face tokenizer has it."""

    eos_token_id: int | None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def save_pretrained(self, folder: str) -> Any: ...


class ByteTokenizer:
    """One token a byte of UTF-8 (ids 0 to 255) and one that ends a text (256)."""

    eos_token_id: int | None = 256
    pad_token_id: int = 256
    chat_template: str | None = None

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Leave a note beside the model; Hugging Face has no class for plain bytes of this kind."""
        note = {
            "kind": "bytes",
            "encoding": "utf-8",
            "eos_token_id": self.eos_token_id,
            "vocab_size": len(self),
        }
        Path(folder, "onefold_tokenizer.json").write_text(
            json.dumps(note, indent=2) + "\n", encoding="utf-8"
        )


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[bool] | None]:
    """(tokens, whether an assistant wrote each; None where that cannot be told)."""
    text, spans = render_chat(tokenizer, messages)
    encoded = encode_with_spans(tokenizer, text, spans) if spans is not None else None
    return encoded or (tokenizer.encode(text, add_special_tokens=False), None)


def render_chat(
    tokenizer: Any, messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]] | None]:
    """(the conversation as text, the spans of that text that an assistant wrote).

    Spans are character positions [start, end): content and what ends the turn, not the header. None
    if the template rewrites earlier turns, so that no span can be told; then everything counts.
    """
    spans = []
    if not getattr(tokenizer, "chat_template", None):
        text = ""
        for message in messages:
            start = len(text) + len(message["role"]) + 2
            text += f"{message['role']}: {message['content']}\n"
            if message["role"] == "assistant":
                spans.append((start, len(text)))
        return text, spans
    render = tokenizer.apply_chat_template
    full = render(messages, tokenize=False)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:i], tokenize=False, add_generation_prompt=True) if i else ""
        through = render(messages[: i + 1], tokenize=False)
        if not (through.startswith(before) and full.startswith(through)):
            return full, None
        spans.append((len(before), len(through)))
    return full, spans


def encode_with_spans(
    tokenizer: Any, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], list[bool]] | None:
    """(tokens, whether each starts inside a span); None if this tokenizer cannot say."""
    if isinstance(tokenizer, ByteTokenizer):
        tokens = tokenizer.encode(text)
        starts = [at for at, character in enumerate(text) for _ in character.encode("utf-8")]
    elif getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = list(encoded["input_ids"])
        starts = [start for start, _ in encoded["offset_mapping"]]
    else:
        return None
    return tokens, [any(a <= start < b for a, b in spans) for start in starts]
