"""The published closed forms, each with its paper and section. Plain arithmetic on numbers: no
tensors, no engine.

| module        | answers                                                                                   |
|---------------|-------------------------------------------------------------------------------------------|
| `states`      | bytes of parameters, gradients and optimizer states by stage; the largest model they allow |
| `traffic`     | bytes that one rank sends in one optimizer step, by scheme                                |
| `activations` | bytes that the forward pass keeps, with and without recompute and fused attention         |
| `compute`     | FLOPs, parameters of a transformer, training days, pipeline bubbles                       |
| `streaming`   | what ZeRO-Infinity asks of slow memory: intensity, efficiency, working memory             |
| `estimators`  | what DeepSpeed's own estimators print                                                     |

Units everywhere: bytes, elements, FLOP, seconds. Ψ is `numel`, N is `ranks`. Bytes per parameter
are an input, never a constant: 16, 18 and 20 are all in print (`states.CONVENTIONS`).
"""

from __future__ import annotations

from benchmarks.validation.formulas import (
    activations,
    compute,
    estimators,
    states,
    streaming,
    traffic,
)

__all__ = ["activations", "compute", "estimators", "states", "streaming", "traffic"]
