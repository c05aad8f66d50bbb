"""What turns documents into tokens: Hugging Face's tokenizers, and one of bytes. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Message = Mapping[str, str]


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
