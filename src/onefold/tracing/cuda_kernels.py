"""Run the kernels that CUDA would choose, on fake tensors of the CPU.

A trace runs on fake CPU tensors, so torch chooses its CPU kernels. For two calls, the choice of
kernel decides what autograd keeps:

| call                         | on the CPU                              | on CUDA (used here instead)                                 |
|------------------------------|-----------------------------------------|-------------------------------------------------------------|
| dropout                      | keeps a mask in the input's dtype       | keeps a boolean mask                                        |
| scaled_dot_product_attention | fused; with dropout it keeps the scores | fused: flash for 16 bits without a mask, else mem-efficient |
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
FLASH_WIDEST = 256  # the widest head that flash attention has a kernel for


class CudaKernels(TorchFunctionMode):
    """Inside this mode, the calls in the table above run the operations that CUDA would run.

    The mode does not see calls from torch's own Python functions. In nn.MultiheadAttention with
    dropout, for example, the scores are counted.
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
    """torch's scaled_dot_product_attention, by the fused CUDA kernels.
    query (batch, heads, length, width); key, value (batch, their heads, other length, width), where
    values may have another width (latent attention).
    """
    width = query.shape[-1]
    low = query.dtype in (torch.float16, torch.bfloat16)
    if (
        query.dim() != 4
        or not (low or query.dtype is torch.float32)
        or width % 8
        or value.shape[-1] % 8
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = 1 / math.sqrt(width) if scale is None else scale
    if low and attn_mask is None and width == value.shape[-1] <= FLASH_WIDEST:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if enable_gqa and key.shape[1] != query.shape[1]:  # this kernel needs equal numbers of heads
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
    """Return the fake result of torch._grouped_mm in any dtype; torch's own rule for fake tensors
    accepts bf16 only.

    a (rows, k), b (groups, k, n) -> (rows, n); a (m, rows), b (rows, n) -> (groups, m, n); a
    (groups, m, k), b (groups, k, n) -> (groups, m, n); a (groups, m, k), b (k, rows) -> (m, rows).
    """
    dims = a.dim(), b.dim()
    groups = offs.shape if dims == (2, 2) else a.shape[:1] if dims == (3, 3) else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=out_dtype)


#: {operation: function to run instead of torch's rule for fake tensors}
STAND_INS = {_aten._grouped_mm: _grouped_mm}
