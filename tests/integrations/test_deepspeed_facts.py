"""What scripts read of parameters and optimizers at stage 3 under DeepSpeed's names, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.integrations.deepspeed.names import access, gathered, init
from onefold.integrations.deepspeed.names.lr_schedules import OneCycle, WarmupLR
from onefold.integrations.deepspeed.names.optimizer_kinds import (
    BF16_Optimizer,
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    FP16_Optimizer,
)
from onefold.integrations.deepspeed.names.optimizers import DeepSpeedCPUAdam, FusedAdam
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks


def build() -> nn.Sequential:
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


def batch() -> torch.Tensor:
    return torch.arange(12.0).view(2, 6) / 10 + (dist.get_rank() if dist.is_initialized() else 0)


# -- parameters ------------------------------------------------------------------------------------


def facts_of(params: list[Any]) -> list[Any]:
    return [
        (
            p.ds_id,
            tuple(p.ds_shape),
            p.ds_numel,
            p.ds_status.name,
            p.ds_persist,
            p.ds_tensor.numel(),
        )
        for p in params
    ]


def before_and_after() -> dict[str, Any]:
    with init.Init():
        model = build()
    params: list[Any] = list(model.parameters())
    out: dict[str, Any] = {
        "made": facts_of(params),
        "parts": [p.ds_tensor.tolist() for p in params],
    }
    out["summary"] = params[0].ds_summary()
    with gathered.GatheredParameters(params[0]):
        out["inside"] = params[0].ds_status.name, params[0].ds_numel, params[0].numel()
    out["again"] = params[0].ds_status.name
    params[1].ds_tensor.fill_(2.0)
    params[3].ds_tensor.data = torch.full_like(params[3].ds_tensor, 3.0)
    engine, *_ = initialize(model=model, config=config(3))
    out["engine"] = facts_of(params)
    out["written"] = [
        access.safe_get_full_fp32_param(p).unique().tolist() for p in (params[1], params[3])
    ]
    params[2].ds_tensor.fill_(0.5)
    params[1].ds_tensor.data = torch.full_like(params[1].ds_tensor, 0.25)
    with gathered.GatheredParameters(params):
        out["computed with"] = params[2].unique().tolist(), params[1].unique().tolist()
    with torch.no_grad():
        out["loss"] = engine(batch()).square().mean().item()
    return out


def test_parameters_say_their_shape_status_and_part_before_and_in_an_engine() -> None:
    seen = run_ranks(2, before_and_after)
    wholes = [p.detach().reshape(-1) for p in build().parameters()]
    shapes = [(5, 6), (5,), (3, 5), (3,)]
    for rank, one in enumerate(seen):
        ids = [fact[0] for fact in one["made"]]
        assert len(set(ids)) == 4 and ids == [fact[0] for fact in seen[0]["made"]]
        for fact, part, shape, whole in zip(one["made"], one["parts"], shapes, wholes, strict=True):
            each = -(-whole.numel() // 2)
            assert fact[1:] == (shape, whole.numel(), "NOT_AVAILABLE", False, each)
            mine = whole[rank * each : (rank + 1) * each]
            assert part[: mine.numel()] == mine.tolist()
        assert one["inside"] == ("AVAILABLE", 30, 30) and one["again"] == "NOT_AVAILABLE"
        assert one["summary"]["ds_shape"] == (5, 6) and one["summary"]["ds_tensor.shape"] == (15,)
        assert [fact[1:5] for fact in one["engine"]] == [
            (shape, whole.numel(), "NOT_AVAILABLE", False)
            for shape, whole in zip(shapes, wholes, strict=True)
        ]
        assert one["written"] == [[2.0], [3.0]]
        assert one["computed with"] == ([0.5], [0.25])
    held = [[fact[5] for fact in one["engine"]] for one in seen]
    assert [a + b for a, b in zip(*held, strict=True)] == [30, 5, 15, 3]
    # The model computes with what was written
    plain = build()
    with torch.no_grad():
        for p, value in zip(list(plain.parameters())[1:], (0.25, 0.5, 3.0), strict=True):
            p.fill_(value)
        for rank, one in enumerate(seen):
            x = torch.arange(12.0).view(2, 6) / 10 + rank
            assert one["loss"] == pytest.approx(plain(x).square().mean().item(), rel=1e-6)


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


def of_another_class() -> dict[str, Any]:
    with init.Init():
        model = build()
        model[0].bias = Marked(torch.arange(5.0))
    own: Any = model[0].bias
    out = {"made": (type(own).__name__, own.ds_status.name, own.ds_persist, tuple(own.ds_shape))}
    engine, *_ = initialize(model=model, config=config(3))
    out["engine"] = own.ds_status.name, own.ds_persist, tuple(own.ds_shape)
    engine.backward(engine(batch()).square().mean())
    engine.step()
    out["trained"] = access.safe_get_full_fp32_param(own).tolist() != list(range(5))
    return out


def test_a_parameter_of_another_class_stays_whole_until_an_engine_divides_it() -> None:
    for one in run_ranks(2, of_another_class):
        assert one["made"] == ("Marked", "AVAILABLE", True, (5,))
        assert one["engine"] == ("NOT_AVAILABLE", False, (5,)) and one["trained"]


# -- optimizers ------------------------------------------------------------------------------------


def groups_of(stage: int) -> dict[str, Any]:
    model = build()
    engine, optimizer, _, schedule = initialize(
        model=model,
        config=config(
            stage,
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            optimizer={"type": "Adam", "params": {"lr": 0.01}},
            bf16={"enabled": True},
        ),
    )
    kinds = {
        kind.__name__: isinstance(optimizer, kind)
        for kind in (
            *(DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, FP16_Optimizer),
            *(BF16_Optimizer, FusedAdam, DeepSpeedCPUAdam),
        )
    }
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    flat = getattr(optimizer, "fp32_groups_flat" if stage == 0 else name)
    engine.backward(engine(batch()).square().mean())
    gradients = optimizer.averaged_gradients[0]
    params = list(model.parameters())
    mine = [access.safe_get_local_grad(p) for p in params]
    assert len(optimizer.averaged_gradients) == len(flat) == 1
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients, [g for g in mine if g is not None], strict=True)
    )
    engine.step()
    assert torch.equal(flat[0], torch.cat([access.local_fp32(p) for p in params]))
    assert optimizer.optimizer.state[params[0]].keys() == optimizer.state[params[0]].keys()
    return {
        "kinds": [kind for kind, yes in kinds.items() if yes],
        "schedule": (isinstance(schedule, WarmupLR), isinstance(schedule, OneCycle)),
        "numel": flat[0].numel(),
        "dtype": flat[0].dtype,
    }


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (0, "FP16_Optimizer"),
        (1, "DeepSpeedZeroOptimizer"),
        (2, "DeepSpeedZeroOptimizer"),
        (3, "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_an_optimizer_counts_as_deepspeeds_class_of_its_stage(stage: int, kind: str) -> None:
    seen = run_ranks(2, groups_of, stage)
    for one in seen:
        assert one["kinds"] == [kind, "FusedAdam"] and one["schedule"] == (True, False)
        assert one["dtype"] == torch.float32
    # 53 elements, divided from stage 1
    assert (
        [one["numel"] for one in seen] == [53, 53]
        if stage == 0
        else sum(one["numel"] for one in seen) == 53
    )


def test_an_optimizer_made_by_deepspeeds_class_is_an_instance_of_it() -> None:
    param = nn.Parameter(torch.ones(3))
    fused, host = FusedAdam([param], lr=0.1), DeepSpeedCPUAdam([param], lr=0.1)
    assert isinstance(fused, FusedAdam) and isinstance(fused, torch.optim.AdamW)
    assert isinstance(host, DeepSpeedCPUAdam) and not isinstance(host, FusedAdam)
    assert not isinstance(torch.optim.AdamW([param]), (FusedAdam, DeepSpeedCPUAdam))
