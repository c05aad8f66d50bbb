"""Outputs of a pass over the model must not lie in gathered buffers: when a buffer is released, the
parameters that point at it become empty.

A module may return its weight, or a view of it. The outermost pass returns a copy instead. The copy
is part of the graph, so gradients flow through it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onefold.memory import storage_of
from onefold.runtime.nested import tensors_in


def copied_out(output: Any, buffers: Mapping[int, Any]) -> Any:
    """Return `output` with each tensor that lies in one of `buffers` (by storage) replaced by a
    copy. If there is none, return the same object.
    """

    def gathered(t: torch.Tensor) -> bool:
        return t.layout is torch.strided and storage_of(t) in buffers

    if not buffers or not any(gathered(t) for t in tensors_in(output)):
        return output
    known: dict[int, torch.Tensor] = {}  # one copy for each object, however often it occurs

    def own(t: torch.Tensor) -> torch.Tensor:
        return known.setdefault(id(t), t.clone()) if gathered(t) else t

    return _mapped(output, own)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 4) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or depth == 0 or isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, (list, tuple, set)):
        items = [_mapped(v, change, depth - 1) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {k: _mapped(v, change, depth - 1) for k, v in value.items()}
    if isinstance(value, dict):  # a model output of transformers: items that are attributes too
        out = copy.copy(value)
        for k, v in value.items():
            out[k] = _mapped(v, change, depth - 1)
        return out
    if hasattr(value, "__dict__"):
        frozen = dataclasses.is_dataclass(value)
        out = copy.copy(value)
        for k, v in vars(value).items():
            (object.__setattr__ if frozen else setattr)(out, k, _mapped(v, change, depth - 1))
        return out
    return value
