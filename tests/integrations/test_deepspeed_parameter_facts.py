"""What scripts read from parameters under `zero.Init` and at stage 3: `ds_status`, `ds_tensor`, ..."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.integrations.deepspeed.names import access, gathered, init
from onefold.integrations.deepspeed.names.parameter_facts import ZeroParamStatus
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
}
WHOLE, DIVIDED = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE


class Own(nn.Parameter):
    """A parameter of a class of its own, with a mark that counts writes of an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mark":
            object.__setattr__(self, "marks", getattr(self, "marks", 0) + 1)
        super().__setattr__(name, value)


class Net(nn.Module):
    """Tells what a status is in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 2)
        self.own = Own(torch.arange(3.0))
        self.statuses: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.own
        self.statuses.append((self.first.weight.ds_status, self.first.weight.ds_numel))
        return self.second(hidden)


# -- under zero.Init -------------------------------------------------------------------------------


def facts_under_init() -> dict[str, Any]:
    with init.Init(config_dict_or_path=CONFIG):
        torch.manual_seed(0)
        layer, other = nn.Linear(5, 3), nn.Linear(2, 2)
    plain = nn.Linear(2, 2)
    weight = layer.weight
    part = math.ceil(15 / dist.get_world_size())
    out: dict[str, Any] = {
        "ids": [p.ds_id for p in (*layer.parameters(), *other.parameters())],
        "status": [weight.ds_status],
        "shape": (tuple(weight.ds_shape), weight.ds_numel, weight.ds_summary()["ds_numel"]),
        "plain": [hasattr(plain.weight, name) for name in ("ds_status", "ds_tensor", "ds_id")],
        "part": weight.ds_tensor.tolist(),
        "group": dist.get_world_size(weight.ds_process_group),
        "persist": weight.ds_persist,
    }
    assert weight.ds_tensor.shape == (part,)
    with gathered.GatheredParameters(weight):
        out["status"].append(weight.ds_status)
        out["whole"] = weight.detach().flatten().tolist()
        out["inside"] = weight.ds_tensor.shape == (part,)
    out["status"].append(weight.ds_status)
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor, 1.0 + dist.get_rank())
    weight.all_gather()
    out["status"].append(weight.ds_status)
    out["written"] = weight.detach().flatten().tolist()
    with torch.no_grad():
        weight.fill_(7.0)
    weight.partition(has_been_updated=True)
    handle = weight.all_gather_coalesced([weight, layer.bias])
    handle.wait()
    out["kept"] = weight.detach().flatten().tolist()
    weight.partition([weight, layer.bias])
    out["status"].append(weight.ds_status)
    with pytest.raises(ValueError, match="the elements that this rank has"):
        weight.ds_tensor.data = torch.zeros(1)
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_made_under_init_tells_its_facts(ranks: int) -> None:
    torch.manual_seed(0)
    values = nn.Linear(5, 3).weight.detach().flatten()
    for rank, seen in enumerate(run_ranks(ranks, facts_under_init)):
        assert len(set(seen["ids"])) == 4
        assert seen["status"] == [DIVIDED, WHOLE, DIVIDED, WHOLE, DIVIDED]
        assert seen["shape"] == ((3, 5), 15, 15)
        assert seen["plain"] == [False, False, False]
        each = math.ceil(15 / ranks)
        mine = values[rank * each : (rank + 1) * each].tolist()
        assert seen["part"][: len(mine)] == mine and seen["whole"] == values.tolist()
        assert seen["group"] == ranks and seen["persist"] is (ranks == 1) and seen["inside"]
        assert seen["written"] == [1.0 + i // each for i in range(15)]
        assert seen["kept"] == [7.0] * 15


def skipped_inits() -> list[Any]:
    with init.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(
            nn.utils.skip_init(nn.Linear, 5, 3),
            nn.Linear(3, 3),
            nn.utils.skip_init(nn.Linear, 3, 1),
        )
    out = [(p.ds_numel, p.ds_tensor.numel(), p.ds_status.name) for p in model.parameters()]
    with gathered.GatheredParameters(model.parameters(), modifier_rank=0):
        if dist.get_rank() == 0:
            for param in model.parameters():
                nn.init.ones_(param)
    engine, *_ = initialize(model=model, config=CONFIG)
    return [*out, engine(torch.ones(1, 5)).item()]


def test_parameters_whose_initialization_is_skipped_are_divided_too() -> None:
    sizes = [15, 3, 9, 3, 3, 1]
    expected = [(n, math.ceil(n / 2), "NOT_AVAILABLE") for n in sizes]
    assert run_ranks(2, skipped_inits) == [[*expected, 3 * (3 * 6 + 1) + 1]] * 2


# -- of an engine ----------------------------------------------------------------------------------


def facts_of_an_engine(under_init: bool) -> dict[str, Any]:
    with init.Init(config_dict_or_path=CONFIG, enabled=under_init):
        model = Net()
    ids = [p.ds_id for p in model.parameters()] if under_init else []
    engine, *_ = initialize(model=model, config=CONFIG)
    params = list(model.parameters())
    assert not ids or ids == [p.ds_id for p in params]
    weight = model.first.weight
    out: dict[str, Any] = {"status": [weight.ds_status], "class": isinstance(model.own, Own)}
    model.own.mark = 1
    model.own.mark = 2
    out["marks"] = model.own.marks
    parts = [p.ds_tensor for p in params]
    out["parts"] = [part.numel() for part in parts]
    for param, part in zip(params, parts, strict=True):
        assert torch.equal(part, access.safe_get_local_fp32_param(param))
    before = [access.safe_get_full_fp32_param(p).clone() for p in params]
    for param in params:
        param.ds_tensor.mul_(2)
        param.ds_tensor.data = param.ds_tensor * 2
    with gathered.GatheredParameters(params):
        out["status"].append(weight.ds_status)
        for param, was in zip(params, before, strict=True):
            assert torch.equal(param, 4 * was)
    out["loss"] = engine(torch.ones(1, 5)).sum().item()
    out["in the pass"] = model.statuses
    out["status"].append(weight.ds_status)
    engine.backward(engine(torch.ones(1, 5)).square().mean())
    engine.step()
    out["trained"] = [access.safe_get_full_fp32_param(p).tolist() for p in params]
    return out


def plainly() -> tuple[float, list[Any]]:
    """The same without an engine. The second layer's own status is not asked for."""
    model = nn.Sequential()
    torch.manual_seed(0)
    first, second, own = nn.Linear(5, 3), nn.Linear(3, 2), nn.Parameter(torch.arange(3.0))
    params = [own, *first.parameters(), *second.parameters()]
    del model
    with torch.no_grad():
        for param in params:
            param.mul_(4)
    loss = second(first(torch.ones(1, 5)) * own).sum().item()
    second(first(torch.ones(1, 5)) * own).square().mean().backward()
    torch.optim.SGD(params, lr=0.1).step()
    return loss, [p.tolist() for p in params]


@pytest.mark.parametrize("under_init", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_of_an_engine_tells_its_facts_and_keeps_what_is_written(
    ranks: int, under_init: bool
) -> None:
    loss, trained = plainly()
    found = run_ranks(ranks, facts_of_an_engine, under_init)
    for seen in found:
        assert seen["status"] == [DIVIDED, WHOLE, DIVIDED]
        assert seen["class"] and seen["marks"] == 2
        assert seen["in the pass"] == [(WHOLE, 15)] * 2
        assert seen["loss"] == pytest.approx(loss, rel=1e-5)
        for mine, theirs in zip(seen["trained"], trained, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))
    assert [sum(counts) for counts in zip(*(s["parts"] for s in found), strict=True)] == [
        3, 15, 3, 6, 2,
    ]  # fmt: skip


def numbers_of_two_models() -> list[int]:
    found = []
    for _ in range(2):
        initialize(model=(model := nn.Linear(4, 4)), config=CONFIG)
        found += [p.ds_id for p in model.parameters()]
    return found


def test_the_numbers_of_two_models_differ_and_are_the_same_on_all_ranks() -> None:
    first, second = run_ranks(2, numbers_of_two_models)
    assert first == second and len(set(first)) == 4


def below_stage_3() -> list[bool]:
    with init.Init(config_dict_or_path=CONFIG):
        model = nn.Linear(4, 4)
    found = []
    for stage in (3, 1):
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        initialize(model=model, config=config)
        names = ("ds_id", "ds_status", "ds_tensor", "ds_shape")
        found += [hasattr(model.weight, name) for name in names]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_goes_on_below_stage_3_has_none_of_these_facts(ranks: int) -> None:
    assert run_ranks(ranks, below_stage_3) == [[True] * 4 + [False] * 4] * ranks


def nested_inits() -> list[bool]:
    with init.Init(config_dict_or_path=CONFIG):
        with init.Init(config_dict_or_path=CONFIG):
            inner = nn.Linear(4, 4)
        has = hasattr(inner.weight, "ds_id")
        engine, *_ = initialize(model=inner, config=CONFIG)
        second = nn.Linear(4, 4)
    return [has, hasattr(engine.module.weight, "ds_id"), hasattr(second.weight, "ds_id")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_may_be_made_inside_an_init(ranks: int) -> None:
    assert run_ranks(ranks, nested_inits) == [[True] * 3] * ranks
