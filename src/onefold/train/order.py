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
from typing import Any

import numpy as np
import numpy.typing as npt

from onefold.train.errors import TrainError
from onefold.train.rows import Indices

#: Keeps the held-out draw apart from the epochs' permutations, which are drawn from (seed, epoch).
_SPLIT = 1 << 40
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


def shares(
    chosen: Indices, counts: Sequence[int], weights: Sequence[float | None]
) -> tuple[Share, ...]:
    """What an epoch reads of each part.

    Args:
        chosen: the training samples, sorted, of all. counts: of each part, in their order.
        weights: of each part; (None, ...) reads each sample once.
    """
    if not _weighed(weights):
        return ()
    edges = np.searchsorted(chosen, np.cumsum([0, *counts])).tolist()
    given = np.array(weights, np.float64)
    ends = np.rint(np.cumsum(given) / given.sum() * len(chosen)).astype(np.int64)
    taken = np.diff(ends, prepend=0).tolist()
    return tuple(
        Share(first, last - first, number if last > first else 0)
        for first, last, number in zip(edges, edges[1:], taken, strict=False)
    )


def split(
    counts: Sequence[int], weights: Sequence[float | None], fraction: float, seed: int
) -> tuple[Indices, Indices]:
    """(training samples, sorted; held-out samples, in the order in which they are read).

    With weights each part gives that fraction of its own samples, and the held-out ones are
    interleaved by their shares; those of a small part are read over and over.

    Args:
        counts: samples of each part, in their order. weights: as in `shares`.
    """
    shuffled = np.random.default_rng([seed, _SPLIT]).permutation(sum(counts))
    if not _weighed(weights):
        counts, weights = [sum(counts)], [1.0]
    ends = np.cumsum(counts)
    held, rest = [], []
    for first, end in zip([0, *ends], ends, strict=False):
        part = shuffled[(shuffled >= first) & (shuffled < end)]
        size = max(1, round(fraction * len(part))) if len(part) > 1 else 0
        held.append(part[:size])
        rest.append(part[size:])
    return np.sort(np.concatenate(rest)), _interleaved(held, weights)


def _interleaved(parts: Sequence[Indices], weights: Sequence[float | None]) -> Indices:
    """As many samples as all parts have, such that any beginning of them has the parts' shares.

    The n-th sample of a part of weight w stands at (n + 1/2) / w:

        weights 2 and 1     a at 0.25 0.75 1.25 1.75 ...   b at 0.5 1.5 ...   ─►  a b a a b a
    """
    total = sum(map(len, parts))
    samples: list[Indices] = [np.empty(0, np.int64)]
    places: list[npt.NDArray[np.float64]] = [np.empty(0)]
    for part, weight in zip(parts, weights, strict=True):
        if len(part) and weight:
            samples.append(np.resize(part, total))
            places.append((np.arange(total) + 0.5) / weight)
    return np.concatenate(samples)[np.argsort(np.concatenate(places), kind="stable")[:total]]


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
    _permutation: Indices = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

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

    def _permuted(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            draw = np.random.default_rng([self.seed, epoch])
            if self.mix:
                parts = [_taken(share, draw) for share in self.mix]
                self._permutation = draw.permutation(np.concatenate(parts))
            else:
                self._permutation = draw.permutation(self.samples).astype(np.int64)
            self._epoch = epoch
        return self._permutation


def _taken(share: Share, draw: np.random.Generator) -> Indices:
    """The samples that an epoch reads of a part: all of them as often as that goes, and some."""
    if not share.taken:
        return np.empty(0, np.int64)
    whole, rest = divmod(share.taken, share.count)
    some = draw.permutation(share.count)[:rest]
    return share.first + np.concatenate([np.tile(np.arange(share.count), whole), some])
