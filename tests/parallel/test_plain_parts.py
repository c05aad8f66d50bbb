"""Plain parameters that are parts along tensor parallelism, as layers without DTensors have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixture_models import Copied, Summed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranks import run_ranks
from zoo import features_of


class Parts(nn.Module):
    """A layer of columns and one of rows, by hand; `tp` None has all of them. `said`: as DTensors."""

    def __init__(self, tp: Any = None, said: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tp, self.first = tp, nn.Linear(6, 6)
        up, down = torch.randn(8, 6), torch.randn(2, 8)
        if tp is not None:
            up = up.chunk(tp.size(), 0)[tp.get_local_rank()]
            down = down.chunk(tp.size(), 1)[tp.get_local_rank()].contiguous()
        if said:
            up = DTensor.from_local(up, tp, [Shard(0)])
            down = DTensor.from_local(down, tp, [Shard(1)])
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        group, x = None if self.tp is None else self.tp.get_group(), self.first(x)
        x = x if group is None else Copied.apply(x, group)
        x = (x @ up.t()).tanh() @ down.t()
        return (x if group is None else Summed.apply(x, group)).square().mean()


def sharded(stage: int, said: bool, seed: int | None = None) -> Any:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Parts(mesh["tp"], said)
    if seed is not None:
        torch.manual_seed(seed)
        model.first.reset_parameters()
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    try:
        onefold.shard(model, recipe, mesh=mesh, data="dp")
    except ValueError as error:
        return str(error)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        loss = model(features_of(10 * mesh.get_local_rank("dp") + step, 4, 6))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def all_ways() -> list[Any]:
    rank = dist.get_rank()
    return [
        sharded(1, False),
        sharded(2, True, rank),
        *(sharded(s, True, rank // 2) for s in (0, 3)),
    ]


def test_plain_parts_along_other_axes_are_told_on_every_rank() -> None:
    model, losses = Parts(), [[], []]
    torch.manual_seed(0)
    model.first.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for dp in (0, 1):
            loss = model(features_of(10 * dp + step, 4, 6))
            (loss / 2).backward()
            losses[dp].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for rank, (plain, seeds, *said) in enumerate(run_ranks(4, all_ways)):
        assert "apart along 'tp' only have different values of 'up', 'down', which" in plain, plain
        assert "different values of 'first.weight', 'first.bias', which" in seeds, seeds
        assert "mesh['tp'], [Shard(dim)]" in plain
        # Other seeds along data are rank 0's, as in DDP; parts that are said to be parts are right
        for seen in said:
            assert seen == pytest.approx(losses[rank // 2], rel=1e-5)
