"""Translate the ZeRO++ keys of a DeepSpeed configuration to arguments of `Recipe.zero`.

| the file says                              | becomes                                                                     |
|--------------------------------------------|-----------------------------------------------------------------------------|
| zero_hpz_partition_size: n above 1         | second_copy=True, group=n                                                   |
| zero_quantized_weights                     | gather_codec="int8"                                                         |
| zero_quantized_gradients                   | reduce_codec="int4"                                                         |
| zero_quantized_nontrainable_weights        | frozen="int8"                                                               |

As in DeepSpeed, these keys have an effect at stage 3 only. A group is a node, unless
zero_hpz_partition_size gives the number of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onefold.deepspeed.config.reading import Reading

_KEYS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
)


def read_groups(
    read: Reading, zero: Mapping[str, Any], others: Mapping[str, Any], world_size: int | None
) -> dict[str, Any]:
    """Return the arguments of `Recipe.zero`.

    Below stage 3 there are none, and `read` lists the keys as without effect.

    Args:
        zero: the checked values of "zero_optimization".
        others: the arguments of `Recipe.zero` from the rest of the file.
        world_size: number of data-parallel ranks, to check the partition size; None does not check.

    Raises:
        ValueError: a partition that does not divide the ranks, or keys that contradict each other.
    """
    size = zero.get("zero_hpz_partition_size", 1)
    asked = {key: zero.get(key) for key in _KEYS[1:] if zero.get(key)} | (
        {_KEYS[0]: size} if size > 1 else {}
    )
    if zero.get("stage", 0) < 3:
        read.without_effect += [
            (f"zero_optimization.{key}", "DeepSpeed has ZeRO++ at stage 3 only") for key in asked
        ]
        return {}
    _refuse_what_cannot_be(zero, others, world_size)
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


def _refuse_what_cannot_be(
    zero: Mapping[str, Any], others: Mapping[str, Any], world_size: int | None
) -> None:
    """Raise ValueError, naming the file's keys, for what the recipe or topology would refuse."""
    size = max(1, zero.get("zero_hpz_partition_size", 1))
    if world_size is not None and world_size % size:
        fitting = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size={size} does not divide {world_size}"
            f" rank{'s' if world_size > 1 else ''}: choose {', '.join(fitting)}."
        )
    if zero.get("zero_quantized_gradients") and others.get("accumulate_dtype", "fp32") != "fp32":
        raise ValueError(
            "zero_optimization.zero_quantized_gradients and data_types.grad_accum_dtype: quantized"
            " gradients are summed in fp32; leave grad_accum_dtype out."
        )
    if zero.get("zero_quantized_nontrainable_weights") and "offload_param" in others:
        raise ValueError(
            "zero_optimization.zero_quantized_nontrainable_weights and offload_param: frozen"
            " weights are stored quantized on the device, and nowhere else yet; leave one of them out"
            " (offload_optimizer may stay)."
        )
