"""An optimizer is never silently different: it trains as under DDP, by shards or by whole parameters
(test_whole.py), or it is refused before it changes a weight. Its states are those that the plan
counts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import looks
import onefold
from on_ranks import on_ranks, slow
from onefold.memory import TierError
from onefold.recipe.optimizers import KNOWN, PLANNED
from optim.optimizers import ELEMENTWISE, REFUSED
from reference import NEAR, built, ddp, differences, train, weights
from zoo import TinyMLP, features_of

#: Those whose code differs most from one another; the rest trains with `--all`.
IN_CI = {
    "SGD, Nesterov", "AdamW, fused", "Lion of one's own", "AdamW of schedulefree",
    "Adam and SGD inside another", "every second step of another",
}  # fmt: skip
INSTALLED = [n for n, r in KNOWN.items() if r.module and importlib.util.find_spec(r.module)]


def mlp() -> nn.Module:
    return TinyMLP(width=40)


def batches() -> list[Any]:
    return [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(4)]


def sharded(stage: int, **options: Any) -> nn.Module:
    return onefold.shard(built(mlp), onefold.Recipe.zero(stage, stall_timeout=20.0, **options))


def trained(model: nn.Module, make: Any) -> tuple[list[float], dict[str, Any]]:
    return train(model, make(model.parameters()), batches()), weights(model)


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=slow) for n in ELEMENTWISE]
)
def test_optimizers_train_as_in_ddp_at_every_stage(name: str, folder: Path) -> None:
    make = ELEMENTWISE[name]
    losses, expected = trained(ddp(built(mlp)), make)
    first = trained(sharded(0), make)
    assert first[0] == pytest.approx(losses, rel=1e-5)
    assert differences(expected, first[1], **NEAR) == []
    tiers: list[dict[str, Any]] = [{"stage": stage} for stage in (1, 2, 3)]
    if "rates" in name:
        tiers.append({"stage": 2, "offload_optimizer": "cpu"})
        model = sharded(3, offload_optimizer="nvme", nvme=folder)
        looks.step_in_pieces_of(model, 1024)
        with pytest.raises(TierError, match=r"keep it in self\.state"):  # it counts by parameters
            trained(model, make)
    for tier in tiers:
        model = sharded(**tier)
        looks.step_in_pieces_of(model, 1024)
        found = trained(model, make)
        assert found[0] == first[0] and differences(first[1], found[1]) == [], tier


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_before_they_change_a_weight(name: str) -> None:
    make, words = REFUSED[name]
    for stage in (1, 3):
        model, calls = sharded(stage), []
        before, optimizer = weights(model), make(model.parameters())

        def closure(model: nn.Module = model, calls: list[int] = calls) -> Any:
            calls.append(1)
            loss = model(batches()[0]).square().mean()
            loss.backward()
            return loss

        closure()
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.step(closure)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert len(calls) == 1 and differences(before, weights(model)) == []


@on_ranks(2)
def test_they_train_as_in_ddp_where_parameters_are_whole() -> None:
    make = REFUSED["Prodigy"][0]
    losses, expected = trained(ddp(built(mlp)), make)
    found = trained(sharded(0), make)
    assert found[0] == pytest.approx(losses, rel=1e-4)
    assert differences(expected, found[1], 1e-4, 1e-5) == []


@on_ranks(2)
def test_closures_tensor_rates_and_optimizers_from_before_shard_work() -> None:
    def steps(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        for number, batch in enumerate(batches()):
            optimizer.param_groups[0]["lr"].fill_(0.01 / (number + 1))

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return weights(model)

    def adamw(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), eps=1e-4)

    plain = ddp(built(mlp))
    expected = steps(plain, adamw(plain))
    for stage in (0, 1, 2, 3):
        inner = built(mlp)
        early = adamw(inner)
        onefold.shard(inner, onefold.Recipe.zero(stage))
        assert differences(expected, steps(inner, early), **NEAR) == []
        late = sharded(stage)
        assert differences(weights(inner), steps(late, adamw(late))) == []


# -- the table of known optimizers -----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PLANNED if name in INSTALLED])
@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)])
def test_an_optimizer_keeps_the_states_that_the_plan_counts(
    name: str, shape: tuple[int, ...]
) -> None:
    row = PLANNED[name]
    if row.rest and len(shape) != 2:
        return  # another row steps it
    param = nn.Parameter(torch.arange(24.0).view(shape))
    optimizer = row.load()([param], lr=0.1, **row.arguments)
    param.grad = torch.linspace(-1, 2, 24).view(shape)
    optimizer.step()
    kept = {k: v for k, v in optimizer.state[param].items() if isinstance(v, torch.Tensor)}
    counted = {each.key: each.numel(shape) for each in row.states if each.numel(shape)}
    assert counted == {key: value.numel() for key, value in kept.items() if key in counted}
    assert counted.keys() == kept.keys()
    nbytes = sum(value.nbytes for value in kept.values())
    assert nbytes == row.tensor_bytes(shape, 4) + row.number_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"moments": "int8"},
        {"moments": "bf16"},
        {"precision": "bf16", "master_dtype": "bf16", "stochastic_rounding": True},
    ],
    ids=str,
)
def test_a_parameter_without_dimensions_keeps_stored_moments(options: dict[str, Any]) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Any) -> Any:
            return (self.scale * x).sum()

    models = [Scale(), onefold.shard(Scale(), onefold.Recipe.zero(0, **options))]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(features_of(step, 4)).backward()
            optimizer.step()
    plain, found = (model.scale.detach().float() for model in models)
    assert found.shape == () and torch.allclose(found, plain, atol=0.02) and found != 1.0
