"""zero.Init, zero.GatheredParameters and the gradient accessors, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.integrations.deepspeed.names import access, divided, gathered, init, leaves, optimizers
from onefold.integrations.deepspeed.names.parameter_facts import ZeroParamStatus
from onefold.integrations.deepspeed.names.training import (
    DeepSpeedOptimizer,
    initialize,
    tidied,
)
from ranks import run_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        **more,
    }


def values(model: nn.Module) -> list[Any]:
    return [p.detach().float().tolist() for p in model.parameters()]


def written_without_a_rank(checks: bool) -> list[str]:
    """What is said of a write inside GatheredParameters on every rank, before an engine and under
    one; and whether the write was dropped.
    """
    file = config(3, zero_optimization={"stage": 3, "enable_sanity_checks": checks})
    with init.Init(config_dict_or_path=file):
        model = build()
    said = []
    for _ in range(2):
        weight = model[0].weight
        for write in (True, False):
            try:
                with gathered.GatheredParameters([weight, model[2].weight]), torch.no_grad():
                    before = weight.sum().item()
                    if write:
                        weight.add_(1.0)
            except RuntimeError as error:
                said.append(str(error))
        with gathered.GatheredParameters(weight):
            said.append(str(weight.sum().item() == before))
        with gathered.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.add_(0.0)
        initialize(model=model, config=file)
    return said


def test_a_write_that_is_dropped_raises_under_sanity_checks() -> None:
    expected = (
        "in-place modification of a parameter of shape (5, 6) inside GatheredParameters without"
        " modifier_rank, which keeps no change: give modifier_rank=0."
    )
    assert run_ranks(2, written_without_a_rank, False) == [["True", "True"]] * 2
    assert run_ranks(2, written_without_a_rank, True) == [[expected, "True"] * 2] * 2


class TakesAnother(torch.autograd.Function):
    """x @ weight.t(), whose backward gathers the weight of another model and multiplies by it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: nn.Parameter) -> Any:
        ctx.weight = weight
        with gathered.GatheredParameters([weight]):
            return torch.mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        with gathered.GatheredParameters([ctx.weight]):
            # Traced code computes with the memory of the tensor
            traced = torch.jit.trace(torch.mm, (grad.detach(), torch.ones(5, 6)))
            return traced(grad, ctx.weight), None


def gathered_in_backward(stage: int) -> tuple[float, float]:
    """The norm of a model's gradients behind a Function that uses another model: plain, sharded."""
    norms = []
    for sharded in (False, True):
        student, teacher = build(), build().requires_grad_(False)
        if sharded:
            student, teacher = (
                onefold.shard(m, onefold.Recipe.zero(stage, stall_timeout=20.0))
                for m in (student, teacher)
            )
        weight = next(iter(teacher.parameters()))
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        out = TakesAnother.apply(student(x) @ torch.ones(3, 6), weight)
        out.square().mean().backward()
        norms.append(
            float(onefold.clip_grad_norm_(student, 9e9))
            if sharded
            else float(torch.nn.utils.get_total_norm([p.grad for p in student.parameters()]))  # type: ignore[misc]
        )
    return norms[0], norms[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_pass_gathers_parameters_of_another_model(stage: int) -> None:
    for plain, sharded in run_ranks(2, gathered_in_backward, stage):
        assert sharded == pytest.approx(plain, rel=1e-6)


# -- zero.Init -------------------------------------------------------------------------------------


def held(params: list[Any]) -> int:
    """Bytes that this rank keeps of parameters that no engine has."""
    kept = [divided.values_of(p) for p in params]
    return sum(p.untyped_storage().nbytes() for p in params) + sum(
        0 if values is None else values.untyped_storage().nbytes() for values in kept
    )


def init_and_shard(precision: str | None) -> dict[str, Any]:
    given = config(3, **({precision: {"enabled": True}} if precision else {}))
    with init.Init(config_dict_or_path={**given, "train_batch_size": "auto"}):
        torch.manual_seed(dist.get_rank())  # the ranks would differ
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    made = list(model.parameters())
    out: dict[str, Any] = {
        "dtypes": {str(p.dtype) for p in made},
        "bytes": held(made),
        "shapes": [tuple(p.shape) for p in made],
    }
    with gathered.GatheredParameters(set(made)):
        out["gathered"] = values(model)
        with gathered.GatheredParameters(made[0], modifier_rank=1):  # inside another: it is written
            if dist.get_rank() == 1:
                made[0].data.fill_(0.5)
        out["inside"] = made[0].mean().item()
    out["after"] = held(made)
    with gathered.GatheredParameters(made[1], modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.constant_(made[1], 2.0)
    engine, *_ = initialize(model=model, config=given)
    out["same"] = all(a is b for a, b in zip(made, engine.module.parameters(), strict=True))
    with gathered.GatheredParameters(engine.module):
        out["sharded"] = values(engine.module)
    return out


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_made_under_init_is_divided_until_it_is_gathered(precision: str | None) -> None:
    first, second = run_ranks(2, init_and_shard, precision)
    size = 2 if precision else 4
    assert first["dtypes"] == {"torch.bfloat16" if precision else "torch.float32"}
    # Half of each, rounded up, and one element of each
    expected = size * (15 + 3 + 8 + 2 + 4)
    assert {seen[at] for seen in (first, second) for at in ("bytes", "after")} == {expected}
    assert first["shapes"] == second["shapes"] == [(5, 6), (5,), (3, 5), (3,)]
    assert first["gathered"] == second["gathered"]
    assert first["inside"] == second["inside"] == 0.5
    assert first["same"] and second["same"]
    assert first["sharded"] == second["sharded"]
    assert first["sharded"][1] == [2.0] * 5 and first["sharded"][2] == first["gathered"][2]


# -- zero.GatheredParameters -----------------------------------------------------------------------


def change_what_is_sharded(stage: int) -> dict[str, Any]:
    model = build()
    engine, *_ = initialize(model=model, config=config(stage))
    weight, bias = model[0].weight, model[0].bias
    plain = nn.Parameter(torch.ones(2))
    before = access.safe_get_full_fp32_param(weight).tolist()
    out: dict[str, Any] = {}
    with gathered.GatheredParameters([weight, plain]):  # read only
        assert isinstance(weight, nn.Parameter) and tuple(weight.shape) == (5, 6)
        out["read"] = weight.detach().tolist() == before
        weight.data.fill_(7.0)
    out["dropped"] = access.safe_get_full_fp32_param(weight).tolist() == before
    with gathered.GatheredParameters([weight, bias], modifier_rank=1):
        if dist.get_rank() == 1:
            with torch.no_grad():
                weight.copy_(torch.arange(30.0).view(5, 6))
                bias.fill_(-1.0)
    out["weight"] = access.safe_get_full_fp32_param(weight).tolist()
    # The forward pass sees what was written
    with torch.no_grad():
        out["forward"] = engine(torch.ones(2, 6)).tolist()
        out["expected"] = model_of(out["weight"])(torch.ones(2, 6)).tolist()
    loss = engine(torch.ones(2, 6)).square().mean()
    engine.backward(loss)
    engine.step()
    with gathered.GatheredParameters(weight, modifier_rank=0, enabled=False):
        pass
    try:
        with gathered.GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(2, 2)
    except ValueError as error:
        out["shape"] = str(error)
    return out


def model_of(weight: Any) -> nn.Module:
    model = build()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(weight))
        model[0].bias.fill_(-1.0)
    return model


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_keep_the_modifiers_values_and_drop_others(stage: int) -> None:
    for seen in run_ranks(2, change_what_is_sharded, stage):
        assert seen["read"] and seen["dropped"]
        assert seen["weight"] == torch.arange(30.0).view(5, 6).tolist()
        torch.testing.assert_close(
            torch.tensor(seen["forward"]), torch.tensor(seen["expected"]), rtol=1e-5, atol=1e-5
        )
        assert "was given shape (2, 2)" in seen["shape"]


def use_a_model_that_is_gathered() -> dict[str, Any]:
    """As TRL generates, and as scripts save what may be divided."""
    model = build()
    engine, optimizer, _, _ = initialize(model=model, config=config(3, bf16={"enabled": True}))
    weight, batch = model[0].weight, torch.ones(2, 6)
    out: dict[str, Any] = {"status": [weight.ds_status], "forward": engine(batch).tolist()}

    def maybe_gathered(param: Any) -> Any:
        """The idiom of many scripts."""
        if hasattr(param, "ds_id"):
            assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
            with gathered.GatheredParameters([param]):
                return param.data.detach().cpu().clone()
        return param.detach().cpu().clone()

    out["saved"] = maybe_gathered(weight).tolist()
    out["master"] = access.safe_get_full_fp32_param(weight).tolist()
    with gathered.GatheredParameters(model.parameters()):
        offload = optimizer.parameter_offload
        assert offload.module is model and not model[0].ds_external_parameters()
        for _, param in offload.module.named_parameters():
            param.ds_active_sub_modules.clear()
        out["status"].append(weight.ds_status)
        out["inside"] = [str(weight.dtype), tuple(weight.data.shape)]
        for _ in range(3 * (dist.get_rank() + 1)):  # texts of different lengths
            with torch.no_grad():
                out["generated"] = engine(batch.bfloat16()).tolist()
        out["state"] = [str(v.dtype) for v in model.state_dict().values()]
        try:
            engine.backward(engine(batch.bfloat16()).float().square().mean())
        except RuntimeError as error:
            out["backward"] = str(error)
        if not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()
        offload._register_deepspeed_module(offload.module)
    out["status"].append(weight.ds_status)
    assert model[0].weight is weight and not weight.grad
    engine.backward(engine(batch).square().mean())
    engine.step()
    out["trained"] = access.safe_get_full_fp32_param(weight).tolist() != out["master"]
    return out


def test_a_model_that_is_gathered_as_a_whole_computes_without_the_other_ranks() -> None:
    for seen in run_ranks(2, use_a_model_that_is_gathered):
        divided, whole = ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.AVAILABLE
        assert seen["status"] == [divided, whole, divided]
        assert seen["saved"] == seen["master"]
        assert seen["inside"] == ["torch.bfloat16", (5, 6)] and set(seen["state"]) == {
            "torch.bfloat16"
        }
        assert seen["generated"] == seen["forward"]
        assert "a context that gathers the whole model" in seen["backward"] and seen["trained"]


def take_over(stages: list[int]) -> list[Any]:
    """One model, and an engine for each stage, one after another; the last one trains."""
    model = build()
    out: list[Any] = []
    for stage in stages:
        engine, *_ = initialize(
            model=model, model_parameters=model.parameters(), config=config(stage)
        )
        with torch.no_grad():
            out.append(engine(torch.ones(2, 6)).tolist())
        assert engine.zero_optimization_stage() == stage
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    engine.step()
    return [*out, [access.safe_get_full_fp32_param(p).tolist() for p in model.parameters()]]


def test_a_model_is_taken_over_from_another_engine() -> None:
    first, *_ = run_ranks(2, take_over, [3])
    for stages in ([3, 3], [0, 3], [3, 2, 3]):
        seen, *_ = run_ranks(2, take_over, stages)
        assert seen == [first[0]] * len(stages) + [first[-1]], stages


# -- accessors -------------------------------------------------------------------------------------


def access_everything(stage: int) -> dict[str, Any]:
    model = build()
    plain = build()
    engine, optimizer, _, _ = initialize(model=model, config=config(stage))
    batch = torch.arange(12.0).view(2, 6) + dist.get_rank()
    engine.backward(engine(batch).square().mean())
    both = torch.cat([torch.arange(12.0).view(2, 6), torch.arange(12.0).view(2, 6) + 1])
    plain(both).square().mean().backward()
    out: dict[str, Any] = {"optimizer": isinstance(optimizer, DeepSpeedOptimizer)}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(access.safe_get_full_grad(mine), theirs.grad)
        local = access.safe_get_local_grad(mine)
        assert local is None or local.dim() == 1
        assert access.safe_get_full_optimizer_state(mine, "exp_avg") is None
    first = next(iter(model.parameters()))
    access.safe_set_full_grad(first, torch.ones(5, 6))
    out["grad"] = access.safe_get_full_grad(first).unique().tolist()
    engine.step()
    out["moment"] = access.safe_get_full_optimizer_state(first, "exp_avg").tolist()
    access.safe_set_full_optimizer_state(first, torch.full((5, 6), 0.25), "exp_avg")
    out["set"] = access.safe_get_full_optimizer_state(first, "exp_avg").unique().tolist()
    access.safe_set_full_fp32_param(first, torch.full((5, 6), 3.0))
    out["param"] = access.safe_get_full_fp32_param(first).unique().tolist()
    out["local"] = access.safe_get_local_fp32_param(first).numel()
    return out


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_masters_and_states_are_read_and_written_whole(stage: int) -> None:
    seen = run_ranks(2, access_everything, stage)
    for one in seen:
        assert one["optimizer"] and one["grad"] == [1.0]
        # clipped to no norm: 0.1 of the gradient
        assert torch.tensor(one["moment"]).unique().tolist() == pytest.approx([0.1])
        assert one["set"] == [0.25] and one["param"] == [3.0]
    held = [one["local"] for one in seen]
    assert held == [30, 30] if stage == 0 else sum(held) == 30


# -- on one rank -----------------------------------------------------------------------------------


def test_what_arrives_in_odd_forms_is_made_regular_and_the_callers_dict_is_left() -> None:
    given = {
        "zero_optimization.reduce_bucket_size": 4096,
        "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 0.5e3},
    }
    kept = repr(given)
    assert tidied(given) == {
        "zero_optimization.stage3_prefetch_bucket_size": 3686.4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 0.5e3},
    }
    assert repr(given) == kept


def test_a_reference_model_needs_no_optimizer_and_open_values_may_stay() -> None:
    open_values = {
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
    }
    engine, optimizer, loader, schedule = initialize(model=build(), config=open_values)
    assert (optimizer, loader, schedule) == (None, None, None) and engine.module.training
    assert engine.config["zero_optimization"]["stage"] == 3
    assert engine.zero_gather_16bit_weights_on_model_save()
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr"):
        initialize(
            model=(model := build()), model_parameters=model.parameters(), config=open_values
        )


def test_optimizers_of_the_host_are_torchs_and_take_its_groups() -> None:
    params = [nn.Parameter(torch.ones(3))]
    given = torch.optim.AdamW(params, lr=0.1, weight_decay=0.2).param_groups
    made = optimizers.DeepSpeedCPUAdam(given, lr=0.1, weight_decay=0.2, adamw_mode=True)
    assert type(made) is torch.optim.AdamW and made.param_groups[0]["weight_decay"] == 0.2
    assert type(optimizers.DeepSpeedCPUAdam(params, adamw_mode=False)) is torch.optim.Adam
    assert type(optimizers.DeepSpeedCPUAdagrad(given)) is torch.optim.Adagrad
    with pytest.raises(NotImplementedError, match="always corrects"):
        optimizers.DeepSpeedCPUAdam(params, bias_correction=False)
    lion = optimizers.DeepSpeedCPULion(params, lr=0.5, betas=(0.9, 0.99))
    params[0].grad = torch.tensor([1.0, -2.0, 0.0])
    lion.step()
    assert params[0].tolist() == [0.5, 1.5, 1.0]


def trained_with_a_leaf(marked: bool) -> list[Any]:
    """Weights after two steps of a model whose inputs take no gradient, and which is one leaf."""
    model = build()
    if marked:
        leaves.set_z3_leaf_modules(model, [nn.Sequential])
    engine = initialize(model=model, config=config(3))[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        engine.step()
    return [access.safe_get_full_fp32_param(p).tolist() for p in model.parameters()]


def test_a_leaf_module_trains_though_its_inputs_take_no_gradient() -> None:
    plain, *others = (run_ranks(2, trained_with_a_leaf, marked) for marked in (False, True))
    assert others == [plain] and plain[0] == plain[1]


def test_leaf_modules_are_noted_where_libraries_look() -> None:
    model = build()
    assert leaves.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2]]
    assert leaves.get_z3_leaf_modules(model) == [model[0], model[2]] and model[0]._z3_leaf
    assert leaves.unset_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2]]
    assert not leaves.get_z3_leaf_modules(model)
    with pytest.raises(ValueError, match="the model has none such"):
        leaves.set_z3_leaf_modules(model, ["Attention"])
