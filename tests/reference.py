"""What a sharded training run is compared with, and how: DistributedDataParallel, one process, and
sentences on what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from looks import is_sharded

Computing = TypeVar("Computing", bound=Callable[..., Any])
#: The bound of rounding between two orders of the same sums in fp32.
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with the same random weights on every rank and in every run."""
    torch.manual_seed(seed)
    return make()


def by_rank_0(compute: Computing) -> Computing:
    """Rank 0 alone computes, the others are told what it returns: ranks share the cores. Collective
    over all ranks.
    """

    @functools.wraps(compute)
    def told(*args: Any, **kwargs: Any) -> Any:
        found = [compute(*args, **kwargs) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        return found[0]

    return told  # type: ignore[return-value]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum without normalization: a parameter whose true gradient is zero stays within rounding
    of it.
    """
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 0.01, "eps": 1e-4, **options})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    clip: float = 0.0,
) -> list[float]:
    """The plain loop, a step a batch; returns the losses. Without `loss` it is the model's output if
    that is one number, else the mean of its squares.
    """
    losses = []
    for batch in batches:
        if loss is not None:
            value = loss(model, batch)
        else:
            value = model(batch)
            value = value if value.dim() == 0 else value.square().mean()
        value.backward()
        if clip:
            sharded = is_sharded(model)
            norm = onefold.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
            norm(model if sharded else model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **{"find_unused_parameters": True, **options})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights and buffers, copied: of a sharded model (on every rank), of DDP, of a plain
    one.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not is_sharded(inner):
        return {name: tensor.detach().clone() for name, tensor in inner.state_dict().items()}
    found = [onefold.full_state_dict(inner)]  # on rank 0 only
    dist.broadcast_object_list(found, src=0)
    return found[0]


def differences(
    expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], rtol: float = 0, atol: float = 0
) -> list[str]:
    """A sentence for each way in which tensors differ by name, shape, dtype or value. Without
    tolerances every bit counts.
    """
    found = [f"only one side has {name}" for name in sorted(expected.keys() ^ actual.keys())]
    for name in sorted(expected.keys() & actual.keys()):
        a, b = expected[name], actual[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}")
        elif not (
            torch.allclose(b, a, rtol, atol, equal_nan=True) if rtol or atol else torch.equal(a, b)
        ):
            gap = (a.double() - b.double()).abs().max().item()
            found.append(f"{name}: {int((a != b).sum())} of {a.numel()} differ, by up to {gap:.3e}")
    return found


def first(state: Any) -> Any:
    """What rank 0 alone gives."""
    return state if dist.get_rank() == 0 else None


def on_each_rank(value: Any) -> list[Any]:
    """What each rank gave, in the order of ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def leaves(value: Any) -> dict[str, Tensor]:
    """{where: tensor} of everything in nested dicts, lists and tuples, for `differences`."""
    found = {}
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(value):
        tensor = leaf if isinstance(leaf, Tensor) else torch.tensor(list(repr(leaf).encode()))
        found[torch.utils._pytree.keystr(path)] = tensor
    return found
