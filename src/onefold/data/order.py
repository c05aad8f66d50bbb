"""The order in which steps read samples.

The order depends on seed and step only. Think of an endless sequence of epochs, each a permutation
of the samples drawn from (seed, epoch). The global batch of step s is positions s·B … s·B + B − 1
of that sequence. It is divided among ranks and micro-batches:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

If the parts of the data have weights, an epoch still has as many samples as all parts together, and
each part contributes its share. A small part is repeated. Of a large part, each epoch draws a
selection anew. The held-out samples are ordered so that the first n have these shares, for any n.

With the same B, every number of ranks reads the same samples at every step. A checkpoint stores the
step, B and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from onefold.wording import TrainError

Indices = npt.NDArray[np.int64]
#: A permutation of this many numbers or more is computed on demand, not stored as an array.
LARGE = 1 << 20
#: Rounds of the Feistel network. Four make a pseudo-random permutation (Luby and Rackoff, 1988).
_ROUNDS = 6
#: Seeds the held-out draw differently from the epochs' permutations, which use (seed, epoch).
_SPLIT = 1 << 40
#: The most samples that a part holds out; an evaluation reads fewer.
HELD_OUT = 1 << 18
#: The attributes of a `DataOrder` that a checkpoint stores.
_STATE = ("samples", "global_batch", "seed", "fingerprint")


@dataclass(frozen=True)
class Share:
    """A part of the training samples: `count` samples from `first` on. An epoch reads `taken` of
    them, with repetitions if `taken` is greater than `count`.
    """

    first: int
    count: int
    taken: int


def shares(counts: Sequence[int], weights: Sequence[float | None]) -> tuple[Share, ...]:
    """Return how many samples an epoch reads of each part.

    Args:
        counts: number of training samples of each part, in order.
        weights: the weight of each part. (None, ...) reads each sample once.
    """
    if not _weighed(weights):
        return ()
    firsts = np.cumsum([0, *counts]).tolist()
    given = np.array(weights, np.float64)
    ends = np.rint(np.cumsum(given) / given.sum() * firsts[-1]).astype(np.int64)
    taken = np.diff(ends, prepend=0).tolist()
    return tuple(
        Share(first, count, number if count else 0)
        for first, count, number in zip(firsts, counts, taken, strict=False)
    )


def split(
    counts: Sequence[int], weights: Sequence[float | None], fraction: float, seed: int
) -> tuple[AllBut, Indices, tuple[Share, ...]]:
    """Hold out a fraction of the samples. Returns (training samples, held-out samples in the order
    in which they are read, the shares of an epoch).

    With weights, each part holds out that fraction of its own samples. The held-out samples are
    then interleaved by the parts' weights, and those of a small part are repeated.

    Args:
        counts: number of samples of each part, in order. weights: as in `shares`.
    """
    # Drawn from the seed only. Training samples stay sorted; `DataOrder` permutes them.
    draw = np.random.default_rng([seed, _SPLIT])
    drawn = counts if _weighed(weights) else [sum(counts)]
    held = []
    for first, count in zip(np.cumsum([0, *drawn]).tolist(), drawn, strict=False):
        size = min(max(1, round(fraction * count)), HELD_OUT) if count > 1 else 0
        held.append(first + permutation(count, draw)[np.arange(size)])
    training = AllBut(sum(counts), np.sort(np.concatenate(held)))
    edges = [training.below(edge) for edge in np.cumsum([0, *counts]).tolist()]
    mix = shares(np.diff(edges).tolist(), weights)
    return training, _interleaved(held, weights) if mix else np.concatenate(held), mix


def _interleaved(parts: Sequence[Indices], weights: Sequence[float | None]) -> Indices:
    """Interleave the parts so that the first n samples have the parts' shares, for any n. The
    result has as many samples as all parts together.

    Samples are sorted by position: (n + 1/2) / w for the n-th sample of a part of weight w.

        weights 2 and 1     a at 0.25 0.75 1.25 1.75 ...   b at 0.5 1.5 ...   ─►  a b a a b a
    """
    total = sum(map(len, parts))
    found = [
        (np.resize(part, total), (np.arange(total) + 0.5) / weight)
        for part, weight in zip(parts, weights, strict=True)
        if len(part) and weight
    ]
    if not found:
        return np.empty(0, np.int64)
    samples, places = map(np.concatenate, zip(*found, strict=True))
    return samples[np.argsort(places, kind="stable")[:total]]


def _weighed(weights: Sequence[float | None]) -> bool:
    return len(weights) > 1 and None not in weights


@dataclass
class DataOrder:
    """The samples that each step reads.

    Attributes:
        samples: number of samples in an epoch.
        global_batch: number of samples that an optimizer step reads, B.
        seed: the seed; the order depends on seed and step only.
        fingerprint: fingerprint of the samples; "" if it was not computed.
        mix: the share of each part in an epoch; () to read each sample once.
    """

    samples: int
    global_batch: int
    seed: int
    fingerprint: str = ""
    mix: tuple[Share, ...] = ()
    _epoch: int = field(default=-1, repr=False)
    _order: Numbers = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    _parts: list[_Taken] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise TrainError("there are no training samples: give more text or a shorter --seq.")
        if self.global_batch < 1:
            raise TrainError(f"global batch {self.global_batch}: expected 1 or more.")

    def at(self, step: int) -> Indices:
        """Return the sample indices of the global batch of `step` (from 0), shape [B]. A batch may
        contain samples of two or more epochs.
        """
        first = step * self.global_batch
        positions = np.arange(first, first + self.global_batch, dtype=np.int64)
        epochs, offsets = positions // self.samples, positions % self.samples
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._read(int(epoch), offsets[here])
        return out

    def micro_batches(
        self, step: int, rank: int, world_size: int, micro_batch: int
    ) -> list[Indices]:
        """Return the micro-batches of `rank` at `step` in order, each of shape [micro_batch]."""
        cut = self.at(step).reshape(-1, world_size, micro_batch)
        return [cut[m, rank] for m in range(cut.shape[0])]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores. With the step, it gives the position in the data."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that saved `state`. Raises TrainError if its order differs from this."""
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

    def _read(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at some positions of an epoch."""
        if epoch != self._epoch:
            draw = np.random.default_rng([self.seed, epoch])
            self._parts = [_Taken(share, draw) for share in self.mix if share.taken]
            self._order = permutation(self.samples, draw)
            self._epoch = epoch
        found = self._order[positions]
        if not self.mix:
            return found
        ends = np.cumsum([part.share.taken for part in self._parts])
        of = np.searchsorted(ends, found, side="right")
        out = np.empty_like(found)
        for at, part in enumerate(self._parts):
            here = of == at
            out[here] = part[found[here] - (ends[at] - part.share.taken)]
        return out


class _Taken:
    """The samples that an epoch reads of a part: all of them, as often as they fit into its share,
    then a random selection for the rest.
    """

    def __init__(self, share: Share, draw: np.random.Generator) -> None:
        self.share = share
        self._some = permutation(share.count, draw)
        self._whole = share.taken // share.count * share.count

    def __getitem__(self, positions: Indices) -> Indices:
        own = positions % self.share.count
        some = positions >= self._whole
        own[some] = self._some[own[some]]
        return self.share.first + own


# -- permutations and selections whose memory does not grow with the number of samples ------------


class Numbers(Protocol):
    """A map from positions to numbers: an array, or one of the classes below."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Indices, /) -> Indices: ...


def permutation(count: int, draw: np.random.Generator) -> Numbers:
    """Return a random permutation of 0 to count - 1, drawn from `draw`."""
    if count < LARGE:
        return draw.permutation(count).astype(np.int64)
    return Computed(count, draw.integers(0, 1 << 64, _ROUNDS, np.uint64))


@dataclass(frozen=True)
class Computed:
    """A permutation computed by a Feistel network over the next power of 4. The network is applied
    again to any result that is not below `count`.
    """

    count: int
    keys: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, positions: Indices, /) -> Indices:
        found = self._mixed(positions.astype(np.uint64))
        while (beyond := found >= self.count).any():
            found[beyond] = self._mixed(found[beyond])
        return found.astype(np.int64)

    def _mixed(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = np.uint64(max(1, ((self.count - 1).bit_length() + 1) // 2))
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = numbers >> half, numbers & mask
        for key in self.keys:
            # The finalizer of splitmix64; products overflow on purpose
            said = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            said = (said ^ (said >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((said ^ (said >> np.uint64(31))) & mask)
        return (left << half) | right


@dataclass(frozen=True)
class AllBut:
    """The numbers 0 to count - 1, in order, except those in `without` (sorted)."""

    count: int
    without: Indices
    _before: Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # For each left-out number, how many of the others are smaller
        object.__setattr__(self, "_before", self.without - np.arange(len(self.without)))

    def __len__(self) -> int:
        return self.count - len(self.without)

    def __getitem__(self, positions: Indices, /) -> Indices:
        return positions + np.searchsorted(self._before, positions, side="right")

    def below(self, number: int) -> int:
        """Return how many numbers of this sequence are smaller than `number`."""
        return int(number - np.searchsorted(self.without, number))
