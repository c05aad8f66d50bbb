"""Buffers are one over the data axes; along other axes each rank has its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models import features_of
from ranks import run_ranks


class Running(nn.Module):
    """Subtracts a running mean of each column, by a slope of its own."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(1.0, columns + 1))
        self.register_buffer("mean", torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean.clone() * self.slopes
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return out


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.running, self.down = nn.Linear(6, 8), Running(8), nn.Linear(8, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.down(self.running(self.up(x)).tanh()).square().sum()


def on_a_mesh(stage: int, **given: Any) -> tuple[nn.Module, Any]:
    """The model over (dp 2, tp 2), with this rank's columns of the buffers."""
    import onefold

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Columns()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for name, buffer in list(model.running.named_buffers()):
        setattr(model.running, name, buffer.chunk(2)[mesh.get_local_rank("tp")].clone())
    recipe = onefold.Recipe.zero(stage, stall_timeout=20.0)
    return onefold.shard(model, recipe, mesh=mesh, data="dp", **given), mesh


def steps_of(model: nn.Module, dp: int, count: int, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(first, first + count):
        loss = model(features_of(10 * dp + step, 4, 6))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained() -> list[Any]:
    import onefold

    out = []
    for stage in range(4):
        model, mesh = on_a_mesh(stage)
        engine = onefold.engine_of(model)
        engine.memory.record = True
        losses = steps_of(model, mesh.get_local_rank("dp"), 3)
        sent = [e.nbytes for e in engine.traffic.events if e.unit == "buffers"]
        out.append((losses, {n: b.clone() for n, b in model.named_buffers()}, sent))
    return [mesh.get_coordinate(), out]


def in_one_process() -> tuple[list[list[float]], dict[str, Tensor]]:
    """The same, with buffers of the first data rank."""
    model, losses = Columns(), [[], []]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        before = {name: b.clone() for name, b in model.named_buffers()}
        for dp in (1, 0):
            for name, b in model.named_buffers():
                b.copy_(before[name])
            loss = model(features_of(10 * dp + step, 4, 6))
            (loss / 2).backward()
            losses[dp].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_buffers())


def test_buffers_of_columns_are_each_ranks_own() -> None:
    losses, buffers = in_one_process()
    for (dp, tp), stages in run_ranks(4, trained):
        for seen, held, sent in stages:
            assert seen == pytest.approx(losses[dp], rel=1e-5)
            assert seen == stages[0][0]
            # Of the first data rank, whose buffers are sent to one other rank before each pass
            assert sent == [4 * 4 * 2 + 8 if dp == 0 else 0] * 3
            if dp == 0:
                for name, whole in buffers.items():
                    mine = whole.chunk(2)[tp] if whole.ndim else whole
                    torch.testing.assert_close(held[name], mine)
