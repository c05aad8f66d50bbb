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
    from torch.utils.flop_counter import flop_registry

    table = dict(flop_registry)
    flash = "_scaled_dot_product_flash_attention"
    for backward in ("", "_backward"):  # the CPU's kernels, which torch's table leaves out
        table[getattr(_aten, f"{flash}_for_cpu{backward}")] = table[
            getattr(_aten, flash + backward)
        ]
    return table | {_aten._grouped_mm: _grouped_flops}


def _grouped_flops(
    a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """Return the FLOPs of a grouped product: rows times the matrix of their group, (rows, k) and
    (groups, k, n); or the matrices' gradients, (m, rows) and (rows, n).
    """
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
