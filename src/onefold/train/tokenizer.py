"""What turns text into tokens: the model's own tokenizer, SmolLM2's, or plain bytes where there is
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


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


Message = Mapping[str, str]


def render_chat(
    tokenizer: Any, messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]] | None]:
    """(the conversation as text, the spans of that text that an assistant wrote).

    Spans are character positions [start, end): content and what ends the turn, not the header. None
    if the template rewrites earlier turns, so that no span can be told; then everything counts.
    """
    if not getattr(tokenizer, "chat_template", None):
        return _render_plainly(messages)
    full = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = (
            tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            if i
            else ""
        )
        through = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not (through.startswith(before) and full.startswith(through)):
            return full, None
        spans.append((len(before), len(through)))
    return full, spans


def _render_plainly(messages: Iterable[Message]) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for message in messages:
        text += f"{message['role']}: "
        start = len(text)
        text += message["content"] + "\n"
        if message["role"] == "assistant":
            spans.append((start, len(text)))
    return text, spans


def encode_with_spans(
    tokenizer: Any, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], list[bool]] | None:
    """(tokens, whether each starts inside a span), or None if this tokenizer cannot say where its
    tokens start.
    """
    if isinstance(tokenizer, ByteTokenizer):
        tokens: list[int] = []
        starts: list[int] = []
        for position, character in enumerate(text):
            raw = character.encode("utf-8")
            tokens.extend(raw)
            starts.extend([position] * len(raw))
    elif getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, starts = (
            list(encoded["input_ids"]),
            [start for start, _ in encoded["offset_mapping"]],
        )
    else:
        return None
    return tokens, [any(a <= start < b for a, b in spans) for start in starts]
