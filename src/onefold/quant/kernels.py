"""Which intervals the kernels for CUDA serve, and where: the plain operations do the rest, with
equal results.

Triton is imported when the first interval on CUDA is encoded or decoded, never before. The kernels
do whole blocks; a shorter last one is left to the plain operations. Which devices have kernels says
comm/launching.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm.launching import served
from onefold.quant.rounding import Stochastic

if TYPE_CHECKING:
    from onefold.quant.blockwise import Blockwise

NAMES = ("int8", "int4", "fp8", "nf4")


def serve(codec: Blockwise, floats: torch.Tensor) -> bool:
    """Whether kernels do the whole blocks of this interval."""
    return codec.name in NAMES and floats.numel() >= codec.block and served(floats)


def encode(
    codec: Blockwise,
    source: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    rounding: Stochastic | None,
) -> int:
    """Encode the whole blocks of `source`; answers the number of elements done."""
    from onefold.quant import triton_kernels

    return triton_kernels.encode(codec, source, payload, scales, rounding)


def decode(
    codec: Blockwise, payload: torch.Tensor, scales: torch.Tensor, into: torch.Tensor, sign: int
) -> int:
    """Decode the whole blocks over `into`, or add them `sign` times; answers the number of elements
    done.
    """
    from onefold.quant import triton_kernels

    return triton_kernels.decode(codec, payload, scales, into, sign)
