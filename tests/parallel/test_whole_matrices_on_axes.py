"""Optimizers of whole matrices beside tensor and expert parallelism: replicated matrices and stacks of
experts are stepped, and a matrix that tensor parallelism divides is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from axes_models import Case, batches_of, built, mesh_of_case, parallelized
from test_experts import Case as ExpertsCase
from test_experts import Net, batches, divided
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import onefold
from ranks import run_ranks
from whole_optimizers import PerTensor


class Normed(PerTensor):
    """Scales the gradient of a matrix, of each matrix of a stack, or of a vector, by its norm."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
        momentum.lerp_(p.grad, 0.2)
        dims = (-2, -1) if p.dim() > 1 else None
        p.sub_(momentum / (momentum.norm(dim=dims, keepdim=True) + 1e-3), alpha=group["lr"])


def optimizers_of(model: nn.Module, plain: nn.Module) -> list[Optimizer]:
    """Muon for what is a matrix and in one piece in `plain`, AdamW for the rest."""
    divided = {n for n, p in plain.named_parameters() if isinstance(p, DTensor)}
    named = dict(model.named_parameters())
    matrices = [n for n, p in named.items() if p.dim() == 2 and n not in divided]
    assert matrices
    return [
        torch.optim.Muon([named[n] for n in matrices], lr=0.02),
        torch.optim.AdamW([p for n, p in named.items() if n not in matrices], lr=0.01, eps=1e-4),
    ]


def beside_tensor_parallelism(stages: tuple[int, ...]) -> list[Any]:
    case, out = Case(plan="layers"), []
    for stage in stages:
        mesh = mesh_of_case(case)
        before = parallelized(case, mesh)
        recipe = onefold.Recipe.zero(stage, stall_timeout=60.0)
        model = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
        optimizers = optimizers_of(model, before)
        for batch in batches_of(case, mesh.get_local_rank("dp")):
            model(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        out.append((onefold.full_state_dict(model), optimizers[0].state_dict()))
    return out


def in_one_process() -> tuple[nn.Module, list[Optimizer]]:
    case, plain = Case(plan="layers"), built(Case(plan="layers"))
    names = {f"layers.{i}.attention.w{w}.weight" for i in range(2) for w in "qkvo"}
    named = dict(plain.named_parameters())
    optimizers: list[Optimizer] = [
        torch.optim.Muon([p for n, p in named.items() if n in names], lr=0.02),
        torch.optim.AdamW([p for n, p in named.items() if n not in names], lr=0.01, eps=1e-4),
    ]
    every = [batches_of(case, dp) for dp in range(case.dp)]
    for step in range(case.steps):
        for mine in every:
            (plain(mine[step]) / case.dp).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain, optimizers


def test_replicated_matrices_beside_tensor_parallelism_are_stepped_whole() -> None:
    plain, optimizers = in_one_process()
    found = run_ranks(4, beside_tensor_parallelism, (1, 3))[0]
    for weights, states in found:
        for name, value in plain.state_dict().items():
            # Newton-Schulz in bf16 widens what the order of sums leaves
            torch.testing.assert_close(weights[name], value, rtol=1e-2, atol=2e-3, msg=name)
        for number, state in optimizers[0].state_dict()["state"].items():
            mine = states["state"][number]["momentum_buffer"]
            torch.testing.assert_close(mine, state["momentum_buffer"], rtol=1e-2, atol=1e-4)
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])


def with_divided_matrices() -> str:
    case = Case()
    mesh = mesh_of_case(case)
    recipe = onefold.Recipe.zero(3, stall_timeout=60.0)
    model = onefold.shard(parallelized(case, mesh), recipe, mesh=mesh, data="dp")
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)
    model(batches_of(case, mesh.get_local_rank("dp"))[0]).backward()
    with pytest.raises(ValueError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_matrix_that_another_axis_divides_is_refused_by_name() -> None:
    for said in run_ranks(4, with_divided_matrices):
        assert "Muon steps whole matrices" in said and "over tp" in said, said
        assert "tok_embeddings.weight" in said, said


def experts(stages: tuple[int, ...]) -> list[Any]:
    case, out = ExpertsCase(), []
    for stage in stages:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = onefold.shard(
            divided(Net(), mesh["ep"]), onefold.Recipe.zero(stage, stall_timeout=60.0),
            mesh=mesh, data=("dp", "ep"),
        )  # fmt: skip
        optimizer = Normed(model.parameters())
        for batch in batches(case, dist.get_rank()):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append((onefold.full_state_dict(model), optimizer.state_dict()))
    return out


def test_stacks_of_experts_are_stepped_by_optimizers_that_take_them() -> None:
    case, plain = ExpertsCase(), Net()
    optimizer = Normed(plain.parameters())
    every = [batches(case, rank) for rank in range(4)]
    for step in range(3):
        for mine in every:
            (plain(mine[step]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(4, experts, (0, 1, 3))[0]
    for weights, states in found:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)
        for number, state in optimizer.state_dict()["state"].items():
            mine = states["state"][number]["momentum_buffer"]
            torch.testing.assert_close(mine, state["momentum_buffer"], rtol=1e-3, atol=1e-5)
    for weights, _ in found[1:]:
        assert all(torch.equal(weights[name], found[0][0][name]) for name in weights)
