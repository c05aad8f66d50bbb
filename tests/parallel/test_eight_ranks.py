"""Three axes at once, on eight ranks: losses, norms and weights are those of one process, and stages 1,
2 and 3 of one mesh have the same bits.

| mesh               | divided                                                                        |
|--------------------|--------------------------------------------------------------------------------|
| pp 2 × dp 2 × tp 2 | each stage's feed-forward layers, embedding and head over tp                    |
| dp 2 × ep 2 × tp 2 | attention over tp; experts over ep, and each expert over tp                     |

transformers' own plans on eight ranks are in test_transformers_plans.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from axes_models import VOCABULARY, WIDTH, LlamaAttention
from pipeline_models import Case
from test_experts import AllToAll
from test_pipelines import compare
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models import tokens_of
from ranks import run_ranks

PIPELINES = {
    "1F1B": Case("Schedule1F1B", tp=2, max_norm=0.5, steps=2),
    "interleaved 1F1B": Case(
        "ScheduleInterleaved1F1B", tp=2, stages=4, registered=True, max_norm=0.5, steps=2
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_beside_data_and_tensor_parallelism_train_as_one_process(name: str) -> None:
    for ranks in compare(name, PIPELINES[name], 1, 2, 3):
        assert len({tuple(seen["norms"]) for seen in ranks}) == 1, "norms differ between ranks"


# -- experts ---------------------------------------------------------------------------------------

HIDDEN, EXPERTS, STEPS = 12, 4, 3


class Copied(torch.autograd.Function):
    """Into what a rank has a part of: gradients of the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """Out of it: the parts are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Experts(nn.Module):
    """Feed-forward experts in two stacks [experts, ...]; each token goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3)
        self.mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, dim in (("up", 2), ("down", 1)):
            whole = getattr(self, name).data
            placed = distribute_tensor(whole, mesh, [Shard(0), Shard(dim)])
            setattr(self, name, nn.Parameter(placed))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x [tokens, width], expert [tokens]."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        if self.mesh is None:
            y = _computed(x[order], counts, self.up, self.down)
            return torch.empty_like(y).index_copy(0, order, y)
        ep, tp = self.mesh.get_group("ep"), self.mesh.get_group("tp")
        size = dist.get_world_size(ep)
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts, group=ep)
        sizes, back = counts.view(size, -1).sum(1).tolist(), told.view(size, -1).sum(1).tolist()
        rows = AllToAll.apply(Copied.apply(x, tp)[order], sizes, back, ep)
        mine = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(told)
        again = mine.argsort(stable=True)
        each = torch.bincount(mine, minlength=EXPERTS // size)
        y = _computed(rows[again], each, self.up.to_local(), self.down.to_local())
        y = torch.empty_like(y).index_copy(0, again, y)
        y = Summed.apply(AllToAll.apply(y, back, sizes, ep), tp)
        return torch.empty_like(y).index_copy(0, order, y)


def _computed(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([F.gelu(p @ u) @ d for p, u, d in zip(parts, up, down, strict=True)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.experts = LlamaAttention(WIDTH, 4), Experts()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x).flatten(0, 1)
        weights = self.router(h).softmax(-1)
        scale, chosen = weights.max(-1)
        return x + (self.experts(h, chosen) * scale[:, None]).view_as(x)


class Mixture(nn.Module):
    """tokens -> the mean next-token loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


PLAN = {
    "blocks.*.attention.wq": ColwiseParallel(),
    "blocks.*.attention.wk": ColwiseParallel(),
    "blocks.*.attention.wv": ColwiseParallel(),
    "blocks.*.attention.wo": RowwiseParallel(),
}


def batch_of(data_rank: int, step: int) -> Tensor:
    return tokens_of(10 * data_rank + step, batch=2, length=9, vocabulary=VOCABULARY)


def trained(*stages: int) -> list[dict[str, Any]]:
    import onefold

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    found = []
    for stage in stages:
        model = parallelize_module(Mixture(), mesh["tp"], PLAN)
        for block in model.blocks:
            block.experts.divide(mesh["ep", "tp"])
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        model = onefold.shard(model, recipe, mesh=mesh, data=("dp", "ep"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses, norms = [], []
        for step in range(STEPS):
            loss = model(batch_of(dist.get_rank() // 2, step))
            loss.backward()
            losses.append(loss.item())
            norms.append(onefold.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        entries = onefold.engine_of(model).entries
        found.append(
            {
                "losses": losses,
                "norms": norms,
                "weights": onefold.full_state_dict(model),
                "holders": {e.slot.name: e.flat.size for e in entries},
            }
        )
    return found


def in_one_process() -> dict[str, Any]:
    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[list[float]] = [[] for _ in range(4)]
    norms = []
    for step in range(STEPS):
        for data_rank in range(4):
            loss = model(batch_of(data_rank, step))
            (loss / 4).backward()
            losses[data_rank].append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def test_experts_beside_data_and_tensor_parallelism_train_as_one_process() -> None:
    expected = in_one_process()
    ranks = run_ranks(8, trained, 1, 2, 3)
    holders = {"blocks.0.experts.up": 2, "blocks.0.attention.wq.weight": 4, "tokens.weight": 8}
    first = ranks[0][0]
    for at in range(3):
        for rank, seen in enumerate(each[at] for each in ranks):
            told = f"stage {at + 1}, rank {rank}"
            for what, wanted in (
                ("losses", expected["losses"][rank // 2]),
                ("norms", expected["norms"]),
            ):
                torch.testing.assert_close(
                    seen[what], wanted, rtol=2e-5, atol=1e-6, msg=f"{told}: {seen[what]} {wanted}"
                )
            assert seen["norms"] == first["norms"], f"{told}: other bits"
            assert seen["losses"] == ranks[rank][0]["losses"], f"{told}: other bits"
            assert {name: seen["holders"][name] for name in holders} == holders, told
        weights = ranks[0][at]["weights"]
        for key, value in expected["weights"].items():
            difference = (weights[key] - value).abs().max().item()
            assert difference < 2e-5, f"stage {at + 1}: {key} differs by {difference}"
            assert torch.equal(weights[key], first["weights"][key]), f"stage {at + 1}: {key}"
