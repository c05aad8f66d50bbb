"""Text in, samples out, and the order in which steps read them.

    text files, `text` lines   ─► tokens of all documents in a row, an end token between ─► cut every `seq` tokens
    `messages` lines           ─► chat template ─► one sample each, labels only on what the assistant says

A batch is {"input_ids", "labels"}, both int64 of shape [b, s]; a label of -100 does not count.
Models shift labels by one themselves, so a sample's tokens that count are the labels from position
1 on.

The order is a function of seed and step alone. At step s the global batch is positions s·B …
s·B + B − 1 of an endless sequence of epochs, each a permutation of the samples drawn from (seed,
epoch). Ranks and micro-batches only cut that list:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

Another number of ranks with the same B sees the same samples at every step. A checkpoint keeps the
step, B, the seed, and how many global batches a rollback has skipped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from onefold.device import CopyStream, HostBuffers
from onefold.train.errors import TrainError
from onefold.train.text import Tokenizer, encode_with_spans, read_documents, render_chat

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


#: Samples that a fingerprint reads.
_PROBES = 64


@dataclass
class DataOrder:
    """Which samples a step reads.

    Attributes:
        samples: how many there are.
        global_batch: how many an optimizer step reads, B.
        seed: with the step, all that decides.
        fingerprint: of the samples; "" if nobody took it.
        skipped: global batches that are left out: step s reads batch s + skipped.
    """

    samples: int
    global_batch: int
    seed: int
    fingerprint: str = ""
    skipped: int = 0
    _epoch: int = field(default=-1, repr=False)
    _permutation: Indices = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise TrainError("there are no training samples: give more text or a shorter --seq.")
        if self.global_batch < 1:
            raise TrainError(f"global batch {self.global_batch}: expected 1 or more.")

    def at(self, step: int) -> Indices:
        """Sample indices of the global batch of `step` (from 0), shape [B]. May cross epochs, even
        several.
        """
        first = (step + self.skipped) * self.global_batch
        positions = np.arange(first, first + self.global_batch, dtype=np.int64)
        epochs, offsets = positions // self.samples, positions % self.samples
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._permuted(int(epoch))[offsets[here]]
        return out

    def micro_batches(
        self, step: int, rank: int, world_size: int, micro_batch: int
    ) -> list[Indices]:
        """The micro-batches of `rank` at `step`, each of shape [micro_batch], in order."""
        cut = self.at(step).reshape(-1, world_size, micro_batch)
        return [cut[m, rank] for m in range(cut.shape[0])]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; with the step it is the position in the data."""
        return {
            "samples": self.samples,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that kept `state`.

        Raises:
            TrainError: this order reads other samples, or in another order.
        """
        mine = self.state_dict()
        for name, option in (("seed", "--seed"), ("global_batch", "--global-batch")):
            if state[name] != mine[name]:
                raise TrainError(
                    f"the checkpoint was made with {option} {state[name]}, this run has {option}"
                    f" {mine[name]}: it would not go on with the samples where the other stopped."
                    f" Use {option} {state[name]}, or start another run from the exported model"
                    " (--model)."
                )
        if (state["samples"], state["fingerprint"]) != (mine["samples"], mine["fingerprint"]):
            raise TrainError(
                f"the checkpoint was made on other data: {state['samples']} samples then,"
                f" {mine['samples']} now, or others. Use the same --data, --seq, --tokenizer and"
                " --eval-fraction, or start another run from the exported model (--model)."
            )
        self.skipped = int(state["skipped"])

    def _permuted(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._permutation = (
                np.random.default_rng([self.seed, epoch]).permutation(self.samples).astype(np.int64)
            )
            self._epoch = epoch
        return self._permutation


def fingerprint_of(samples: Samples) -> str:
    """A checksum of up to 64 samples spread over all of them: tells other data from the same."""
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
    """Held-out batches of `rank`: (indices of shape [micro_batch], how many of them count).

    Every rank gets the same number of batches, because a forward pass at stage 3 is collective;
    what is missing is filled with sample 0 and does not count.
    """
    count = min(held_out, limit)
    at_once = micro_batch * world_size
    batches: list[tuple[Indices, int]] = []
    for start in range(0, count, at_once):
        mine = np.arange(
            start + rank * micro_batch, start + (rank + 1) * micro_batch, dtype=np.int64
        )
        real = int((mine < count).sum())
        batches.append((np.where(mine < count, mine, 0), real))
    return batches


def held_out_batch(samples: Samples, indices: Indices, real: int) -> tuple[Batch, int]:
    """(the batch with only its first `real` samples counting, tokens that count).

    A batch that does not count at all keeps one label, since a mean over nothing is not a number.
    """
    batch = samples.batch(indices)
    if real < len(indices):
        first = batch["labels"][:1, -1:].clone()
        batch["labels"][real:] = IGNORE
        if not real:
            batch["labels"][:1, -1:] = first.clamp(min=0)
    return batch, samples.counts(indices[:real])


class Feed:
    """Batches of `samples` for one device, one ahead of the one that is computed.

        computing      micro-batch 0          micro-batch 1          micro-batch 2
        copies         [1]                    [2]                    [first of the next step]

    On a stream of its own: the engine's copies up are waited for by the host before each step of an
    optimizer. A device without streams is sent nothing ahead.
    """

    def __init__(self, samples: Samples, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self._copies = CopyStream(device, name="batches")
        self._pinned = HostBuffers(device)
        self._ahead: tuple[Indices, Batch, list[Any]] | None = None  # and tickets of its copies

    @property
    def is_ahead(self) -> bool:
        """Whether `send_ahead` sends anything."""
        return self._copies.asynchronous

    def take(self, indices: Indices) -> Batch:
        """The batch of these samples: on the device, behind its copy, where that has streams; else
        on the host.
        """
        if not self._copies.asynchronous:
            return self.samples.batch(indices)
        indices_ahead, batch = self._landed()
        # The run has gone back, or looks at a step again
        if not np.array_equal(indices_ahead, indices):
            self._send(indices)
            _, batch = self._landed()
        return batch

    def send_ahead(self, indices: Indices) -> None:
        """Begin to copy what `take` will be asked for next."""
        if self._copies.asynchronous:
            self._landed()
            self._send(indices)

    def close(self) -> None:
        """Nothing more will be taken."""
        self._landed()

    def _landed(self) -> tuple[Indices, Batch]:
        """What was sent ahead, which the computing stream waits for: also where nobody wants it,
        for its memory may be handed on then.
        """
        indices, batch, tickets = self._ahead or (np.empty(0, np.int64), {}, [])
        self._ahead = None
        for ticket in tickets:
            self._copies.order(ticket)
        return indices, batch

    def _send(self, indices: Indices) -> None:
        there: Batch = {}
        tickets = []
        for name, tensor in self.samples.batch(indices).items():
            host = self._pinned.empty(tensor.numel(), tensor.dtype)
            host.copy_(tensor.reshape(-1))
            there[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            tickets.append(self._copies.copy(there[name].view(-1), host))
        self._ahead = indices, there, tickets
