"""ZeRO beside expert parallelism: weights of experts are sharded over what is left of the ranks that
hold them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import run_ranks
from zoo import features_of

pytestmark = pytest.mark.one_in(3)

WIDTH, HIDDEN, EXPERTS = 8, 12, 4


class AllToAll(torch.autograd.Function):
    """Send `sizes[r]` rows to rank r of the group, and get `back[r]` from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], back: list[int], group: Any) -> Tensor:  # type: ignore[override]
        ctx.sizes, ctx.back, ctx.group = sizes, back, group
        out = x.new_empty(sum(back), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), back, sizes, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        out = grad.new_empty(sum(ctx.sizes), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sizes, ctx.back, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    """Feed-forward experts in two stacks [experts, ...], of which a rank computes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.3)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """x (tokens, width), expert (tokens): the number of the one that each is sent to."""
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        if self.mesh is None:
            y = self._compute(x[order], counts, self.up, self.down)
            return torch.empty_like(y).index_copy(0, order, y)
        group = self.mesh.get_group()
        size = dist.get_world_size(group)
        told = torch.empty_like(counts)  # tokens for my experts, by the rank that sends them
        dist.all_to_all_single(told, counts, group=group)
        sizes = counts.view(size, -1).sum(1).tolist()
        back = told.view(size, -1).sum(1).tolist()
        rows = AllToAll.apply(x[order], sizes, back, group)
        mine = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(told)
        again = mine.argsort(stable=True)
        local = [w.to_local() for w in (self.up, self.down)]
        each = torch.bincount(mine, minlength=EXPERTS // size)
        y = self._compute(rows[again], each, *local)
        y = torch.empty_like(y).index_copy(0, again, y)
        y = AllToAll.apply(y, back, sizes, group)
        return torch.empty_like(y).index_copy(0, order, y)

    @staticmethod
    def _compute(x: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        # Experts without tokens take part with none, so that they have a gradient of zeros
        return torch.cat([F.gelu(p @ u) @ d for p, u, d in zip(parts, up, down, strict=True)])


class Mixture(nn.Module):
    """A block with a router, its experts and a shared one, which every token goes to."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.narrow = narrow

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        # narrow: experts 2 and 3 are never chosen
        chosen = (weights[:, :2] if self.narrow else weights).argmax(-1)
        scale = weights.gather(1, chosen[:, None])
        load = torch.bincount(chosen, minlength=EXPERTS).float() / len(chosen)
        balance = (load * weights.mean(0)).sum() * EXPERTS
        return x + self.experts(h, chosen) * scale + self.shared(h), balance


class Net(nn.Module):
    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixture(narrow) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        balance = torch.zeros(())
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        return self.head(x).pow(2).mean() + 0.01 * balance


@dataclass(frozen=True)
class Case:
    """`narrow`: two experts get no tokens. `loops`: the experts' mesh is made apart from the data
    axes, as transformers does.
    """

    dp: int = 2
    ep: int = 2
    narrow: bool = False
    apart: bool = False
    micro_batches: int = 1
    precision: str = "fp32"
    total: str = "mean"


def batches(case: Case, rank: int) -> list[Tensor]:
    # Ranks have different numbers of tokens: routing is uneven anyhow
    return [features_of(50 * rank + i, 12, WIDTH) for i in range(3 * case.micro_batches)]


def divided(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Experts):
            module.mesh = mesh
            for name in ("up", "down"):
                whole = getattr(module, name)
                setattr(module, name, nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)])))
    return model


def trained(stage: int, case: Case) -> dict[str, Any]:
    import onefold

    size = case.dp * case.ep
    if case.apart:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        experts = init_device_mesh("cpu", (case.dp, case.ep), mesh_dim_names=("efsdp", "ep"))["ep"]
        data: Any = "data"
    else:
        mesh = init_device_mesh("cpu", (case.dp, case.ep), mesh_dim_names=("dp", "ep"))
        experts, data = mesh["ep"], ("dp", "ep")
    model = divided(Net(case.narrow), experts)
    recipe = onefold.Recipe.zero(
        stage, stall_timeout=30.0, precision=case.precision, gradients=case.total
    )
    model = onefold.shard(model, recipe, mesh=mesh, data=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms, losses = [], []
    mine = batches(case, dist.get_rank())
    for step in range(3):
        for i in range(case.micro_batches):
            last = i + 1 == case.micro_batches
            with contextlib.nullcontext() if last else onefold.no_sync(model):
                loss = model(mine[step * case.micro_batches + i])
                losses.append(loss.item())
                (loss / case.micro_batches / (size if case.total == "sum" else 1)).backward()
        norms.append(onefold.clip_grad_norm_(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    flats = [flat for unit in onefold.engine_of(model).units for flat in unit.flats]
    return {
        "norms": norms,
        "losses": losses,
        "weights": onefold.full_state_dict(model),
        "holders": sorted({(flat.group.size, flat.boxed) for flat in flats}),
    }


def at_stages(stages: tuple[int, ...], case: Case) -> list[dict[str, Any]]:
    return [trained(stage, case) for stage in stages]


def in_one_process(case: Case) -> dict[str, Any]:
    model = Net(case.narrow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    size = case.dp * case.ep
    every = [batches(case, rank) for rank in range(size)]
    norms, losses = [], [[] for _ in range(size)]
    for step in range(3):
        for i in range(step * case.micro_batches, (step + 1) * case.micro_batches):
            for rank in range(size):
                loss = model(every[rank][i])
                losses[rank].append(loss.item())
                (loss / size / case.micro_batches).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "losses": losses, "weights": model.state_dict()}


CASES = {
    "experts": Case(),
    "an expert mesh of its own": Case(apart=True),
    "one holder of each expert": Case(dp=1, ep=4),
    "experts without tokens": Case(narrow=True),
    "accumulation": Case(micro_batches=2),
    "sums in place of means": Case(total="sum"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_stage_trains_as_one_process(name: str) -> None:
    case = CASES[name]
    expected = in_one_process(case)
    first: Any = None
    stages = 0, 1, 2, 3
    found = run_ranks(case.dp * case.ep, at_stages, stages, case)
    for stage, seen in zip(stages, zip(*found, strict=True), strict=True):
        for rank, each in enumerate(seen):
            told = f"{name}, stage {stage}, rank {rank}"
            torch.testing.assert_close(
                each["losses"], expected["losses"][rank], rtol=2e-5, atol=1e-6, msg=told
            )
            torch.testing.assert_close(
                each["norms"], expected["norms"], rtol=2e-5, atol=1e-6, msg=told
            )
            assert each["holders"] == [(case.dp, True), (case.dp * case.ep, False)], told
        for key, value in expected["weights"].items():
            torch.testing.assert_close(
                seen[0]["weights"][key], value, rtol=1e-4, atol=2e-5, msg=f"{name}, {stage}: {key}"
            )
        if first is None or (stage == 2 and case.micro_batches > 1):
            first = seen
        assert seen[0]["norms"] == first[0]["norms"], f"{name}: stage {stage} has other bits"
        for key, value in first[0]["weights"].items():
            assert torch.equal(seen[0]["weights"][key], value), f"{name}: {key} at stage {stage}"


def test_a_narrow_wire_divides_gradients_of_experts_by_all_data_ranks() -> None:
    expected = in_one_process(Case())
    found = run_ranks(4, at_stages, (1, 3), Case(precision="bf16"))
    for stage, seen in zip((1, 3), zip(*found, strict=True), strict=True):
        for got, wanted in zip(seen[0]["norms"], expected["norms"], strict=True):
            assert abs(got - wanted) < 0.05 * wanted, (stage, seen[0]["norms"], expected["norms"])
