"""Model FLOPs of a token. They count no recompute."""

from __future__ import annotations

from onefold.plan.shapes import Transformer


def model_flops_per_token(numel: float, layers: int = 0, hidden: int = 0, seq: int = 0) -> float:
    """Model FLOPs a token, forward and backward: 6N + 12·L·h·s (Chowdhery et al. 2022, PaLM,
    appendix B).

    Without dimensions it is Kaplan et al. 2020's 6N. `hidden` is heads × head_dim; attention is
    counted in full, not halved for causality.
    """
    return 6 * numel + 12 * layers * hidden * seq


def transformer_flops_per_token(
    active_numel: float, dims: Transformer | None, seq: int = 0
) -> float:
    """`model_flops_per_token` of a model with these dimensions; `active_numel` are the parameters
    that a token passes.
    """
    if dims is None:
        return model_flops_per_token(active_numel)
    width = dims.heads * (dims.head_dim or dims.hidden // dims.heads)
    return model_flops_per_token(active_numel, dims.layers, width, seq or dims.seq)
