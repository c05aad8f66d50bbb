"""Tensors inside what modules return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def tensors_in(value: Any, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or depth == 0 or isinstance(value, (str, bytes, int, float)):
        return []
    if isinstance(value, (list, tuple, set)):
        parts: Any = value
    elif isinstance(value, Mapping):
        parts = value.values()
    else:
        parts = getattr(value, "__dict__", {}).values()
    return [t for part in parts for t in tensors_in(part, depth - 1)]
