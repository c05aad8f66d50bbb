"""What kernels run: FLOPs, operations and the bytes that they read and write, on real tensors and on
fake ones alike; and which kernels an accelerator would choose.

A trace runs on fake tensors of the CPU, so torch chooses as it would there. Two choices decide what
autograd keeps:

| call                         | on the CPU                              | on CUDA (what is stood in for here)                         |
|------------------------------|-----------------------------------------|-------------------------------------------------------------|
| dropout                      | keeps a mask in the input's dtype       | keeps a boolean mask                                        |
| scaled_dot_product_attention | fused; with dropout it keeps the scores | fused: flash for 16 bits without a mask, else mem-efficient |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from onefold.memory import nbytes_of
from onefold.plan.fit import Kernels

_aten = torch.ops.aten
#: Operations that do no work although nothing in their schema says that they only make a view, or
#: take memory and leave it as it is.
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
#: Operations that read of their first tensor only what they write.
_PICKING = frozenset({"embedding", "index", "index_select", "gather"})


def kernels_of(
    func: Any, args: Any, kwargs: Any, out: Any, formulas: dict[Any, Callable[..., int]]
) -> Kernels | None:
    """What one dispatched operation does; None if it does no work. `formulas` are those of
    `flop_formulas`.
    """
    if _idle(func):
        return None
    inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    outputs = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
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
    """Products that one operation consists of: the groups of a grouped one."""
    if "grouped" not in name_of(func):
        return 1
    return max((t.shape[0] for t in (*inputs, *outputs) if t.dim() == 3), default=1)


@lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """Of an operation, without its library."""
    return str(func._schema.name).rpartition("::")[2]


@lru_cache(maxsize=4096)
def _idle(func: Any) -> bool:
    returns = func._schema.returns
    views = bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )
    return not returns or views or name_of(func) in _IDLE


class Counting(TorchDispatchMode):
    """Inside it, `found` grows by what runs."""

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
    """What `call` runs, its backward passes included."""
    with Counting() as counting:
        call()
    return counting.found


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Operations with matrix products and how many FLOPs they take (a multiplication and an
    addition are two), as torch counts them.
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
    """query (batch, heads, length, width), key, value (batch, heads, other length, width): two
    products, the masked half counted too.
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
    """Five products: the scores again, and one for each of the four gradients (of scores, query,
    key, value).
    """
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[-1])


def _grouped_flops(
    a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """Rows times the matrix of their group: (rows, k) and (groups, k, n), or gradients of the
    matrices: (m, rows) and (rows, n).
    """
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


FLASH_WIDEST = 256  # the widest head that flash attention has a kernel for


class CudaKernels(TorchFunctionMode):
    """Inside it, calls in the table above run the operations that CUDA would run. Everything else
    is as it was.

    Not seen are calls from inside torch's own functions in Python: nn.MultiheadAttention with
    dropout counts its scores.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> torch.Tensor:
    training = training if train is None else train
    if not training or p == 0 or inplace or p == 1:
        plain: Any = torch._VF
        return plain.dropout_(input, p, training) if inplace else plain.dropout(input, p, training)
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """query (batch, heads, length, width); key, value (batch, their heads, other length, width). As
    torch's, by the fused kernels.
    """
    width = query.shape[-1]
    low = query.dtype in (torch.float16, torch.bfloat16)
    if (
        query.dim() != 4
        or not (low or query.dtype is torch.float32)
        or width % 8
        or value.shape[-1] != width
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = 1 / math.sqrt(width) if scale is None else scale
    if low and attn_mask is None and width <= FLASH_WIDEST:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa and key.shape[1] != query.shape[1]:  # this kernel wants as many heads everywhere
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                ~attn_mask, -math.inf
            )
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of torch._grouped_mm, rows padded to 16 bytes, in any dtype (torch's own rule for
    fake tensors refuses all but bf16).

    a (rows, k), b (groups, k, n) -> (rows, n); a (m, rows), b (rows, n) -> (groups, m, n); a
    (groups, m, k), b (k, rows) -> (m, rows).
    """
    dtype = out_dtype or a.dtype
    last = -(-b.shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() == b.dim() == 2:
        return torch.empty_strided(
            (offs.shape[0], a.shape[0], b.shape[1]), (a.shape[0] * last, last, 1), dtype=dtype
        )
    if a.dim() == b.dim() == 3:
        return torch.empty_strided(
            (a.shape[0], a.shape[1], b.shape[2]), (a.shape[1] * last, last, 1), dtype=dtype
        )
    return torch.empty_strided((a.shape[-2], b.shape[-1]), (last, 1), dtype=dtype)


#: What to run instead of an operation's fake rule.
STAND_INS = {_aten._grouped_mm: _grouped_mm}
