"""Buffers are one over the data axes; along other axes each rank has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from onefold.checkpoint.loading import source_of
from onefold.checkpoint.manifest import read_manifest
from onefold.pretrained.export_folder import export_folder
from ranks import run_ranks
from zoo import features_of


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


def saved_and_loaded(folder: str) -> list[Any]:
    import onefold

    model, mesh = on_a_mesh(3)
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    steps_of(model, dp, 2)
    onefold.save(folder, model=model)
    losses = steps_of(model, dp, 2, 2)
    again, _ = on_a_mesh(1)
    again.running.slopes.zero_()
    onefold.load(folder, model=again)
    assert steps_of(again, dp, 2, 2) == losses
    said = []
    for call in (onefold.full_state_dict, lambda m: list(onefold.stream_params(m))):
        try:
            call(model)
        except ValueError as error:
            said.append(str(error))
    # One value for all: what is not among it stays each rank's own
    onefold.load_full_state_dict(model, {"steps": torch.tensor(40)}, strict=False)
    assert model.steps == 40 and model.running.slopes[0] == 1 + 4 * tp
    model.running.slopes, model.running.mean = torch.zeros(2, 4)
    assert "running.mean" in onefold.full_state_dict(model) or dist.get_rank()
    return said


def test_a_checkpoint_has_each_ranks_own_buffers(tmp_path: Path) -> None:
    import onefold

    folder = str(tmp_path / "step")
    for whole, stream in run_ranks(4, saved_and_loaded, folder):
        assert "'running.slopes', 'running.mean' (here tp: " in whole, whole
        assert stream.startswith("stream_params() has one value of each buffer"), stream
    kept = [r.item for r in read_manifest(Path(folder)).records if r.item.kind == "buffer"]
    assert sorted(i.state for i in kept if i.name == "running.mean") == ["tp: 0 of 2", "tp: 1 of 2"]
    assert [i.state for i in kept if i.name == "steps"] == [""]
    model = onefold.shard(Columns(), onefold.Recipe.zero(0))
    with pytest.raises(onefold.CheckpointError, match="has other values of buffer"):
        onefold.load(folder, model=model)
    with pytest.raises(onefold.CheckpointError, match="what is to be written has one"):
        export_folder(source_of(Path(folder)), tmp_path / "exported")
    loaded = onefold.load(folder, model=model, strict=False)
    assert loaded.missing == ("running.slopes", "running.mean")
    assert model.steps == 2 and model.running.slopes[7] == 8
