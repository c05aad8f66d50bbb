"""Data order: a function of seed and step alone.

At step s the global batch is positions s·B … s·B + B − 1 of an endless sequence of epochs, each epoch a permutation of
the samples drawn from (seed, epoch). Ranks and micro-batches only cut that list:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

so another number of ranks at the same B sees the same samples at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onefold.train.errors import TrainError

Indices = npt.NDArray[np.int64]


@dataclass
class DataOrder:
    """Which samples a step reads.

    Attributes:
        samples: how many there are.
        global_batch: how many an optimizer step reads, B.
        seed: with the step, all that decides.
    """

    samples: int
    global_batch: int
    seed: int
    _epoch: int = field(default=-1, repr=False)
    _permutation: Indices = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise TrainError("there are no training samples: give more text or a shorter --seq.")
        if self.global_batch < 1:
            raise TrainError(f"global batch {self.global_batch}: expected 1 or more.")

    def at(self, step: int) -> Indices:
        """Sample indices of the global batch of `step` (from 0), shape [B]. May cross epochs, even several."""
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch, dtype=np.int64)
        epochs, offsets = positions // self.samples, positions % self.samples
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._permuted(int(epoch))[offsets[here]]
        return out

    def micro_batches(self, step: int, rank: int, world_size: int, micro_batch: int) -> list[Indices]:
        """The micro-batches of `rank` at `step`, each of shape [micro_batch], in order."""
        cut = self.at(step).reshape(-1, world_size, micro_batch)
        return [cut[m, rank] for m in range(cut.shape[0])]

    def _permuted(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.samples).astype(np.int64)
            self._epoch = epoch
        return self._permutation


def accumulation_steps(global_batch: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches a rank computes for one optimizer step.

    Raises:
        TrainError: the global batch cannot be cut into whole micro-batches on these ranks.
    """
    at_once = micro_batch * world_size
    if global_batch % at_once:
        lower, upper = global_batch // at_once * at_once, (global_batch // at_once + 1) * at_once
        near = f"{lower} or {upper}" if lower else str(upper)
        raise TrainError(
            f"--global-batch {global_batch} cannot be cut into micro-batches of {micro_batch} on {world_size} ranks "
            f"({at_once} sequences at once); use {near}, or another --micro-batch."
        )
    return global_batch // at_once


def eval_batches(held_out: int, limit: int, rank: int, world_size: int, micro_batch: int) -> list[tuple[Indices, int]]:
    """Held-out batches of `rank`: (indices of shape [micro_batch], how many of them count).

    Every rank gets the same number of batches, because a forward pass at stage 3 is collective; what is missing is filled
    with sample 0 and does not count.
    """
    count = min(held_out, limit)
    at_once = micro_batch * world_size
    batches: list[tuple[Indices, int]] = []
    for start in range(0, count, at_once):
        mine = np.arange(start + rank * micro_batch, start + (rank + 1) * micro_batch, dtype=np.int64)
        real = int((mine < count).sum())
        batches.append((np.where(mine < count, mine, 0), real))
    return batches
