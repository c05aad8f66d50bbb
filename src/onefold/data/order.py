"""The order in which steps read samples.

The order is a function of seed and step alone. At step s the global batch is positions s·B …
s·B + B − 1 of an endless sequence of epochs, each a permutation of the samples drawn from (seed,
epoch). Ranks and micro-batches only cut that list:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

Where the parts of the data have weights, an epoch has as many samples as all parts together, and
each part gives its share: over and over if it is small, some of it, drawn anew, if it is large. Any
number of held-out samples, read from the first on, has the same shares.

Another number of ranks with the same B sees the same samples at every step. A checkpoint keeps the
step, B, the seed, and how many global batches a rollback has skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from onefold.wording import TrainError

Indices = npt.NDArray[np.int64]
#: Numbers from which on a permutation is computed where it is asked for, and not kept as an array.
LARGE = 1 << 20
#: Of a Feistel network. Four already make a pseudo-random permutation (Luby and Rackoff, 1988).
_ROUNDS = 6
#: Keeps the held-out draw apart from the epochs' permutations, which are drawn from (seed, epoch).
_SPLIT = 1 << 40
#: Samples that a part holds out at most; an evaluation reads fewer.
HELD_OUT = 1 << 18
#: What a checkpoint keeps of a `DataOrder`.
_STATE = ("samples", "global_batch", "seed", "fingerprint", "skipped")


@dataclass(frozen=True)
class Share:
    """A part of the training samples, and what an epoch reads of it: `taken` of the `count` from
    `first` on, or of them and their repetitions.
    """

    first: int
    count: int
    taken: int


def shares(counts: Sequence[int], weights: Sequence[float | None]) -> tuple[Share, ...]:
    """What an epoch reads of each part.

    Args:
        counts: training samples of each part, in their order.
        weights: of each part; (None, ...) reads each sample once.
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
    """(training samples, held-out samples in the order in which they are read, what an epoch reads
    of each part).

    With weights each part gives that fraction of its own samples, and the held-out ones are
    interleaved by their shares; those of a small part are read over and over.

    Args:
        counts: samples of each part, in their order. weights: as in `shares`.
    """
    # From the seed alone, and training samples stay sorted: their order is a matter of `DataOrder`
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
    """As many samples as all parts have, such that any beginning of them has the parts' shares.

    The n-th sample of a part of weight w stands at (n + 1/2) / w:

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
    """Which samples a step reads.

    Attributes:
        samples: how many there are.
        global_batch: how many an optimizer step reads, B.
        seed: with the step, all that decides.
        fingerprint: of the samples; "" if nobody took it.
        skipped: global batches that are left out: step s reads batch s + skipped.
        mix: what an epoch reads of each part; () for each sample once.
    """

    samples: int
    global_batch: int
    seed: int
    fingerprint: str = ""
    skipped: int = 0
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
        """Sample indices of the global batch of `step` (from 0), shape [B]. May cross epochs."""
        first = (step + self.skipped) * self.global_batch
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
        """The micro-batches of `rank` at `step`, each of shape [micro_batch], in order."""
        cut = self.at(step).reshape(-1, world_size, micro_batch)
        return [cut[m, rank] for m in range(cut.shape[0])]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; with the step it is the position in the data."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that kept `state`. Raises TrainError if this order is another."""
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

    def _read(self, epoch: int, positions: Indices) -> Indices:
        """The samples that stand at some positions of an epoch."""
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
    """The samples that an epoch reads of a part: all of them as often as that goes, then some."""

    def __init__(self, share: Share, draw: np.random.Generator) -> None:
        self.share = share
        self._some = permutation(share.count, draw)
        self._whole = share.taken // share.count * share.count

    def __getitem__(self, positions: Indices) -> Indices:
        own = positions % self.share.count
        some = positions >= self._whole
        own[some] = self._some[own[some]]
        return self.share.first + own


# -- permutations and selections of any number of samples, in memory that does not grow with it ------


class Numbers(Protocol):
    """What maps positions to numbers: an array, or one of the classes here."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Indices, /) -> Indices: ...


def permutation(count: int, draw: np.random.Generator) -> Numbers:
    """0 to count - 1 in an order that `draw` decides."""
    if count < LARGE:
        return draw.permutation(count).astype(np.int64)
    return Computed(count, draw.integers(0, 1 << 64, _ROUNDS, np.uint64))


@dataclass(frozen=True)
class Computed:
    """A permutation as a Feistel network over the next power of 4, walked on until it leads to a
    number below `count`.
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
    """0 to count - 1 without some, in order. `without`: sorted."""

    count: int
    without: Indices
    _before: Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # How many of those that stay stand before each that does not
        object.__setattr__(self, "_before", self.without - np.arange(len(self.without)))

    def __len__(self) -> int:
        return self.count - len(self.without)

    def __getitem__(self, positions: Indices, /) -> Indices:
        return positions + np.searchsorted(self._before, positions, side="right")

    def below(self, number: int) -> int:
        """How many of those that stay are smaller."""
        return int(number - np.searchsorted(self.without, number))
