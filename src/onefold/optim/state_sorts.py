"""The sort of an optimizer's state, for code that saves states or combines those of several ranks.

| sort       | the value                                                      | such as            |
|------------|----------------------------------------------------------------|--------------------|
| "packed"   | codes or scales of moments in fewer bits                       | exp_avg.int8       |
| "elements" | a tensor of the parameter's shape                              | exp_avg            |
| "number"   | one number, or no tensor at all; every rank has it             | step               |
| "other"    | a tensor of a shape of its own, which cannot be divided        | Adafactor's rows   |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from onefold.recipe.moments import packed

Sort = Literal["packed", "elements", "number", "other"]
Shape = tuple[int, ...]


def odd_keys(states: Iterable[tuple[Shape, Mapping[Any, Any]]]) -> set[Any]:
    """Return the keys whose value differs in shape from its parameter, for any `(shape, state)`.

    The shape does not tell a step count from an element-wise state of a 0-dim parameter. The other
    parameters do.
    """
    return {
        key
        for shape, state in states
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
        and packed(key) is None
        and (tuple(value.shape) != shape or key == "step")
    }


def sort_of(key: Any, value: Any, shape: Shape, odd: set[Any]) -> Sort:
    """Return the sort of the state `key` of a parameter of `shape`; `odd`: from `odd_keys`."""
    if packed(key) is not None:
        return "packed"
    if not isinstance(value, torch.Tensor):
        return "number"
    same = tuple(value.shape) == shape
    if key in odd and value.numel() == 1 and (value.ndim == 0 or not same):
        return "number"
    return "elements" if same else "other"
