"""Data order: a function of seed and step alone.

At step s the global batch is positions s·B … s·B + B − 1 of an endless sequence of epochs, each
epoch a permutation of the samples drawn from (seed, epoch). Ranks and micro-batches only cut that
list:

    global batch of step s (B = 8)      | i0 i1 | i2 i3 | i4 i5 | i6 i7 |
    2 ranks, micro-batch 2              |  r0   |  r1   |  r0   |  r1   |
                                        └ micro-batch 0 ┴ micro-batch 1 ┘

so another number of ranks at the same B sees the same samples at every step, and a checkpoint needs
to keep the step, B and the seed only; and how many global batches were skipped, where a run went
back to a checkpoint and around samples that it could not digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from onefold.train.data import Samples
from onefold.train.errors import TrainError

Indices = npt.NDArray[np.int64]
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
