"""What is measured: the settings that all peers share, the peers' names, and the matrix of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PEERS: tuple[str, ...] = (
    "ddp",
    "ddp-bf16-wire",
    "zero-optimizer",
    "fsdp2",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
    "onefold-0",
    "onefold-1",
    "onefold-2",
    "onefold-3",
)
"""Every peer, in the order of a round. A number is the ZeRO stage."""

NOTES: dict[str, str] = {
    "ddp": (
        "DistributedDataParallel, gradients as bucket views, no_sync between boundaries; "
        "bf16: fp32 weights under autocast, fp32 on the wire"
    ),
    "ddp-bf16-wire": (
        "the same with a hook that all-reduces in bf16: bf16 on the wire and in the sum (bf16 only)"
    ),
    "zero-optimizer": "DDP as above with ZeroRedundancyOptimizer(parameters_as_bucket_view=True)",
    "fsdp2": (
        "fully_shard of each block, then of the root; bf16: MixedPrecisionPolicy(param bf16, reduce"
        " fp32)"
    ),
    "deepspeed-N": (
        "DeepSpeed ZeRO stage N with its default buckets; "
        "bf16: bf16.enabled, gradients accumulated in fp32 (data_types), bf16 on the wire"
    ),
    "onefold-N": (
        "onefold.shard with Recipe.zero(N, precision), onefold.no_sync between boundaries; "
        "bf16: bf16 on the wire, summed in fp32"
    ),
}
"""How each peer is set up: the fair equivalents, printed under every table."""

REFERENCE = "ddp"
"""The peer that ratios and loss differences refer to."""

LOSSES_COMPARED = 6
"""Steps whose losses are compared: later ones differ by what rounding has grown to, in equal libraries too."""

SIZES: dict[str, int] = {"communication": 256, "compute": 2048}
"""Tokens a rank and micro-batch: 256 leave the wire the bottleneck of a 110M-parameter model, 2,048 the arithmetic."""

PRECISIONS: tuple[str, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Setting:
    """What all peers of a comparison share.

    `tokens` are per rank and micro-batch; `accumulation` is the number of micro-batches of an
    optimizer step; `warmup` and `steps` count optimizer steps (the first are not timed); `clip` is
    the gradient norm, 0 for none.
    """

    model: str = "gpt-110m"
    size: str = "communication"
    tokens: int = 256
    precision: str = "fp32"
    ranks: int = 2
    accumulation: int = 1
    warmup: int = 2
    steps: int = 4
    clip: float = 0.0
    threads: int = 1
    device: str = "cpu"

    def those(self, peers: Sequence[str]) -> list[str]:
        """The peers that mean anything here: one that compresses to bf16 is left out of fp32."""
        return [p for p in peers if self.precision == "bf16" or p != "ddp-bf16-wire"]

    @property
    def title(self) -> str:
        """The setting in words, for a table's or a plot's heading."""
        micro = "micro-batch" if self.accumulation == 1 else "micro-batches"
        clip = f", clip {self.clip:g}" if self.clip else ""
        return (
            f"{self.model}, {self.tokens:,} tokens a rank ({self.size}-bound), {self.precision}, "
            f"{self.ranks} ranks, {self.accumulation} {micro} a step{clip}"
        )

    @property
    def tokens_a_step(self) -> int:
        """Tokens that all ranks together consume in one optimizer step."""
        return self.tokens * self.accumulation * self.ranks


def matrix(
    sizes: Sequence[str],
    precisions: Sequence[str],
    ranks: Sequence[int],
    accumulations: Sequence[int],
    *,
    tokens: int | None = None,
    warmup: int = 2,
    steps: int = 4,
    full: bool = True,
    **shared: Any,
) -> list[Setting]:
    """Every combination or, unless `full`, those that differ from the first of each in at most one
    respect. `shared` are the same for all.

    Cheap settings come first. `tokens` replaces the tokens that a size stands for. A step that is
    compute-bound or of several micro-batches is long and steady, so half of `warmup` and `steps` do
    for it.
    """
    found = []
    first = (sizes[0], ranks[0], precisions[0], accumulations[0])
    for combination in itertools.product(sizes, ranks, precisions, accumulations):
        if not full and sum(a != b for a, b in zip(combination, first, strict=True)) > 1:
            continue
        size, count, precision, micro = combination
        long = size == "compute" or micro > 1
        setting = Setting(
            size=size,
            tokens=tokens or SIZES[size],
            precision=precision,
            ranks=count,
            accumulation=micro,
            warmup=max(1, warmup // 2) if long and warmup else warmup,
            steps=max(2, steps // 2) if long else steps,
            **shared,
        )
        found.append(setting)
    return found
