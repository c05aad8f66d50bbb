"""Count the work of kernels: FLOPs, operations, and the bytes that they read and write. Works on
real and on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.memory import nbytes_of

_aten = torch.ops.aten
#: Operations that do no work (they make a view, or allocate without writing), although their schema
#: does not say so.
_IDLE = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "device",
        "_local_scalar_dense",
    }
)
#: Operations that read only those elements of their first tensor that they copy to the output.
_PICKING = frozenset({"embedding", "index", "index_select", "gather"})


@dataclass(frozen=True)
class Kernels:
    """The work of the kernels in a part of a step.

    Attributes:
        flops: FLOPs of matrix products (including attention), as torch counts them.
        products: number of matrix products; each group of a grouped product counts. product_bytes:
            bytes that they read and write.
        others: number of other operations that do work (views do none). other_bytes: bytes that
            they read and write.
    """

    flops: int = 0
    products: int = 0
    product_bytes: int = 0
    others: int = 0
    other_bytes: int = 0

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Kernels:
        return Kernels(*(times * n for n in astuple(self)))


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


def kernels_of(
    func: Any, args: Any, kwargs: Any, out: Any, formulas: dict[Any, Callable[..., int]]
) -> Kernels | None:
    """Return the work of one dispatched operation; None if it does no work.
    `formulas`: the result of `flop_formulas`.
    """
    if _idle(func):
        return None
    inputs = [t for t in values_in((args, kwargs)) if isinstance(t, torch.Tensor)]
    outputs = [t for t in values_in(out) if isinstance(t, torch.Tensor)]
    written = sum(map(nbytes_of, outputs))
    read = (
        written + sum(map(nbytes_of, inputs[1:]))
        if name_of(func) in _PICKING
        else sum(map(nbytes_of, inputs))
    )
    formula = formulas.get(func.overloadpacket)
    if formula is None:
        return Kernels(others=1, other_bytes=read + written)
    return Kernels(
        int(formula(*args, **kwargs, out_val=out)), _groups(func, inputs, outputs), read + written
    )


def _groups(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return the number of products in one operation: the groups of a grouped one, else 1."""
    if "grouped" not in name_of(func):
        return 1
    return max((t.shape[0] for t in (*inputs, *outputs) if t.dim() == 3), default=1)


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """Return the name of an operation, without its library."""
    return str(func._schema.name).rpartition("::")[2]


@lru_cache(maxsize=4096)
def _idle(func: Any) -> bool:
    returns = func._schema.returns
    views = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return not returns or views or name_of(func) in _IDLE


class Counting(TorchDispatchMode):
    """A dispatch mode that adds up in `found` the work of the operations inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self._formulas = Kernels(), flop_formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        done = kernels_of(func, args, kwargs, out, self._formulas)
        self.found = self.found + done if done is not None else self.found
        return out


def count(call: Callable[[], object]) -> Kernels:
    """Return the work of `call`, including its backward passes."""
    with Counting() as counting:
        call()
    return counting.found


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
