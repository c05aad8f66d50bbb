"""Make samples of tokens, and batches of samples.

    text files, `text` rows    ─► tokens of all documents in a row, separated by end tokens ─► cut every `seq` tokens
    `messages` rows            ─► chat template ─► one sample each, labels only on the assistant's words

A batch is {"input_ids", "labels"}, both int64 of shape [b, s]. A label of -100 is ignored by the
loss. Models shift labels by one themselves, so the loss counts a sample's labels from position 1
on. order.py decides which samples a step reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from onefold.data.order import BLOCK, DataOrder, Indices, Part, part_of_slot, parts_of
from onefold.data.sources import parts_of as named_parts
from onefold.data.tokens import Tokens
from onefold.wording import TrainError

IGNORE = -100
Batch = dict[str, torch.Tensor]
Row = npt.NDArray[np.int64]
#: The most samples that a fingerprint reads.
_PROBES = 64


class Samples:
    """Samples by index, the same on every rank. Batches are padded at the right to their longest
    sample.

    Padding needs no attention mask: it comes after all tokens of a sample, and a causal model does
    not attend to later tokens.

    Args:
        padding: the token that pads a shorter sample.
        apart: attention must not cross documents: a batch then also has "position_ids", which start
            from 0 at each document.

    Attributes:
        counts: number of samples of each part.
    """

    def __init__(
        self, parts: Sequence[Tokens], seq: int, padding: int = 0, apart: bool = False
    ) -> None:
        self.parts, self.seq, self.padding, self.apart = parts, seq, padding, apart
        # The conversations with a word of an assistant within `seq` tokens
        self._taken = [np.flatnonzero((part.first > 0) & (part.first < seq)) for part in parts]
        self.counts = [
            len(part.tokens) // seq if part.kind == "text" else len(taken)
            for part, taken in zip(parts, self._taken, strict=True)
        ]
        self._ends = np.cumsum(self.counts)

    @property
    def count_alike(self) -> bool:
        """Whether as many tokens count in each sample: rows of text."""
        return self.parts[0].kind == "text" and not self.apart

    def row(self, index: int) -> tuple[Row, Row, Row]:
        """Return (tokens, labels, positions where documents begin) of a sample."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        part, own = self.parts[number], index - (self._ends[number - 1] if number else 0)
        chat, starts = part.kind == "messages", np.zeros(1, np.int64)
        if chat:
            at = self._taken[number][own]
            begin = int(part.ends[at - 1]) if at else 0
            end = min(int(part.ends[at]), begin + self.seq)
        else:
            begin, end = own * self.seq, (own + 1) * self.seq
        ids = part.tokens[begin:end].astype(np.int64)
        labels = ids.copy()
        if chat:
            labels[part.said[begin:end] == 0] = IGNORE
        elif self.apart:
            first, last = np.searchsorted(part.ends, [begin + 1, end])
            starts = np.append(starts, part.ends[first:last] - begin)
            labels[starts] = IGNORE  # no earlier token of the document predicts them
        return ids, labels, starts

    def batch(self, indices: Indices) -> Batch:
        """Return some samples as tensors."""
        rows = [self.row(index) for index in indices.tolist()]
        ids, labels = ([torch.from_numpy(row[i]) for row in rows] for i in (0, 1))
        found = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.padding),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
        }
        if self.apart:
            begun = np.zeros(found["labels"].shape, np.int64)
            for number, (_, _, starts) in enumerate(rows):
                begun[number, starts] = starts
            positions = np.arange(begun.shape[1]) - np.maximum.accumulate(begun, axis=1)
            found["position_ids"] = torch.from_numpy(positions)
        return found

    def counted(self, indices: Indices) -> int:
        """Return the total number of tokens in these samples that count in the loss."""
        if self.count_alike:
            return len(indices) * (self.seq - 1)
        return sum(int((self.row(index)[1][1:] != IGNORE).sum()) for index in indices.tolist())

    def held_out(self, indices: Indices, real: int) -> tuple[Batch, int]:
        """Return (a batch of which only the first `real` samples count, the tokens that count in it).

        If no sample counts, the labels stay: a mean loss over no tokens would be NaN.
        """
        batch = self.batch(indices)
        if real:
            batch["labels"][real:] = IGNORE
        return batch, self.counted(indices[:real])

    def fingerprint(self) -> str:
        """Return a checksum of samples spread over all of them, to recognize other data."""
        count, crc = sum(self.counts), 0
        chosen = np.unique(np.linspace(0, count - 1, min(count, _PROBES)).astype(np.int64))
        for index in chosen.tolist():
            for row in self.row(index):
                crc = zlib.crc32(row.tobytes(), crc)
        return f"{crc:08x}"


@dataclass
class Data:
    """The samples, the parts in which they are read, and notes on how they were made."""

    samples: Samples
    parts: tuple[Part, ...]
    name: str
    notes: list[str] = field(default_factory=list)

    def size(self, held_out: bool = False) -> int:
        """Number of samples to train with (an epoch), or held out."""
        return sum(part.size(held_out) for part in self.parts)

    def order(self, global_batch: int, seed: int) -> DataOrder:
        """Return the order in which steps read the training samples."""
        of = f"{self.samples.fingerprint()}-{zlib.crc32(repr(self.parts).encode()):08x}"
        return DataOrder(self.parts, global_batch, seed, of)


def load_data(
    name: str,
    tokens: Sequence[Tokens],
    padding: int,
    seq: int,
    seed: int,
    eval_fraction: float,
    pack: str = "rows",
) -> Data:
    """Cut data into samples, and hold out some of them.

    Args:
        name: the value of `--data`. tokens: of its parts.
        padding: the token that pads conversations.
        pack: "documents" prevents attention between the documents of a row of text.

    Raises:
        TrainError: the data is too little for one sequence.
    """
    notes: list[str] = []
    samples = Samples(tokens, seq, padding, pack == "documents" and tokens[0].kind == "text")
    if tokens[0].kind == "messages":
        given, taken = sum(len(part.ends) for part in tokens), sum(samples.counts)
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
        if whole := sum(part.whole for part in tokens):
            notes.append(
                f"{whole} of {given} conversations count as a whole: this tokenizer or chat"
                " template cannot tell turns"
            )
    for part, count in zip(tokens, samples.counts, strict=True):
        if not count and part.kind == "text":
            raise TrainError(
                f"--data {part.name} has {len(part.tokens)} tokens, less than one sequence of --seq"
                f" {seq}: more text or a shorter --seq."
            )
    weights = [part.weight for part in named_parts(name)]
    parts = parts_of(samples.counts, weights, eval_fraction, seed)
    trained = sum(bool(part.size(held_out=False)) for part in parts)
    if trained > 1 and len(np.unique(part_of_slot(parts))) < trained:
        raise TrainError(
            f"--data {name}: a part is never read, for its share is under 1/{BLOCK}; give it a"
            f" share of 1/{BLOCK} or more, or leave it out."
        )
    data = Data(samples, parts, name, notes)
    if not data.size(held_out=True):
        notes.append("one sample only: nothing is held out, so no held-out loss is measured")
    return data


def eval_batches(
    held_out: int, limit: int, rank: int, world_size: int, micro_batch: int
) -> list[tuple[Indices, int]]:
    """Return the held-out batches of `rank`: (positions of shape [micro_batch], how many of them
    count).

    Every rank has the same number of batches, because a forward pass at stage 3 is collective.
    Batches are filled up with position 0, which does not count.
    """
    count = min(held_out, limit)
    batches: list[tuple[Indices, int]] = []
    for first in range(rank * micro_batch, count + rank * micro_batch, micro_batch * world_size):
        mine = np.arange(first, first + micro_batch, dtype=np.int64)
        batches.append((np.where(mine < count, mine, 0), int((mine < count).sum())))
    return batches
