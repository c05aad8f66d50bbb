"""Text in, samples out: plain text is packed into sequences of equal length, conversations stay one
a sample.

    text files, `text` lines   ─► tokens of all documents in a row, an end token between ─► cut every `seq` tokens
    `messages` lines           ─► chat template ─► one sample each, labels only on what the assistant says

A batch is {"input_ids", "labels"}, both int64 of shape [b, s]; a label of -100 does not count.
Models shift labels by one themselves, so a sample's tokens that count are the labels from position
1 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from onefold.train.documents import read_documents
from onefold.train.errors import TrainError
from onefold.train.tokenizer import Tokenizer, encode_with_spans, render_chat

IGNORE = -100
#: Keeps the held-out draw apart from the epochs' permutations, which are drawn from (seed, epoch).
_SPLIT = 1 << 40
Batch = dict[str, torch.Tensor]
Indices = npt.NDArray[np.int64]


class Samples(Protocol):
    """Samples by index, the same on every rank."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Batch: ...

    def counts(self, indices: Indices) -> int:
        """Tokens that count towards the loss in these samples, in all."""
        ...


@dataclass(frozen=True)
class Packed:
    """Sequences of equal length cut from one long row of tokens, shape [samples, seq]."""

    rows: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Indices) -> Batch:
        ids = torch.from_numpy(self.rows[indices].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def counts(self, indices: Indices) -> int:
        return len(indices) * (self.rows.shape[1] - 1)

    def pick(self, indices: Indices) -> Packed:
        return Packed(self.rows[indices])


@dataclass(frozen=True)
class Conversations:
    """One conversation a sample, of its own length; a batch is padded at the right to its longest.

    Padding needs no attention mask: it stands behind everything that counts, where a causal model
    does not look.
    """

    tokens: Sequence[npt.NDArray[np.int32]]
    labels: Sequence[npt.NDArray[np.int32]]
    padding: int

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Indices) -> Batch:
        longest = max(len(self.tokens[i]) for i in indices)
        ids = torch.full((len(indices), longest), self.padding, dtype=torch.int64)
        labels = torch.full((len(indices), longest), IGNORE, dtype=torch.int64)
        for row, i in enumerate(indices):
            ids[row, : len(self.tokens[i])] = torch.from_numpy(self.tokens[i].astype(np.int64))
            labels[row, : len(self.labels[i])] = torch.from_numpy(self.labels[i].astype(np.int64))
        return {"input_ids": ids, "labels": labels}

    def counts(self, indices: Indices) -> int:
        return int(sum((self.labels[i][1:] != IGNORE).sum() for i in indices))

    def pick(self, indices: Indices) -> Conversations:
        return Conversations(
            [self.tokens[i] for i in indices], [self.labels[i] for i in indices], self.padding
        )


@dataclass
class Data:
    """Training and held-out samples, what they are called, and what a reader should know about how
    they were made.
    """

    train: Samples
    held_out: Samples
    name: str
    notes: list[str] = field(default_factory=list)


def load_data(
    name: str,
    tokenizer: Tokenizer,
    seq: int,
    seed: int,
    eval_fraction: float,
    read: tuple[str, list[Any]] | None = None,
) -> Data:
    """Read `--data`, split it, tokenize it.

    Args:
        read: what `read_documents` has given, where that was asked before.

    Raises:
        TrainError: nothing there, nothing readable in it, or too little for one sequence.
    """
    kind, documents = read or read_documents(name)
    notes: list[str] = []
    chat = kind == "messages"
    everything = (
        _conversations(documents, tokenizer, seq, notes)
        if chat
        else _pack(documents, tokenizer, seq, name)
    )
    # Drawn from the seed alone; sorted, so that the data order stays a matter of `order` only.
    shuffled = np.random.default_rng([seed, _SPLIT]).permutation(len(everything))
    held = max(1, round(eval_fraction * len(everything))) if len(everything) > 1 else 0
    train, out = (
        everything.pick(np.sort(shuffled[held:])),
        everything.pick(np.sort(shuffled[:held])),
    )
    if not held:
        notes.append("one sample only: nothing is held out, so no held-out loss is measured")
    return Data(train, out, name, notes)


def _pack(documents: Iterable[str], tokenizer: Tokenizer, seq: int, name: str) -> Packed:
    """All documents in a row with an end token after each, cut every `seq` tokens."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = [
        np.asarray(tokenizer.encode(text, add_special_tokens=False) + end, np.int32)
        for text in documents
    ]
    row = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    samples = len(row) // seq
    if not samples:
        raise TrainError(
            f"--data {name} has {len(row)} tokens, less than one sequence of --seq {seq}: more text"
            " or a shorter --seq."
        )
    return Packed(row[: samples * seq].reshape(samples, seq))


def _conversations(
    documents: list[Any], tokenizer: Tokenizer, seq: int, notes: list[str]
) -> Conversations:
    tokens, labels = [], []
    dropped = whole = 0
    for ids, mask in _encoded(documents, tokenizer):
        whole += mask is None
        row = np.asarray(ids[:seq], np.int32)
        label = (
            row.copy()
            if mask is None
            else np.where(np.asarray(mask[:seq], bool), row, IGNORE).astype(np.int32)
        )
        if len(row) < 2 or not (label[1:] != IGNORE).any():
            dropped += 1
            continue
        tokens.append(row)
        labels.append(label)
    if not tokens:
        raise TrainError(
            f"none of the {len(documents)} conversations has a word of an assistant within --seq"
            f" {seq} tokens."
        )
    if dropped:
        notes.append(
            f"{dropped} of {len(documents)} conversations left out: no word of an assistant within"
            f" {seq} tokens"
        )
    if whole:
        notes.append(
            f"{whole} of {len(documents)} conversations count as a whole: this tokenizer or chat"
            " template cannot tell turns"
        )
    padding = tokenizer.eos_token_id or 0
    return Conversations(tokens, labels, padding)


def _encoded(
    documents: Iterable[Any], tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[bool] | None]]:
    for messages in documents:
        text, spans = render_chat(tokenizer, messages)
        encoded = encode_with_spans(tokenizer, text, spans) if spans is not None else None
        yield (
            encoded
            if encoded is not None
            else (tokenizer.encode(text, add_special_tokens=False), None)
        )
