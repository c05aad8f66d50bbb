"""torchtitan's debug model, smaller and as the CPU computes it, on Onefold: what a user's file of
configurations holds. `--module titan_debugmodel --config debugmodel`
"""

from __future__ import annotations

from typing import Any

from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from onefold.integrations.torchtitan import by_onefold

utils.set_pg_timeouts = lambda **_: None  # by a barrier that gloo has not


def debugmodel() -> Any:
    made = llama3_debugmodel()
    del made.model_spec.model.layers[2:]
    for layer in made.model_spec.model.layers:  # its FlexAttention has no backward pass on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.training.mixed_precision_param = "float32"
    made.validator.enable = False
    return by_onefold(made)
