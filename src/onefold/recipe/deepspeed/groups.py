"""What a DeepSpeed configuration asks of ZeRO++, as arguments of `Recipe.zero`.

| the file says                              | becomes                                                                     |
|--------------------------------------------|-----------------------------------------------------------------------------|
| zero_hpz_partition_size: n above 1         | second_copy=True, group=n                                                   |
| zero_quantized_weights                     | gather_codec="int8"                                                         |
| zero_quantized_gradients                   | reduce_codec="int4"                                                         |
| zero_quantized_nontrainable_weights        | frozen="int8"                                                               |

DeepSpeed has them at stage 3 only. Groups are the nodes unless zero_hpz_partition_size says how many ranks they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.recipe.deepspeed.reading import Reading

_KEYS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def read_groups(read: Reading, zero: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Recipe.zero`; below stage 3 the keys go to `read` as without effect."""
    size = zero.get("zero_hpz_partition_size", 1)
    asked = {key: zero.get(key) for key in _KEYS[1:] if zero.get(key)} | ({_KEYS[0]: size} if size > 1 else {})
    if zero.get("stage", 0) < 3:
        read.without_effect += [(f"zero_optimization.{key}", "DeepSpeed has ZeRO++ at stage 3 only") for key in asked]
        return {}
    arguments: dict[str, Any] = {}
    if size > 1:
        arguments |= {"second_copy": True, "group": size}
    if zero.get("zero_quantized_weights"):
        arguments["gather_codec"] = "int8"
    if zero.get("zero_quantized_gradients"):
        arguments["reduce_codec"] = "int4"
    if zero.get("zero_quantized_nontrainable_weights"):
        arguments["frozen"] = "int8"
    return arguments
