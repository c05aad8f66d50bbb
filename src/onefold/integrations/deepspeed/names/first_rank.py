"""Parameters that no engine has yet, and that are whole on rank 0 alone: made under `zero.Init`."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onefold.device import available, default_device

#: Where a parameter keeps the number that it got under `Init`, alike on all ranks.
NUMBER = "_onefold_init_number"
_numbers = itertools.count()


def take_over(param: nn.Parameter, first: bool) -> None:
    """Number it, and keep its values on the first rank alone."""
    param.__dict__[NUMBER] = next(_numbers)
    if not first:
        drop(param)


def drop(param: nn.Parameter) -> None:
    """Keep shape and dtype, and one element. A read shows NaN rather than numbers of no meaning."""
    value = math.nan if param.is_floating_point() or param.is_complex() else 0
    one = torch.full((1,), value, dtype=param.dtype, device=param.device)
    param.data = one.expand(param.shape)


def lend(param: nn.Parameter) -> None:
    """Rank 0's values of a parameter that no engine has yet, on every rank."""
    if dist.get_rank() != 0:
        param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    broadcast(param.data, 0)


def broadcast(tensor: Tensor, source: int) -> None:
    """`source`'s values to all ranks, over the accelerator where the backend knows nothing else."""
    if tensor.device.type == "cpu" and available() and dist.get_backend() == "nccl":
        there = tensor.to(default_device())
        dist.broadcast(there, src=source)
        tensor.copy_(there)
        return
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(flat, src=source)
    if flat is not tensor:
        tensor.copy_(flat)
