"""What a calibration measures: sizes for a minute's work, for a few seconds', and never more than
the memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

KIB, MIB = 1 << 10, 1 << 20
#: Blocks and vocabulary of the model that takes the reference steps.
REFERENCE_BLOCKS, REFERENCE_VOCABULARY = 4, 2048
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure at, ascending.

    Attributes:
        dtypes: compute dtypes.
        matrices: (m, n, k) of `F.linear` of [m, k] with [n, k].
        blocks: (hidden, tokens) of a transformer block.
        copy_bytes: of a copy within memory; the largest is well beyond the caches.
        optimizer_numels: elements of a shard that AdamW steps.
        move_bytes: of the whole buffer that is gathered or reduced.
        overlap_bytes: of the gather that runs beside matrix products.
        disk_bytes: of the file that is written and read.
        budget_s: seconds a point may take beyond its least number of repeats, over all rounds.
        rounds: how often everything is measured; the median of the rounds counts.
        gated, chains: (hidden, tokens) of gated blocks and of chains of small operations; see
            `onefold.plan.benchmark_blocks`.
        steps: (hidden, tokens) of the reference steps: far apart in tokens for each weight, which
            tells passes from gradients.
    """

    dtypes: tuple[str, ...]
    matrices: tuple[tuple[int, int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    copy_bytes: tuple[int, ...]
    optimizer_numels: tuple[int, ...]
    move_bytes: tuple[int, ...]
    overlap_bytes: int
    disk_bytes: int
    budget_s: float
    rounds: int = 1
    gated: tuple[tuple[int, int], ...] = ()
    chains: tuple[tuple[int, int], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def for_device(
        cls, device: str, quick: bool = False, half: tuple[str, ...] = ("bfloat16",)
    ) -> Sizes:
        """Sizes for "cpu" or "cuda"; `half` are the 16-bit dtypes beside float32."""
        gpu = device == "cuda"
        squares = (1024, 2048, 4096, 8192) if gpu else (128, 256, 512, 1024, 2048)
        tokens, hidden = ((2048, 8192), (1024, 4096)) if gpu else ((64, 512), (256, 768))
        on_gpu = ((256, 1024), (1024, 1024), (1024, 4096), (4096, 2048), (8192, 2048))
        on_cpu = (
            (64, 64),
            (128, 128),
            (128, 512),
            (256, 64),
            (256, 256),
            (256, 1024),
            (768, 256),
            (768, 1024),
        )
        large = cls(
            dtypes=("float32", *half),
            matrices=_matrices(squares, tokens, hidden, vocab=32000),
            blocks=on_gpu if gpu else on_cpu,
            copy_bytes=(MIB, 512 * MIB if gpu else 64 * MIB),
            optimizer_numels=(MIB, 16 * MIB, 128 * MIB) if gpu else (64 * KIB, MIB, 8 * MIB),
            move_bytes=tuple(4**i * 64 * KIB for i in range(7 if gpu else 6)),
            overlap_bytes=64 * MIB if gpu else 16 * MIB,
            disk_bytes=512 * MIB if gpu else 256 * MIB,
            budget_s=0.1,
            rounds=3,
            gated=(
                ((1024, 1024), (4096, 2048))
                if gpu
                else ((64, 64), (128, 128), (256, 128), (256, 512))
            ),
            chains=(
                ((256, 1), (1024, 1024), (4096, 2048)) if gpu else ((64, 1), (128, 128), (256, 512))
            ),
            steps=((2048, 512), (1024, 4096)) if gpu else ((256, 64), (128, 256)),
        )
        return large._fewer() if quick else large

    def within(self, free_bytes: int) -> Sizes:
        """Without the sizes whose buffers would take more than half of `free_bytes`, the memory
        free for one rank.

        The smallest of each kind stays: a machine that has no room for that has none for torch
        either.
        """
        room = free_bytes // 2
        moves = _some([b for b in self.move_bytes if 4 * b <= room], self.move_bytes)
        return replace(
            self,
            matrices=_some(
                [(m, n, k) for m, n, k in self.matrices if 4 * (m * k + n * k + m * n) <= room],
                self.matrices,
            ),
            blocks=_some(
                [(h, t) for h, t in self.blocks if 4 * (24 * h * h + 32 * h * t) <= room],
                self.blocks,
            ),
            gated=_some(
                [(h, t) for h, t in self.gated if 4 * (42 * h * h + 80 * h * t) <= room], self.gated
            ),
            chains=_some([(h, t) for h, t in self.chains if 4 * 200 * h * t <= room], self.chains),
            steps=tuple((h, t) for h, t in self.steps if reference_bytes(h, t) <= room),
            copy_bytes=_some([b for b in self.copy_bytes if 2 * b <= room], self.copy_bytes),
            optimizer_numels=_some(
                [n for n in self.optimizer_numels if 16 * n <= room], self.optimizer_numels
            ),
            move_bytes=moves,
            overlap_bytes=min(self.overlap_bytes, moves[-1]),
        )

    def _fewer(self) -> Sizes:
        """A rough picture in a few seconds: the shapes in the middle, the smaller messages, a short
        budget.
        """
        middle = len(self.matrices) // 2
        return replace(
            self,
            matrices=(self.matrices[1], self.matrices[2], *self.matrices[middle : middle + 2]),
            blocks=self.blocks[:5],
            optimizer_numels=self.optimizer_numels[:2],
            move_bytes=self.move_bytes[:4],
            overlap_bytes=self.move_bytes[3],
            disk_bytes=self.disk_bytes // 8,
            budget_s=self.budget_s / 5,
            rounds=1,
        )


def _matrices(
    squares: tuple[int, ...], tokens: tuple[int, ...], hidden: tuple[int, ...], vocab: int
) -> tuple[tuple[int, int, int], ...]:
    """Squares; then, for every width and number of tokens, the products of a transformer: qkv, up,
    down; and the head.
    """
    shapes = [(s, s, s) for s in squares]
    for h in hidden:
        for t in tokens:
            shapes += [(t, 3 * h, h), (t, 4 * h, h), (t, h, 4 * h)]
    return (*shapes, (tokens[-1] // 2, vocab, hidden[-1]))


def _some(kept: list[T], of: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(kept) or of[:1]


def reference_bytes(hidden: int, tokens: int) -> int:
    """About what a reference step takes on one rank: weights, gradients, masters, moments and a
    gather, activations, logits.
    """
    numel = 11 * hidden * hidden * REFERENCE_BLOCKS + 2 * REFERENCE_VOCABULARY * hidden
    return 24 * numel + 4 * tokens * (80 * hidden * REFERENCE_BLOCKS + 3 * REFERENCE_VOCABULARY)
