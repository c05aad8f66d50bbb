"""The FLOPs of operations, as torch counts them, on real and on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_aten = torch.ops.aten


def values_in(given: Any) -> Iterator[Any]:
    """Yield what an operation is given or returns, without lists, tuples and dicts around it. Several
    times as fast as torch's `tree_iter`, which knows any container.
    """
    if isinstance(given, (tuple, list)):
        for value in given:
            yield from values_in(value)
    elif isinstance(given, dict):
        for value in given.values():
            yield from values_in(value)
    else:
        yield given


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return {operation with matrix products: function of its FLOPs}, as torch counts FLOPs: a
    multiplication and an addition are two.
    """
    from torch.utils.flop_counter import FlopCounterMode

    table = dict(FlopCounterMode(display=False).flop_registry)
    table[_aten._scaled_dot_product_flash_attention_for_cpu] = _attention_flops
    table[_aten._scaled_dot_product_flash_attention_for_cpu_backward] = _attention_backward_flops
    for packet in (
        getattr(_aten, "_grouped_mm", None),
        getattr(torch.ops.transformers, "grouped_mm_fallback", None),
    ):
        if packet is not None:
            table[packet] = _grouped_flops
    return table


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Return the FLOPs of attention's two products; the masked half counts too.
    query (batch, heads, length, width); key, value (batch, heads, other length, width).
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[-1])


def _attention_backward_flops(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Return the FLOPs of attention's backward pass: five products. One computes the scores again,
    the others the gradients of scores, query, key and value.
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[-1])


def _grouped_flops(
    a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """Return the FLOPs of a grouped product: rows times the matrix of their group, (rows, k) and
    (groups, k, n); or the matrices' gradients, (m, rows) and (rows, n).
    """
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
