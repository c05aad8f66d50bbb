"""The dtypes that a configuration names: of autocast, of buffers, of master weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.deepspeed.config.reading import Reading

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


@dataclass(frozen=True)
class BufferDtypes:
    """The dtypes that a configuration gives to floating-point buffers.

    Attributes:
        dtype: of all but those that stay in fp32; None keeps theirs.
        in_fp32: names of buffers that are in fp32, whatever `dtype` says. `*` stands for any text,
            and a name may stand anywhere in the full one. None takes the lists of transformers'
            models.
        precision: the precision that the configuration enables, or None.
    """

    dtype: torch.dtype | None = None
    in_fp32: tuple[str, ...] | None = None
    precision: str | None = None

    def cast(self, model: nn.Module) -> None:
        """Cast the buffers of `model`, in place."""
        stays = self._in_fp32(model)
        if self.dtype is None and stays is None:
            return
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and buffer.element_size() > 1:  # no 8-bit formats
                kept = stays is not None and stays.search(name) is not None
                dtype = torch.float32 if kept else self.dtype
                if dtype is not None and buffer.dtype != dtype:
                    buffer.data = buffer.data.to(dtype)

    def _in_fp32(self, model: nn.Module) -> re.Pattern[str] | None:
        """The names of the buffers that stay in fp32, or None if there are none."""
        if self.precision is None and self.in_fp32 is None:
            return None
        names = self.in_fp32 if self.in_fp32 is not None else _listed(model, self.precision)
        patterns = [name.replace("*", ".*") for name in names]
        return re.compile("|".join(patterns)) if patterns else None


def _listed(model: nn.Module, precision: str | None) -> list[str]:
    """The names that transformers' models list to stay in fp32, as patterns of full names."""
    lists = ("_keep_in_fp32_modules_strict",) + (
        ("_keep_in_fp32_modules",) if precision == "fp16" else ()
    )
    return [
        f"^{re.escape(prefix)}\\..*{name}" if prefix else name
        for prefix, part in model.named_modules()
        for attribute in lists
        for name in getattr(part, attribute, None) or ()
    ]


def read_buffer_dtypes(section: Mapping[str, Any], precision: str | None) -> BufferDtypes:
    """Return the dtypes that "data_types" gives to floating-point buffers.

    Raises:
        ValueError: `param_dtype` is not the precision that the file enables, or
            `keep_in_fp32_modules` is no list of names.
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
    names, given = section.get("keep_in_fp32_modules"), section.get("buffer_dtype")
    if names is not None and (
        not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names)
    ):
        raise ValueError(
            f"data_types.keep_in_fp32_modules={names!r}: expected a list of names, as in"
            " ['e_score_correction_bias'], or 'auto'."
        )
    return BufferDtypes(
        None if given is None else read_dtype("data_types.buffer_dtype", given),
        None if names is None else tuple(names),
        precision,
    )


def master_arguments(
    fp16: Mapping[str, Any], bf16: Mapping[str, Any], adam: bool | None, read: Reading
) -> dict[str, Any]:
    """Return the arguments of `Recipe.zero` for master weights and states in 16 bits.

    Only `bf16_optimizer_states` asks for states in 16 bits. Left to itself, torch's Adam makes its
    states in the dtype of the master weights. In fp16 squares of small gradients are 0, and steps
    come out many times too large.

    `adam`: whether the file's optimizer is Adam or AdamW; None if it names none.
    """
    moments = {"moments": "fp32"} if adam else {}
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
        return {"master_dtype": "fp16", **moments} if of_fp16 else {}
    if not bf16.get("enabled"):
        return {}
    if of_bf16 and not wants_states:
        if not adam:
            read.remarks.append(
                "bf16_master_weights_and_grads: an optimizer other than Adam and AdamW makes its"
                " states in the dtype of the master weights, so they are bf16 too"
            )
        return {"master_dtype": "bf16", **moments}
    if of_bf16:
        return {"master_dtype": "bf16"}
    return {"moments": "bf16"} if wants_states else {}
