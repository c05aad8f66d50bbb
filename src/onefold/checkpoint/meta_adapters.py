"""Adapters of peft that were built on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError


def materialize_adapters(module: nn.Module, device: torch.device) -> None:
    """Give adapters that were built on the meta device memory, and the values that peft starts them
    with. Local.

    Raises:
        CheckpointError: they start from the base model's weights, which are not there yet.
    """
    configs: dict[str, Any] = getattr(module, "peft_config", None) or {}
    for layer in module.modules():
        if not hasattr(layer, "reset_lora_parameters"):
            continue
        for name, config in configs.items():
            parts = [
                getattr(layer, part)
                for part in layer.adapter_layer_names  # type: ignore[union-attr]
                if name in getattr(layer, part, ())
            ]
            tensors = [
                p
                for part in parts
                for p in (
                    [part[name]]
                    if isinstance(part[name], torch.Tensor)
                    else part[name].parameters()
                )
            ]
            if not any(p.is_meta for p in tensors):
                continue
            how = config.init_lora_weights
            if how not in (True, False, "gaussian") or config.use_dora:
                raise CheckpointError(
                    f"adapter {name!r} starts from the base model's weights"
                    f" ({'DoRA' if config.use_dora else repr(how)}), which are not there while the"
                    " model is on the meta device: build it in memory, or give"
                    " init_lora_weights=True or 'gaussian'."
                )
            for part in parts:
                if isinstance(part[name], torch.Tensor):
                    part[name] = nn.Parameter(
                        torch.zeros_like(part[name], device=device),
                        requires_grad=part[name].requires_grad,
                    )
                else:
                    part[name].to_empty(device=device)
                    if hasattr(part[name], "reset_parameters"):
                        part[name].reset_parameters()
            layer.reset_lora_parameters(name, how)  # type: ignore[operator]
