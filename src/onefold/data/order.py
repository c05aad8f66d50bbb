"""The order in which steps read samples: a function of seed and step.

Think of an endless sequence of epochs, each a permutation of the training samples drawn from (seed,
epoch). The global batch of step s is positions s·B … s·B + B − 1 of that sequence. It is divided
among ranks and micro-batches:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

If the parts of the data have weights, every block of `BLOCK` positions has their shares, and each part
is read in its own order, epoch after epoch. Permutations are computed, so nothing grows with the number
of samples.

With the same B, every number of ranks reads the same samples at every step. A checkpoint stores the
step, B and the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onefold.wording import TrainError

Indices = npt.NDArray[np.int64]
#: Rounds of the Feistel network. Four make a pseudo-random permutation (Luby and Rackoff, 1988).
_ROUNDS = 6
#: Positions in which parts have their shares. 633 is prime to it and near its golden section.
BLOCK, _STEP = 1024, 633
#: The most samples that a part holds out; an evaluation reads fewer.
HELD_OUT = 1 << 18
#: The attributes of a `DataOrder` that a checkpoint stores.
_STATE = ("samples", "global_batch", "seed", "fingerprint")


@dataclass(frozen=True)
class Permutation:
    """A random permutation of 0 to count - 1: a Feistel network over the next power of 4, applied
    again to any result that is not below `count`.
    """

    count: int
    keys: npt.NDArray[np.uint64]

    @classmethod
    def drawn(cls, count: int, *seed: int) -> Permutation:
        draw = np.random.default_rng(seed)
        return cls(count, draw.integers(0, 1 << 64, _ROUNDS, np.uint64))

    def __getitem__(self, positions: Indices) -> Indices:
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
class Part:
    """Samples `first` to `first + count`. The first `held` of a permutation of them, drawn from `seed`,
    are held out of the training.
    """

    first: int
    count: int
    held: int = 0
    weight: float = 1.0
    seed: int = 0

    def size(self, held_out: bool) -> int:
        """How many samples there are to train with, or held out."""
        return self.held if held_out else self.count - self.held

    def samples(self, numbers: Indices, seed: int, held_out: bool) -> Indices:
        """Return the samples that are read first (0), second and so on, epoch after epoch."""
        size = self.size(held_out)
        epochs, own = numbers // size, numbers % size
        for epoch in () if held_out else np.unique(epochs):
            here = epochs == epoch
            own[here] = Permutation.drawn(size, seed, self.first, int(epoch))[own[here]] + self.held
        return Permutation.drawn(self.count, self.seed, self.first)[own] + self.first


def parts_of(
    counts: Sequence[int], weights: Sequence[float | None], fraction: float, seed: int
) -> tuple[Part, ...]:
    """Return the parts of samples, in order, of which a fraction is held out. Parts without weights
    are one part.
    """
    if None in weights or len(weights) == 1:
        counts, weights = [sum(counts)], [1.0]
    firsts = np.cumsum([0, *counts]).tolist()
    held = [min(max(1, round(fraction * n)), HELD_OUT) if n > 1 else 0 for n in counts]
    each = zip(firsts, counts, held, weights, strict=False)
    return tuple(Part(first, n, out, weight or 0.0, seed) for first, n, out, weight in each if n)


def part_of_slot(parts: Sequence[Part], held_out: bool = False) -> Indices:
    """Return the number of the part that each position of a block reads, shape [BLOCK]."""
    weights = [part.weight * bool(part.size(held_out)) for part in parts]
    ends = np.rint(np.cumsum(weights) / sum(weights) * BLOCK)
    # Consecutive positions lie a golden section apart, so that any run of them has nearly the shares
    return np.searchsorted(ends, np.arange(BLOCK) * _STEP % BLOCK, side="right")


@dataclass
class DataOrder:
    """The samples that each step reads.

    Attributes:
        global_batch: number of samples that an optimizer step reads, B.
        fingerprint: fingerprint of the samples; "" if it was not computed.
    """

    parts: Sequence[Part]
    global_batch: int
    seed: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise TrainError("there are no training samples: give more text or a shorter --seq.")

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return sum(part.size(held_out=False) for part in self.parts)

    def at(self, step: int) -> Indices:
        """Return the sample indices of the global batch of `step` (from 0), shape [B]."""
        first = step * self.global_batch
        return self.read(np.arange(first, first + self.global_batch, dtype=np.int64))

    def read(self, positions: Indices, held_out: bool = False) -> Indices:
        """Return the samples at some positions of the endless sequence."""
        of_slot = part_of_slot(self.parts, held_out)
        block, slot = positions // BLOCK, positions % BLOCK
        out = np.empty_like(positions)
        for number, part in enumerate(self.parts):
            own, here = of_slot == number, of_slot[slot] == number
            taken = block[here] * own.sum() + (np.cumsum(own) - 1)[slot[here]]
            if len(taken):
                out[here] = part.samples(taken, self.seed, held_out)
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
