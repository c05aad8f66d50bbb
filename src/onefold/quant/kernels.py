"""Dispatch to the CUDA kernels, for the intervals that they support.

torch's plain operations do the rest, with equal results. Triton is imported when the first interval
on CUDA is encoded or decoded. The kernels process whole blocks; a shorter last block is left to the
plain operations. comm/launching.py decides which devices have kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm.launching import served
from onefold.quant.rounding import Stochastic

if TYPE_CHECKING:
    from onefold.quant.blockwise import Blockwise


def serve(codec: Blockwise, floats: torch.Tensor) -> bool:
    """Return whether kernels process the whole blocks of this interval."""
    return codec.has_kernel and floats.numel() >= codec.block and served(floats)


def encode(
    codec: Blockwise,
    source: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    rounding: Stochastic | None,
) -> int:
    """Encode the whole blocks of `source`, [numel] or [rows, numel]; return the number of elements
    of a row that are done.
    """
    from onefold.quant import triton_kernels

    return triton_kernels.encode(codec, source, payload, scales, rounding)


def decode(
    codec: Blockwise, payload: torch.Tensor, scales: torch.Tensor, into: torch.Tensor, sign: int
) -> int:
    """Decode the whole blocks into `into`, [numel] or [rows, numel], or add them times `sign` (if
    not 0); return the number of elements of a row that are done.
    """
    from onefold.quant import triton_kernels

    return triton_kernels.decode(codec, payload, scales, into, sign)


def decode_sum(
    codec: Blockwise,
    payload: torch.Tensor,
    scales: torch.Tensor,
    own: torch.Tensor,
    rank: int,
    into: torch.Tensor,
) -> None:
    """Write the sum of decoded rows of whole blocks, with `own` in the place of row `rank`."""
    from onefold.quant import triton_kernels

    triton_kernels.decode_sum(codec, payload, scales, own, rank, into)
