"""An optimizer is never silently different: it trains as under DDP, by shards or by whole parameters, or
it is refused before it changes a weight. Its states are those that the plan counts.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from on_ranks import on_ranks, slow
from onefold.recipe.optimizers import KNOWN, PLANNED
from optim.optimizers import ELEMENTWISE, TOGETHER, WHOLE, Looking
from reference import NEAR, built, ddp, differences, train, weights
from zoo import TinyMLP, features_of

#: Those whose code differs most from one another; the rest trains with `--all`.
IN_CI = {
    "SGD, Nesterov", "AdamW, fused", "RMSprop", "Adagrad", "Lion of one's own", "AdamW of schedulefree", "Adafactor", "Muon",
    "rows of one's own", "a norm from the second step on",
}  # fmt: skip
INSTALLED = [n for n, r in KNOWN.items() if r.module and importlib.util.find_spec(r.module)]


def batches() -> list[Any]:
    return [features_of(10 * step + dist.get_rank(), 4, 7) for step in range(4)]


def sharded(stage: int) -> nn.Module:
    return onefold.shard(built(TinyMLP), onefold.Recipe.zero(stage, stall_timeout=20.0))


def trained(model: nn.Module, make: Any) -> tuple[list[float], dict[str, Any]]:
    return train(model, make(model.parameters()), batches()), weights(model)


@on_ranks(2)
@pytest.mark.parametrize(
    "name", [n if n in IN_CI else pytest.param(n, marks=slow) for n in [*ELEMENTWISE, *WHOLE]]
)
def test_optimizers_train_as_in_ddp_at_every_stage(name: str) -> None:
    make = {**ELEMENTWISE, **WHOLE}[name]
    losses, expected = trained(ddp(built(TinyMLP)), make)
    first = trained(sharded(0), make)
    assert first[0] == pytest.approx(losses, rel=1e-5)
    assert differences(expected, first[1], **NEAR) == []
    for stage in (1, 2, 3):
        found = trained(sharded(stage), make)
        # A sum over a row has other bits where the row lies at another address
        near = NEAR if name in WHOLE else {}
        assert found[0] == pytest.approx(first[0], rel=near.get("rtol", 0), abs=0)
        assert differences(first[1], found[1], **near) == []


@on_ranks(2)
@pytest.mark.parametrize("name", TOGETHER)
def test_other_optimizers_are_refused_before_they_change_a_weight(name: str) -> None:
    for stage in (1, 2, 3):
        model = sharded(stage)
        before = weights(model)
        optimizer = TOGETHER[name](model.parameters())

        def closure(model: nn.Module = model) -> Any:
            loss = model(batches()[0]).square().mean()
            loss.backward()
            return loss

        closure()
        with pytest.raises(ValueError) as caught:
            optimizer.step(closure) if name == "LBFGS" else optimizer.step()
        for words in (name, "stage 0", "elementwise_optimizer"):
            assert words in str(caught.value)
        assert differences(before, weights(model)) == []


@on_ranks(2)
def test_they_train_as_in_ddp_where_parameters_are_whole() -> None:
    losses, expected = trained(ddp(built(TinyMLP)), TOGETHER["Prodigy"])
    found = trained(sharded(0), TOGETHER["Prodigy"])
    assert found[0] == pytest.approx(losses, rel=1e-4)
    assert differences(expected, found[1], 1e-4, 1e-5) == []


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_closures_tensor_rates_and_optimizers_from_before_shard_work(stage: int) -> None:
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

    plain = ddp(built(TinyMLP))
    expected = steps(plain, adamw(plain))
    inner = built(TinyMLP)
    early = adamw(inner)
    onefold.shard(inner, onefold.Recipe.zero(stage))
    assert differences(expected, steps(inner, early), **NEAR) == []
    late = sharded(stage)
    assert differences(weights(inner), steps(late, adamw(late))) == []


# -- groups of one optimizer -----------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_groups_of_one_optimizer_may_look_at_different_things(stage: int) -> None:
    def groups(model: nn.Module) -> Any:
        looks = {2: "parameter", 1: "element"}
        return Looking([{"params": [p], "looks_at": looks[p.dim()]} for p in model.parameters()])

    plain, model = ddp(built(TinyMLP)), sharded(stage)
    train(plain, groups(plain), batches())
    train(model, groups(model), batches())
    assert differences(weights(plain), weights(model), 1e-4, 1e-5) == []


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_group_that_nobody_steps_refuses_the_optimizer_before_its_closure(stage: int) -> None:
    model = sharded(stage)
    optimizer = Looking([{"params": [p for p in model.parameters() if p.dim() == 1]}])
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer.add_param_group({"params": matrices, "looks_at": "all"})
    before, calls = weights(model), []

    def closure() -> Any:
        calls.append(1)
        loss = model(batches()[0]).square().mean()
        loss.backward()
        return loss

    closure()
    with pytest.raises(ValueError, match=r"Looking cannot step.*with a group's looks_at='all'"):
        optimizer.step(closure)
    assert calls == [1] and differences(before, weights(model)) == []


class Reducing(Looking):
    """It adds the gradients of all ranks up by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        return super().step(closure)


@on_ranks(2)
def test_a_step_that_communicates_is_refused_and_sends_nothing_in_its_trial() -> None:
    model = sharded(2)
    optimizer = Reducing(model.parameters(), looks_at="parameter")
    model(batches()[0]).square().mean().backward()
    with pytest.raises(ValueError, match="communicates by itself"):
        optimizer.step()


# -- the table of known optimizers -----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PLANNED if name in INSTALLED])
@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 3, 4)])
def test_an_optimizer_keeps_the_states_that_the_plan_counts(
    name: str, shape: tuple[int, ...]
) -> None:
    row = PLANNED[name]
    if row.matrices and len(shape) != 2:
        return  # another row steps it
    for package in (True, False):
        param = nn.Parameter(torch.arange(24.0).view(shape))
        optimizer = row.load(package)([param], lr=0.1, **row.arguments)
        param.grad = torch.linspace(-1, 2, 24).view(shape)
        optimizer.step()
        kept = {k: v for k, v in optimizer.state[param].items() if isinstance(v, torch.Tensor)}
        counted = {each.key: each.numel(shape) for each in row.states if each.numel(shape)}
        assert counted == {key: value.numel() for key, value in kept.items() if key in counted}
        assert counted.keys() == kept.keys()
        nbytes = sum(value.nbytes for value in kept.values())
        assert nbytes == row.tensor_bytes(shape, 4) + row.number_bytes


@pytest.mark.parametrize("name", [name for name in INSTALLED if KNOWN[name].builtin])
def test_a_built_in_class_steps_as_the_package_does(name: str) -> None:
    same, found = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}, []
    for package in (True, False):
        param = nn.Parameter(torch.arange(12.0).view(3, 4))
        optimizer = KNOWN[name].load(package)([param], **same)
        for step in range(3):
            param.grad = torch.linspace(-1, 2, 12).view(3, 4) * (1 - step)
            optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found)
