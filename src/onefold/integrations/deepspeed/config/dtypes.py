"""The dtypes that a configuration names: of autocast, of buffers, of master weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onefold.integrations.deepspeed.config.reading import Reading

_NAMES: Mapping[str, torch.dtype] = {
    name: dtype
    for dtype, names in {
        torch.float32: ("fp32", "float32", "float"),
        torch.float16: ("fp16", "float16", "half"),
        torch.bfloat16: ("bf16", "bfloat16"),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class Autocast:
    """torch.autocast around the forward passes of an engine.

    Attributes:
        dtype: the lower precision.
        modules: full names of the module classes whose gradients travel in it; None takes those of
            DeepSpeed.
    """

    dtype: torch.dtype
    modules: tuple[str, ...] | None = None


def read_dtype(path: str, value: str) -> torch.dtype:
    """Return the dtype of a name such as "bf16", "bfloat16" or "torch.bfloat16".

    Raises:
        ValueError: there is no such dtype here.
    """
    found = _NAMES.get(value.lower().removeprefix("torch."))
    if found is None:
        raise ValueError(
            f"{path}={value!r}: there is no such dtype; expected 'fp32', 'fp16' or 'bf16'."
        )
    return found


def read_autocast(section: Mapping[str, Any]) -> Autocast | None:
    """Return what the section "torch_autocast" enables, or None.

    Raises:
        ValueError: it names no dtype, or no list of classes.
    """
    if not section.get("enabled"):
        return None
    path = "torch_autocast.dtype"
    if "dtype" not in section:
        raise ValueError(f"{path} is not set: write 'bfloat16' or 'float16'.")
    dtype = read_dtype(path, section["dtype"])
    modules = section.get("lower_precision_safe_modules")
    if modules is None:
        return Autocast(dtype)
    if not isinstance(modules, (list, tuple)) or not all(isinstance(m, str) for m in modules):
        raise ValueError(
            f"torch_autocast.lower_precision_safe_modules={modules!r}: expected a list of full"
            " class names, as in ['torch.nn.Linear']."
        )
    return Autocast(dtype, tuple(modules))


def read_buffer_dtype(section: Mapping[str, Any], precision: str | None) -> torch.dtype | None:
    """Return the dtype that "data_types" gives to floating-point buffers; None keeps theirs.

    Raises:
        ValueError: `param_dtype` is not the precision that the file enables.
    """
    if "param_dtype" in section:
        path = "data_types.param_dtype"
        wanted = read_dtype(path, section["param_dtype"])
        if wanted != read_dtype(path, precision or "fp32"):
            enabled = "neither fp16 nor bf16" if precision is None else f"{precision}.enabled"
            raise ValueError(
                f"{path}={section['param_dtype']!r} contradicts {enabled}, which decides the dtype"
                " of computation: leave param_dtype out."
            )
    if "buffer_dtype" not in section:
        return None
    return read_dtype("data_types.buffer_dtype", section["buffer_dtype"])


def master_arguments(
    fp16: Mapping[str, Any], bf16: Mapping[str, Any], read: Reading
) -> dict[str, Any]:
    """Return the arguments of `Recipe.zero` for master weights and states in 16 bits."""
    of_bf16 = bool(bf16.get("bf16_master_weights_and_grads"))
    of_fp16 = bool(fp16.get("fp16_master_weights_and_grads"))
    wants_states = bool(bf16.get("bf16_optimizer_states"))
    if wants_states and not bf16.get("enabled"):
        read.without_effect.append(("bf16.bf16_optimizer_states", "bf16.enabled is not true"))
    if of_bf16 and not bf16.get("enabled"):
        read.without_effect.append(
            ("bf16.bf16_master_weights_and_grads", "bf16.enabled is not true")
        )
    if of_fp16 and not fp16.get("enabled"):
        read.without_effect.append(
            ("fp16.fp16_master_weights_and_grads", "fp16.enabled is not true")
        )
    if fp16.get("enabled"):
        return {"master_dtype": "fp16"} if of_fp16 else {}
    if not bf16.get("enabled"):
        return {}
    if of_bf16:
        if not wants_states:
            read.remarks.append(
                "bf16_master_weights_and_grads: the optimizer makes its states in the dtype of the"
                " master weights, so they are bf16 too"
            )
        return {"master_dtype": "bf16"}
    return {"moments": "bf16"} if wants_states else {}
