"""Muon and AdamW as one optimizer: what torch's two do apart, and optimizers inside of optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import _muon
from torch.optim.optimizer import Optimizer

import onefold
from onefold.optim.muon import MuonWithAdamW
from ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices, and the rest."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    return hidden, [p for _, p in named if not any(p is each for each in hidden)]


def one(model: nn.Module) -> MuonWithAdamW:
    hidden, rest = halves(model)
    return MuonWithAdamW(
        [
            {"params": rest, "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": hidden, "use_muon": True, "lr": 0.1, "momentum": 0.9},
        ]
    )


class Both(Optimizer):
    """As people put the two together: it calls their steps."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        given = [
            p for each in params for p in (each["params"] if isinstance(each, dict) else [each])
        ]
        super().__init__(given, {"lr": lr})
        matrices = [p for p in given if p.ndim == 2]
        rest = [p for p in given if p.ndim != 2]
        self.inside: list[Optimizer] = []
        if matrices:
            self.inside.append(torch.optim.Muon(matrices, lr=lr))
        if rest:
            self.inside.append(torch.optim.AdamW(rest, lr=lr))
        self.param_groups = [group for each in self.inside for group in each.param_groups]

    def step(self, closure: Any = None) -> Any:
        for each in self.inside:
            each.step()


class Normed(Both):
    """Looks at all parameters before it calls their steps."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        torch.nn.utils.get_total_norm([g for g in grads if g is not None])
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.div_(torch.nn.utils.get_total_norm(grads))
        super().step()


def trained(model: nn.Module, optimizers: list[Any], steps: int = 4) -> list[torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        model(torch.arange(6) + step + 3 * rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_one_optimizer_steps_as_torchs_two_do() -> None:
    model, twin = Net(), Net()
    hidden, rest = halves(twin)
    two = [
        torch.optim.Muon(hidden, lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9)),
    ]
    optimizer = one(model)
    for ours, theirs in zip(trained(model, [optimizer]), trained(twin, two), strict=True):
        assert torch.equal(ours, theirs)
    assert {tuple(sorted(state)) for state in optimizer.state.values()} == {
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq", "step"),
    }

    # Copies, pickles and state dicts go on as it does
    again = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    pickled = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    other = Net()
    other.load_state_dict(model.state_dict())
    loaded = one(other)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares tensors
    wanted = trained(model, [optimizer])
    for net, each in (again, pickled, (other, loaded)):
        assert all(map(torch.equal, trained(net, [each]), wanted))


def on_each_rank(make: Callable[[nn.Module], Any], stages: tuple[Any, ...]) -> dict[Any, Any]:
    """{stage: (the whole parameters after four steps, iterations in the last three over all ranks)}."""
    out: dict[Any, Any] = {}
    own = _muon._zeropower_via_newtonschulz
    counted = [0]

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return own(*args)

    for stage, more in stages:
        model = Net()
        onefold.shard(model, onefold.Recipe.zero(stage, **more), units=[nn.Linear])
        optimizer = make(model)
        trained(model, [optimizer], 1)  # the trial of the first step does not count
        _muon._zeropower_via_newtonschulz, counted[0] = counting, 0
        trained(model, [optimizer], 3)
        _muon._zeropower_via_newtonschulz = own
        total = torch.tensor(counted[0])
        dist.all_reduce(total)
        with onefold.full_params(model):
            out[stage, *more] = [p.detach().clone() for p in model.parameters()], int(total)
    return out


def both(model: nn.Module) -> Both:
    return Both(model.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [one, both])
def test_matrices_are_stepped_once_on_two_ranks_also_by_an_optimizer_inside(
    make: Callable[[nn.Module], Any],
) -> None:
    """`Both` would step nothing if its own parameters were taken from it and given to its owners."""
    stages = ((0, {}), (1, {}), (3, {}), (3, {"offload_optimizer": "cpu"}))
    found = run_ranks(2, on_each_rank, make, stages)[0]
    whole, count = found.pop((0,))
    matrices = sum(p.ndim == 2 for p in Net().parameters()) - (make is one)
    assert count == 2 * 3 * matrices  # at stage 0 each rank steps all
    for stage, (params, count) in found.items():
        assert count == 3 * matrices, stage
        for a, b in zip(params, whole, strict=True):
            assert torch.equal(a, b), stage


def refused() -> str:
    model = Net()
    onefold.shard(model, onefold.Recipe.zero(3), units=[nn.Linear])
    try:
        trained(model, [Normed(model.parameters())], 1)
    except ValueError as error:
        return str(error)
    return ""
