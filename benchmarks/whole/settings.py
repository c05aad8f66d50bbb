"""What is measured: the sides, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import settings as peers

SIDES: tuple[str, ...] = (
    "onefold-1-adamw",
    "onefold-2-adamw",
    "onefold-3-adamw",
    "onefold-1-muon",
    "onefold-2-muon",
    "onefold-3-muon",
    "fsdp2-adamw",
    "fsdp2-muon",
    "deepspeed-1-muon",
    "deepspeed-2-muon",
    "deepspeed-3-muon",
)
"""In the order of a round. A number is the ZeRO stage."""

REFERENCE = "onefold-1-muon"
"""The side that loss differences refer to."""

GOAL = 1.15
"""What a step without its share of Newton-Schulz should take at most, × AdamW's at that stage."""

NOTES: dict[str, str] = {
    "-muon": (
        "Muon for the matrices of the blocks, torch.optim.AdamW(fused=True) for embeddings, norms"
        " and biases"
    ),
    "-adamw": "AdamW for all: what Muon's step is compared with",
    "onefold-N": (
        "onefold.shard with Recipe.zero(N), for Muon with borders=True as in `onefold train`;"
        " onefold.optim.muon.MuonWithAdamW"
    ),
    "fsdp2-muon": (
        "gathering everywhere: fully_shard of each block and the root; each rank gathers every"
        " whole gradient, orthogonalizes it, and keeps its part of the update"
    ),
    "deepspeed-N": (
        "DeepSpeed's own MuonWithAuxAdam at its stage N with default buckets (stage 3 with"
        " reduce_scatter false, which it asks for) and its default method, gram"
    ),
    "Newton-Schulz": (
        "in fp32 on all sides, since processors without bf16 units take some fifty times as long"
        " in bf16"
    ),
}
"""How each side is set up, printed under the tables."""


def base_of(side: str) -> str | None:
    """The side that does the same with AdamW alone; None where none is measured."""
    base = f"{side.rpartition('-')[0]}-adamw"
    return base if base in SIDES else None


@dataclass(frozen=True)
class Setting(peers.Setting):
    """`iterations`: of Newton-Schulz in a step; Muon's are 5."""

    iterations: int = 5

    @property
    def title(self) -> str:
        micro = "micro-batch" if self.accumulation == 1 else "micro-batches"
        return (
            f"{self.model}, {self.ranks} ranks, {self.accumulation} {micro} of {self.tokens:,} tokens"
            f" a rank, {self.precision}, {self.iterations} of Newton-Schulz's 5 iterations"
        )
