"""Make samples of documents, and batches of samples.

    text files, `text` rows    ─► tokens of all documents in a row, separated by end tokens ─► cut every `seq` tokens
    `messages` rows            ─► chat template ─► one sample each, labels only on the assistant's words

A batch is {"input_ids", "labels"}, both int64 of shape [b, s]. A label of -100 is ignored by the
loss. Models shift labels by one themselves, so the loss counts a sample's labels from position 1
on.

order.py decides which samples a step reads. Small data is kept in memory, larger data is mapped
from disk (token_cache.py). Both give the same samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from onefold.data.order import LARGE, AllBut, DataOrder, Indices, Numbers, Share, split
from onefold.data.sources import Documents, parts_of, read_documents
from onefold.data.text import Tokenizer
from onefold.data.token_cache import Tokens, in_memory
from onefold.wording import TrainError

IGNORE = -100
#: Conversations examined at a time.
_LOOK = 1 << 18
Row = npt.NDArray[np.int32]
Batch = dict[str, torch.Tensor]
Rows = Sequence[Row] | Row


@dataclass
class Samples:
    """Samples by index, the same on every rank. Batches are padded at the right to their longest
    sample.

    Padding needs no attention mask: it comes after all tokens of a sample, and a causal model does
    not attend to later tokens.

    Attributes:
        tokens, labels: rows of int32. Packed text has one array [samples, seq] for both.
        padding: the token that pads a shorter sample.
        chosen: the rows used as samples; None for all.
        starts: returns where documents begin in a row. Given if attention must not cross documents:
            a batch then also has "position_ids", which start from 0 at each document.
    """

    tokens: Rows
    labels: Rows
    padding: int = 0
    chosen: Numbers | None = None
    starts: Callable[[int], Indices] | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.chosen is None else len(self.chosen)

    def batch(self, indices: Indices) -> Batch:
        rows = self._rows(indices)
        shape = len(rows), max(len(self.tokens[row]) for row in rows)
        ids = torch.full(shape, self.padding, dtype=torch.int64, device="cpu")
        labels = torch.full(shape, IGNORE, dtype=torch.int64, device="cpu")
        for number, row in enumerate(rows):
            length = len(self.tokens[row])
            ids[number, :length] = torch.from_numpy(self.tokens[row])
            labels[number, :length] = torch.from_numpy(self.labels[row])
        if self.starts is None:
            return {"input_ids": ids, "labels": labels}
        positions = torch.arange(shape[1], device="cpu").repeat(shape[0], 1)
        for number, row in enumerate(rows):
            begins = self.starts(row)
            labels[number, begins] = IGNORE  # no earlier token of the document predicts them
            last = np.zeros(shape[1], np.int64)
            last[begins] = begins
            positions[number] -= torch.from_numpy(np.maximum.accumulate(last))
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def counts(self, indices: Indices) -> int:
        """Return the total number of tokens in these samples that count in the loss."""
        total = 0
        for row in self._rows(indices):
            total += int((self.labels[row][1:] != IGNORE).sum())
            if self.starts is not None:
                total -= int((self.starts(row) > 0).sum())
        return total

    @property
    def count_alike(self) -> bool:
        """Whether as many tokens count in each sample: rows of text."""
        return self.labels is self.tokens and self.starts is None

    def _rows(self, indices: Indices) -> Indices:
        return indices if self.chosen is None else self.chosen[indices]


@dataclass
class Data:
    """Training and held-out samples, and notes on how they were made. `mix`: the parts' shares, if
    they have weights.
    """

    train: Samples
    held_out: Samples
    name: str
    notes: list[str] = field(default_factory=list)
    mix: tuple[Share, ...] = ()

    @property
    def epoch(self) -> int:
        """Number of samples in an epoch."""
        return sum(share.taken for share in self.mix) if self.mix else len(self.train)

    def order(self, global_batch: int, seed: int) -> DataOrder:
        """Return the order in which steps read the training samples."""
        fingerprint = fingerprint_of(self.train)
        if self.mix:
            fingerprint += f"-{zlib.crc32(repr(self.mix).encode()):08x}"
        if self.epoch >= LARGE:
            fingerprint += "-computed"  # the order differs from that of a permutation in memory
        return DataOrder(self.epoch, global_batch, seed, fingerprint, mix=self.mix)


def load_data(
    name: str,
    tokenizer: Tokenizer,
    seq: int,
    seed: int,
    eval_fraction: float,
    documents: Documents | None = None,
    tokens: Sequence[Tokens] | None = None,
    pack: str = "rows",
) -> Data:
    """Cut data into samples, and hold out some of them.

    Args:
        name: the value of `--data`.
        documents: its documents; None to read them.
        tokens: its tokens, if it has been tokenized already.
        pack: "documents" prevents attention between the documents of a row of text.

    Raises:
        TrainError: the data is missing, unreadable, or too little for one sequence.
    """
    notes: list[str] = []
    if tokens is None:
        tokens = [in_memory(name, *(documents or read_documents(name)), tokenizer)]
    samples, counts = mapped(tokens, seq, tokenizer.eos_token_id or 0, pack, notes)
    parts = parts_of(name)
    weights = [part.weight for part in parts]
    chosen, held_out, mix = split(counts, weights, eval_fraction, seed)
    if not len(held_out):
        notes.append("one sample only: nothing is held out, so no held-out loss is measured")
    elif mix:
        notes += [
            f"{part.name} has one sample only: nothing of it is held out"
            for part, count in zip(parts, counts, strict=True)
            if count == 1
        ]
    train, held = (replace(samples, chosen=some) for some in (chosen, held_out))
    return Data(train, held, name, notes, mix)


def note_conversations(notes: list[str], given: int, taken: int, whole: int, seq: int) -> None:
    """Note how many conversations were left out. Raises TrainError if all of them were."""
    if not taken:
        raise TrainError(
            f"none of the {given} conversations has a word of an assistant within --seq {seq}"
            " tokens."
        )
    if taken < given:
        notes.append(
            f"{given - taken} of {given} conversations left out: no word of an assistant within"
            f" {seq} tokens"
        )
    if whole:
        notes.append(
            f"{whole} of {given} conversations count as a whole: this tokenizer or chat"
            " template cannot tell turns"
        )


def mapped(
    parts: Sequence[Tokens], seq: int, padding: int, pack: str, notes: list[str]
) -> tuple[Samples, list[int]]:
    """Return (the samples of all parts, the number of samples of each part)."""
    if parts[0].kind == "messages":
        chats = [Conversations(part, seq) for part in parts]
        given = sum(len(part.ends) for part in parts)
        taken = sum(len(chat) for chat in chats)
        note_conversations(notes, given, taken, sum(part.whole for part in parts), seq)
        rows = Joined(chats)
        return Samples(rows, Joined([chat.labels() for chat in chats]), padding), rows.counts
    for part in parts:
        if len(part.tokens) < seq:
            raise TrainError(
                f"--data {part.name} has {len(part.tokens)} tokens, less than one sequence of --seq"
                f" {seq}: more text or a shorter --seq."
            )
    cut = [part.tokens[: len(part.tokens) // seq * seq].reshape(-1, seq) for part in parts]
    joined = Joined(cut)

    def starts(row: int) -> Indices:
        at, own = joined.place(row)
        ends, first = parts[at].ends, own * seq
        a, b = np.searchsorted(ends, [first + 1, first + seq])
        return np.concatenate([[0], ends[a:b] - first]).astype(np.int64)

    rows_of_one = cut[0] if len(cut) == 1 else joined
    apart = starts if pack == "documents" else None
    return Samples(rows_of_one, rows_of_one, padding, starts=apart), joined.counts


#: The most samples that a fingerprint reads.
_PROBES = 64


def fingerprint_of(samples: Samples) -> str:
    """Return a checksum of up to 64 samples spread over all of them, to recognize other data."""
    count = len(samples)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _PROBES)).astype(np.int64))
    crc = 0
    for index in chosen:
        batch = samples.batch(np.array([index]))
        for name in sorted(batch):
            crc = zlib.crc32(batch[name].numpy().tobytes(), crc)
    return f"{crc:08x}"


def eval_batches(
    held_out: int, limit: int, rank: int, world_size: int, micro_batch: int
) -> list[tuple[Indices, int]]:
    """Return the held-out batches of `rank`: (indices of shape [micro_batch], how many of them
    count).

    Every rank has the same number of batches, because a forward pass at stage 3 is collective.
    Batches are filled up with sample 0, which does not count.
    """
    count = min(held_out, limit)
    batches: list[tuple[Indices, int]] = []
    for first in range(rank * micro_batch, count + rank * micro_batch, micro_batch * world_size):
        mine = np.arange(first, first + micro_batch, dtype=np.int64)
        batches.append((np.where(mine < count, mine, 0), int((mine < count).sum())))
    return batches


def held_out_batch(samples: Samples, indices: Indices, real: int) -> tuple[Batch, int]:
    """Return (a batch of which only the first `real` samples count, the tokens that count in it).

    If no sample counts, one label is kept: a mean loss over no tokens would be NaN.
    """
    batch = samples.batch(indices)
    if real < len(indices):
        first = batch["labels"][:1, -1:].clone()
        batch["labels"][real:] = IGNORE
        if not real:
            batch["labels"][:1, -1:] = first.clamp(min=0)
    return batch, samples.counts(indices[:real])


class _Rows(Sequence[Row]):
    """A sequence whose rows are made on access, one by one."""

    def row(self, index: int) -> Row:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(at) for at in range(*index.indices(len(self)))]
        return self.row(int(index))


class Conversations(_Rows):
    """The first `seq` tokens of each conversation, if an assistant has a word among them."""

    def __init__(self, tokens: Tokens, seq: int) -> None:
        self.tokens, self.seq = tokens, seq
        without = [np.empty(0, np.int64)]
        for start in range(0, len(tokens.ends), _LOOK):
            first = tokens.first[start : start + _LOOK]
            without.append(start + np.flatnonzero((first < 1) | (first >= seq)))
        self._taken = AllBut(len(tokens.ends), np.concatenate(without))

    def __len__(self) -> int:
        return len(self._taken)

    def place(self, index: int) -> slice:
        """Return the positions of a row's tokens in `tokens`."""
        at = int(self._taken[np.array(index)])
        begin = int(self.tokens.ends[at - 1]) if at else 0
        return slice(begin, min(int(self.tokens.ends[at]), begin + self.seq))

    def row(self, index: int) -> Row:
        return self.tokens.tokens[self.place(index)]

    def labels(self) -> Sequence[Row]:
        """Return the same rows with `IGNORE` for tokens that do not count."""
        return _Labels(self)


class _Labels(_Rows):
    def __init__(self, of: Conversations) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def row(self, index: int) -> Row:
        place = self.of.place(index)
        tokens = self.of.tokens
        return np.where(tokens.said[place], tokens.tokens[place], np.int32(IGNORE))


class Joined(_Rows):
    """Several sequences of rows, concatenated. `counts`: the number of rows of each."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.counts = parts, [len(part) for part in parts]
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, index: int) -> tuple[int, int]:
        """Return (the part that contains a row, the row's number in that part)."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        return at, int(index - (self._ends[at - 1] if at else 0))

    def row(self, index: int) -> Row:
        at, own = self.place(index)
        found: Row = self.parts[at][own]
        return found
