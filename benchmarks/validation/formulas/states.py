"""Bytes of model states as papers print them: conventions, the largest model, checkpoints.

Source: Rajbhandari et al. 2020 (ZeRO), section 5 and Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from onefold.plan.job import Convention
from onefold.recipe import sharded_at

#: The conventions in print for Adam, by their sum and by what they are.
CONVENTIONS: Mapping[str, Convention] = {
    # 16-bit parameters and gradients; fp32 master, m, v: ZeRO section 3.1, ZeRO-Offload section 3
    "16": Convention(2, 2, 12),
    # 16-bit parameters, gradients accumulated in fp32: Megatron-LM bf16 (dist_optimizer.md),
    # BLOOM's logbook
    "18": Convention(2, 4, 12),
    # both copies of the gradients alive: ZeRO-Infinity section 3 (fp32 gradients count as optimizer
    # states), Megatron-LM fp16
    "20": Convention(2, 2, 16),
    # everything in fp32, no separate master weights: Megatron-LM fp32, FSDP2 with fp32 parameters
    "fp32": Convention(4, 4, 8),
}

#: Share of what the states allow that was really trained: ZeRO Table 2 reports 0.63 to 0.82,
#: ZeRO-Offload Fig. 7 0.81, ZeRO-Infinity Fig. 6a 0.71 to 0.90. The rest goes to activations,
#: workspace and fragmentation. 0.8 is near their median.
USABLE = 0.8


def model_states(numel: float, convention: Convention, stage: int, ranks: int) -> float:
    """Bytes on one rank: (P + G + K)Ψ, each kind divided as the stage says (ZeRO section 5).

    | stage | parameters | gradients | optimizer |
    |-------|------------|-----------|-----------|
    | 0     | 1          | 1         | 1         |
    | 1     | 1          | 1         | 1/N       |
    | 2     | 1          | 1/N       | 1/N       |
    | 3     | 1/N        | 1/N       | 1/N       |
    """
    kinds = zip(vars(convention).values(), sharded_at(stage), strict=True)
    return sum(numel * nbytes / (ranks if sharded else 1) for nbytes, sharded in kinds)


def largest_model(
    capacity: float, convention: Convention, stage: int, ranks: int, model_parallel: int = 1
) -> float:
    """Parameters whose states fill `capacity` bytes of each GPU (ZeRO Table 2), by replica."""
    return capacity * model_parallel / model_states(1.0, convention, stage, ranks)


def largest_trainable(capacity: float, bytes_per_parameter: float, usable: float = USABLE) -> float:
    """Parameters that one can expect to train in `capacity` bytes: see `USABLE`."""
    return usable * capacity / bytes_per_parameter


def freed_by_more_ranks(
    numel: float, convention: Convention, stage: int, ranks: int, more: int
) -> float:
    """Bytes that each rank gains when the same model is spread over `more` ranks."""
    return model_states(numel, convention, stage, ranks) - model_states(
        numel, convention, stage, more
    )
