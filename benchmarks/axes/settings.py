"""What is measured: compositions of axes, which all sides share, and the sides."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import settings as peers

RANKS = 4

AXES: dict[str, str] = {
    "tp": "TP 2 × DP 2",
    "ep": "EP 2 × DP 2",
    "pp": "PP 2 × DP 2",
}
"""Compositions on four ranks."""

SIDES: tuple[str, ...] = ("fsdp2", "onefold-3", "fsdp2-kept", "onefold-1", "onefold-2")
"""In the order of a round. A number is the ZeRO stage."""

REFERENCE = "fsdp2"
"""The side that ratios and loss differences refer to."""

GOALS = {"ratio": 0.8, "peak_ratio": 0.7}
"""What stage 3 should reach beside FSDP2: of its step time, and of its peak memory."""

NOTES: dict[str, str] = {
    "all": (
        "the same modules, cut by the same code: TP by parallelize_module (embedding, attention,"
        " feed-forward layers and head divided, activations whole between layers); EP by"
        " distribute_tensor(Shard(0)) of the experts over ep and an all-to-all; PP by torch's"
        " Schedule1F1B with two stages"
    ),
    "fsdp2": (
        "fully_shard of each block, then of the root, with reshard_after_forward=True for blocks;"
        " of experts first, over the ranks that hold the same ones, with a gradient divided by all"
        " data ranks, as torchtitan does"
    ),
    "fsdp2-kept": "the same with reshard_after_forward=False, torchtitan's choice for pipelines",
    "onefold-N": (
        "onefold.shard with Recipe.zero(N), mesh= and data=; of each stage's module for PP, in"
        " onefold.parallel.PipelineStage"
    ),
}
"""How each side is set up, printed under the tables."""


@dataclass(frozen=True)
class Setting(peers.Setting):
    """`axes`: a name of `AXES`. `tokens` are per data rank and micro-batch."""

    axes: str = "tp"
    ranks: int = RANKS

    @property
    def data_ranks(self) -> int:
        """Ranks that compute with different tokens."""
        return self.ranks if self.axes == "ep" else self.ranks // 2

    def data_rank(self, rank: int) -> int:
        """Which of them a rank is, or computes with."""
        # (dp, tp), (dp, ep), (pp, dp)
        return {"tp": rank // 2, "ep": rank, "pp": rank % (self.ranks // 2)}[self.axes]

    @property
    def title(self) -> str:
        micro = "micro-batch" if self.accumulation == 1 else "micro-batches"
        return (
            f"{AXES[self.axes]}, {self.model}, {self.accumulation} {micro} of {self.tokens} tokens a"
            f" data rank, {self.precision}, {self.ranks} ranks"
        )

    @property
    def tokens_a_step(self) -> int:
        return self.tokens * self.accumulation * self.data_ranks


SIZES: dict[str, tuple[str, int, int]] = {
    "tp": ("gpt-34m", 64, 1),
    "ep": ("moe-51m", 64, 1),
    "pp": ("gpt-34m", 16, 4),
}
"""By composition: the model, tokens of a data rank and micro-batch, micro-batches. 64 tokens a data
rank are to 34M parameters what 256 are to the 110M of benchmarks/peers: the wire is the bottleneck.
"""
