"""An engine from its JSON to its last step: beside DDP wherever its states rest, with optimizers and
schedules of all kinds, and what scripts ask of it.
"""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import looks
import onefold
from ds.engines import (
    STAGES,
    adam,
    apart,
    batch,
    json_of,
    loss_of,
    made,
    masters,
    served,
    train,
    warnings_of,
)
from on_ranks import on_ranks
from reference import adamw, built, differences, weights
from zoo import TinyMLP

CPU, NVME = ({"device": "cpu", "pin_memory": True}, {"device": "nvme", "nvme_path": "FOLDER"})
#: {what a file says of "zero_optimization": (the section, stages, where something rests beside the
#: device)}
TIERS: dict[str, tuple[dict[str, Any], tuple[int, ...], set[str]]] = {
    "the device": ({}, STAGES, set()),
    "the host": ({"offload_optimizer": CPU}, (0, 1, 2, 3), {"host"}),
    "half of it on the host": ({"offload_optimizer": {**CPU, "ratio": 0.5}}, (1, 3), {"host"}),
    "as older files write it": ({"cpu_offload": True}, (2,), {"host"}),
    "NVMe": ({"offload_optimizer": {**NVME, "pipeline_read": True}, "sub_group_size": 65536}, (1, 3), {"nvme"}),
    "parameters too": ({"offload_optimizer": CPU, "offload_param": CPU}, (3,), {"host"}),
    "parameters on the host, states on NVMe": ({"offload_optimizer": NVME, "offload_param": CPU}, (3,), {"host", "nvme"}),
    "everything on NVMe": ({"offload_optimizer": NVME, "offload_param": NVME}, (3,), {"nvme"}),
}  # fmt: skip


def decaying() -> dict[str, Any]:
    params = {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 9}
    return {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.2,
        "optimizer": adam(weight_decay=0.1),
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }


def under_ddp() -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Weights, losses and norms of three steps by the rates of iterations -1, 0 and 1."""
    model, losses, norms = DistributedDataParallel(built(TinyMLP)), [], []
    optimizer = adamw(model, weight_decay=0.1, eps=1e-8)
    for step, rate in enumerate((0.0, 0.0, 0.02)):
        optimizer.param_groups[0]["lr"] = rate
        for index in (2 * step, 2 * step + 1):
            model.require_backward_grad_sync = index % 2 == 1
            loss = loss_of(model(batch(index)))
            (loss / 2).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), losses, norms


def train_as_ddp(engine: Any, expected: tuple[dict[str, Tensor], list[float], list[float]]) -> None:
    state, losses, norms = expected
    assert min(norms) > 0.2, "clipping acts"
    for index, theirs in enumerate(losses):
        loss = loss_of(engine(batch(index)))
        assert torch.equal(engine.backward(loss), loss / 2)
        assert engine.is_gradient_accumulation_boundary() == (index % 2 == 1)
        engine.step()
        assert engine.was_step_applied() == (index % 2 == 1)
        assert loss.item() == pytest.approx(theirs, abs=2e-6)
        if index % 2:
            assert engine.get_global_grad_norm() == pytest.approx(norms[index // 2], rel=1e-5)
    assert not differences(state, weights(engine.module), 1e-5, 2e-6)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (3, 6, 0)
    assert engine.global_samples == 6 * 4 * 2 and engine.get_lr() == pytest.approx([0.02])


@on_ranks(2)
@pytest.mark.parametrize("where", TIERS)
def test_a_json_trains_as_ddp_wherever_states_rest(where: str, folder: Path) -> None:
    zero, stages, tiers = TIERS[where]
    expected = under_ddp()
    disk, file = folder / "disk", folder / f"ds-{dist.get_rank()}.json"
    disk.mkdir(exist_ok=True)
    for stage in stages:
        text = json.dumps(json_of(stage, zero, **decaying()))
        file.write_text(text.replace("FOLDER", str(disk)))
        engine = onefold.initialize(model=built(TinyMLP), config=str(file))[0]
        train_as_ddp(engine, expected)
        found = looks.held(engine.module, engine.optimizer)
        held = {tier: sum(found.get(tier, {}).values()) for tier in ("host", "nvme")}
        assert {tier for tier, nbytes in held.items() if nbytes > 1000} == tiers, found
        del engine
        gc.collect()
    dist.barrier()
    assert not list(disk.iterdir())


@on_ranks(2)
def test_an_optimizer_may_be_made_before_or_by_a_function() -> None:
    expected, options = under_ddp(), {"weight_decay": 0.1, "eps": 1e-8}
    for stage in (0, 2, 3):
        model = built(TinyMLP)
        early = adamw(model, **options)
        for given in (early, lambda ps: torch.optim.AdamW(ps, lr=0.01, **options)):
            engine, optimizer, _, _ = onefold.initialize(
                model=model, optimizer=given, config=json_of(stage, **decaying())
            )
            assert given is not early or optimizer is early
            train_as_ddp(engine, expected)
            model = built(TinyMLP)


@on_ranks(2)
def test_model_parameters_may_be_groups_over_a_part_of_the_model() -> None:
    for stage in (0, 2, 3):
        model = built(TinyMLP)
        groups = [{"params": list(model.leave.parameters()), "lr": 0.5}]
        engine, optimizer, _, _ = served().initialize(
            model=model, model_parameters=groups, config=json_of(stage, optimizer=adam())
        )
        assert optimizer.param_groups[0]["lr"] == 0.5 and engine.get_lr() == [0.5]
        before = weights(model)
        train(engine, range(1))
        engine(batch(1))
        assert all(p.grad is None for p in model.parameters()), "also outside the optimizer"
        moved = {n for n, value in weights(model).items() if not torch.equal(value, before[n])}
        assert moved == {"leave.weight", "leave.bias"}


@on_ranks(2)
def test_without_gradient_clipping_a_json_clips_to_norm_one() -> None:
    for stage in STAGES:
        for given, limit in (({}, 1.0), ({"gradient_clipping": 0}, 0.0)):
            config = {k: v for k, v in json_of(stage).items() if k != "gradient_clipping"}
            engine = served().initialize(model=built(TinyMLP), config={**config, **given})[0]
            before = masters(engine)
            engine.backward(loss_of(engine(batch(0))) * 100)
            engine.step()
            steps = [(a - b).square().sum() for a, b in zip(before, masters(engine), strict=True)]
            norm = engine.get_global_grad_norm()
            assert engine.gradient_clipping() == limit and norm > 5
            assert float(torch.stack(steps).sum().sqrt()) == pytest.approx(
                0.1 * (limit or norm), rel=1e-4
            )


# -- optimizers by name ----------------------------------------------------------------------------

MUON = {"lr": 1e-2, "muon_lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9]}


def embedded() -> Any:
    """Token ids -> scores; one of the hidden layers is frozen."""
    layers: dict[str, nn.Module] = {
        "embed": nn.Embedding(16, 8),
        "first": nn.Linear(8, 12),
        "fixed": nn.Linear(12, 12).requires_grad_(False),
        "second": nn.Linear(12, 8),
        "lm_head": nn.Linear(8, 16, bias=False),
    }
    return nn.Sequential(OrderedDict(layers))


def scores_off(model: nn.Module, index: int) -> Tensor:
    ids = (torch.arange(6) * 5 + index + 3 * dist.get_rank()) % 16
    return nn.functional.cross_entropy(model(ids), ids.roll(1))


@on_ranks(2)
def test_muon_of_the_json_steps_hidden_matrices_as_torchs_and_the_rest_by_adamw() -> None:
    plain = DistributedDataParallel(built(embedded))
    trained = {n: p for n, p in plain.module.named_parameters() if p.requires_grad}
    hidden = {"first.weight", "second.weight"}
    rest = [p for name, p in trained.items() if name not in hidden]
    optimizers = [
        torch.optim.Muon([trained[n] for n in hidden], lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1),
    ]
    for index in range(3):
        scores_off(plain, index).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for stage, tier in ((0, "none"), (1, "none"), (2, "cpu"), (3, "none")):
        zero = {"offload_optimizer": {"device": tier}}
        engine = made(stage, built(embedded), zero, optimizer={"type": "Muon", "params": MUON})
        for index in range(3):
            engine.backward(scores_off(engine, index))
            engine.step()
        assert not differences(weights(plain), weights(engine.module), 1e-4, 1e-5), stage
        for name, p in engine.module.named_parameters():
            state = served().utils.safe_get_full_optimizer_state(p, "momentum_buffer")
            assert (state is not None) == (name in hidden), name


@on_ranks(1)
def test_muons_options_are_the_groups_then_the_halfs_then_the_files(folder: Path) -> None:
    def groups(parameters: Any = None, **params: Any) -> dict[str, Any]:
        model = built(embedded)
        config = json_of(0, optimizer={"type": "muon", "params": params})
        given = parameters(model) if parameters else None
        optimizer = served().initialize(model=model, model_parameters=given, config=config)[1]
        names = {id(p): name for name, p in model.named_parameters()}
        return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}

    found = groups()
    assert not {"fixed.weight", "fixed.bias"} & found.keys()
    matrix, table = found["first.weight"], found["embed.weight"]
    assert (matrix["use_muon"], matrix["lr"], matrix["momentum"]) == (True, 0.02, 0.95)
    assert (table["use_muon"], table["lr"], table["eps"]) == (False, 3e-4, 1e-10)
    assert table["betas"] == (0.9, 0.95) and table["weight_decay"] == 0.0

    def two(model: Any) -> list[Any]:
        model.first.weight.use_muon = False
        hidden = [*model.first.parameters(), *model.second.parameters()]
        return [
            {"params": hidden, "weight_decay": 0.0},
            {"params": [model.embed.weight], "lr": 0.5},
        ]

    found = groups(two, lr=1e-2, adam_lr=1e-3, weight_decay=0.1)
    own, matrix, table = (found[f"{name}.weight"] for name in ("first", "second", "embed"))
    assert (own["use_muon"], own["lr"]) == (False, 1e-3)
    assert (matrix["use_muon"], matrix["lr"], matrix["weight_decay"]) == (True, 1e-2, 0.0)
    assert (table["lr"], table["weight_decay"]) == (0.5, 0.1)

    def marked(model: Any) -> Any:
        model.first.bias.use_muon = True
        return model.parameters()

    with pytest.raises(ValueError, match=r"has use_muon=True and the shape \(12,\)"):
        groups(marked)
    with pytest.raises(ValueError, match="did you mean 'ns_method'"):
        groups(ns_methd="gram")
    with pytest.raises(NotImplementedError, match="per_head_muon=true"):
        groups(per_head_muon=True)
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    with pytest.raises(ValueError, match="with states on NVMe: Muon steps whole matrices"):
        made(1, built(embedded), zero, optimizer={"type": "Muon", "params": MUON})


@on_ranks(2)
def test_an_optimizer_counts_as_deepspeeds_class_of_its_stage() -> None:
    ds = served()
    zero, runtime = ds.runtime.zero, ds.runtime
    kinds = {
        "stage 3": zero.stage3.DeepSpeedZeroOptimizer_Stage3,
        "stages 1 and 2": zero.stage_1_and_2.DeepSpeedZeroOptimizer,
        "zero": runtime.base_optimizer.ZeROOptimizer,
        "fp16": runtime.fp16.fused_optimizer.FP16_Optimizer,
        "bf16": runtime.bf16_optimizer.BF16_Optimizer,
        "any": ds.DeepSpeedOptimizer,
        "fused": ds.ops.adam.FusedAdam,
        "host": ds.ops.adam.DeepSpeedCPUAdam,
    }
    below = {"stages 1 and 2", "zero", "any", "fused"}
    expected = [{"fp16", "any", "fused"}, below, below, {"stage 3", "zero", "any", "fused"}]
    for stage in STAGES:
        engine = made(stage, optimizer={"type": "Adam", "params": {}}, bf16={"enabled": True})
        optimizer = engine.optimizer
        assert {name for name, kind in kinds.items() if isinstance(optimizer, kind)} == expected[
            stage
        ]
        assert engine.optimizer_name() == "adam"
        flat = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        engine.backward(loss_of(engine(batch(0).bfloat16())))
        grads = [ds.utils.safe_get_local_grad(p) for p in engine.module.parameters()]
        averaged = optimizer.averaged_gradients[0]
        assert all(map(torch.equal, averaged, [grad for grad in grads if grad is not None]))
        engine.step()
        (mine,) = getattr(optimizer, flat if stage else "fp32_groups_flat")
        parts = [ds.utils.safe_get_local_fp32_param(p) for p in engine.module.parameters()]
        assert torch.equal(mine, torch.cat([p for p in parts if p is not None]))
        first = next(iter(optimizer.state))
        assert optimizer.optimizer.state[first].keys() == optimizer.state[first].keys()
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), kinds["zero"])


@on_ranks(1)
def test_an_optimizer_does_not_keep_its_engine_alive() -> None:
    engine = made(3)
    optimizer, module = engine.optimizer, weakref.ref(engine.module)
    gc.disable()
    del engine
    gone = module() is None
    gc.enable()
    assert gone and optimizer.loss_scaler.cur_scale == 1


@on_ranks(1)
def test_optimizers_of_the_host_are_torchs_and_take_its_groups() -> None:
    ops, param = served().ops, nn.Parameter(torch.ones(3))
    given = torch.optim.AdamW([param], lr=0.1, weight_decay=0.2).param_groups
    host, fused = ops.adam.DeepSpeedCPUAdam(given, lr=0.1), ops.adam.FusedAdam([param], lr=0.1)
    assert type(host) is torch.optim.AdamW and host.param_groups[0]["weight_decay"] == 0.2
    assert isinstance(host, ops.adam.DeepSpeedCPUAdam) and not isinstance(host, ops.adam.FusedAdam)
    assert isinstance(fused, ops.adam.FusedAdam) and isinstance(fused, torch.optim.AdamW)
    assert type(ops.adam.DeepSpeedCPUAdam([param], adamw_mode=False)) is torch.optim.Adam
    assert type(ops.adagrad.DeepSpeedCPUAdagrad(given)) is torch.optim.Adagrad
    for kind, option in (
        (ops.adam.DeepSpeedCPUAdam, {"bias_correction": False}),
        (ops.adagrad.DeepSpeedCPUAdagrad, {"amsgrad": True}),
    ):
        with pytest.raises(NotImplementedError, match=r"always corrects|has no such form"):
            kind([param], **option)
    group = {"params": [param], "lr": 0.5, "betas": (0.9, 0.99), "foreach": None}
    lion = ops.lion.DeepSpeedCPULion([group])
    param.grad = torch.tensor([2.0, -1.0, 0.0])
    lion.step()
    assert param.tolist() == [0.5, 1.5, 1.0] and "foreach" not in lion.param_groups[0]


# -- schedules -------------------------------------------------------------------------------------

WARMUP = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2}
RATES = [
    ("WarmupLR", WARMUP, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4]),
    ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, *(math.log(i) / math.log(4) for i in (2, 3)), 1, 1, 1, 1]),
    ("WarmupDecayLR", {**WARMUP, "total_num_steps": 6}, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.2, 0]),
    ("WarmupCosineLR", {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 4, "cos_min_ratio": 0.2},
     [0, 0, 0.5, 0.6, 0.2, 0.2, 0.2, 0.2]),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 4}, [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}, [0.1 + i / 20 for i in range(8)]),
    ("StepLR", {"step_size": 2, "gamma": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
]  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize(("name", "params", "rates"), RATES)
def test_schedules_have_deepspeeds_rates_and_go_on_from_their_state(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    def scheduled() -> Any:
        return made(1, optimizer=adam(lr=1.0, eps=1.0), scheduler={"type": name, "params": params})

    engine, again = scheduled(), scheduled()
    for index, rate in enumerate(rates):
        assert engine.get_lr() == pytest.approx([rate]), index
        train(engine, range(1))
    again.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
    assert again.lr_scheduler.get_last_lr() == pytest.approx(engine.lr_scheduler.get_last_lr())


@on_ranks(1)
def test_schedules_as_classes_keep_rates_momentum_and_what_they_were_given() -> None:
    kinds = served().runtime.lr_schedules

    def over(*rates: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
        )

    def after(schedule: Any, steps: int, optimizer: Any) -> list[float]:
        for _ in range(steps):
            schedule.step()
        return [float(group["lr"]) for group in optimizer.param_groups]

    two = over(0.1, 0.2)
    own = kinds.WarmupLR(two, warmup_num_steps=10)
    assert isinstance(own, kinds.WarmupLR) and not isinstance(own, kinds.WarmupDecayLR)
    assert (own.min_lrs, own.max_lrs, own.warmup_num_steps, own.warmup_type) == (
        [0, 0],
        [0.1, 0.2],
        10,
        "log",
    )
    assert after(own, 11, two) == [0.1, 0.2], "each group's own"
    with warnings_of() as said:
        two = over(0.05, 0.001)
        assert (
            after(kinds.WarmupLR(two, warmup_num_steps=2, warmup_max_lr=0.003), 4, two)
            == [0.003] * 2
        )
        kinds.WarmupLR(over(0.1), warmup_num_steps=10, warmup_type="cubic")
    assert "one rate, 0.003, for 2 parameter groups, whose own rates 0.05, 0.001" in said[0]
    assert "expected 'log' or 'linear'" in said[1]
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    held = over(rate)
    kinds.WarmupLR(held, warmup_num_steps=10).step(1)
    assert held.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1 * math.log(2) / math.log(10))
    # 1 / log(3) is rounded before it is multiplied
    decay = kinds.WarmupDecayLR(over(0.001), total_num_steps=10, warmup_num_steps=3)
    decay.step(1)
    assert decay.get_last_lr() == [0.001 * ((1.0 / math.log(3)) * math.log(2))]
    cycle = over(1.0)
    schedule = kinds.OneCycle(cycle, **CYCLE, decay_step_size=1, decay_lr_rate=1.0)
    betas = []
    for _ in range(4):
        betas.append(cycle.param_groups[0]["betas"][0])
        schedule.step()
    assert betas == pytest.approx([0.8, 0.85, 0.8, 0.85]), "momentum moves the other way"
    schedule.step()
    assert schedule.get_lr() == pytest.approx([0.1 / 2])
    for name in ("CYCLE_MAX_LR", "DECAY_STEP_SIZE", "WARMUP_NUM_STEPS", "TOTAL_NUM_STEPS"):
        assert getattr(kinds, name) == name.lower()
    for name, params in (
        ("WarmupLR", {"warmup_num_steps": -5}),
        ("WarmupDecayLR", {"warmup_num_steps": None, "total_num_steps": 9}),
        ("LRRangeTest", {"lr_range_test_step_size": 0}),
        ("OneCycle", {"cycle_first_step_size": 0, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
    ):  # fmt: skip
        key, value = next(iter(params.items()))
        with pytest.raises(ValueError, match=f"{key}={value}"):
            getattr(kinds, name)(over(0.1), **params)


@on_ranks(1)
def test_a_schedule_may_be_an_object_a_class_or_a_function_and_wins_over_the_json() -> None:
    kinds = torch.optim.lr_scheduler
    config = json_of(0, scheduler={"type": "WarmupLR", "params": {}})
    model = built(TinyMLP)
    own = adamw(model)
    step = kinds.StepLR(own, 30)
    for given, optimizer in (
        (step, own),
        (kinds.ConstantLR, None),
        (lambda o: kinds.StepLR(o, 30), None),
    ):
        made_of = model if optimizer else built(TinyMLP)
        found = served().initialize(
            model=made_of, config=config, optimizer=optimizer, lr_scheduler=given
        )[3]
        assert found is given or isinstance(
            found, given if given is kinds.ConstantLR else kinds.StepLR
        )
    outside = kinds.LambdaLR(adamw(model := built(TinyMLP)), lambda step: 1.0)
    with pytest.raises(ValueError, match="lr_scheduler is a LambdaLR over an optimizer that was"):
        served().initialize(model=model, config=config, lr_scheduler=outside)


# -- what scripts ask of an engine -----------------------------------------------------------------


@on_ranks(2)
def test_sizes_data_and_attributes_of_an_engine(folder: Path) -> None:
    for stage in (0, 1, 3):
        data = [batch(i, 0)[0] for i in range(17)]
        config = json_of(stage, gradient_accumulation_steps=2)
        engine, _, loader, _ = served().initialize(
            model=built(TinyMLP), config=config, training_data=data
        )
        assert [x.shape for x in loader] == [(4, 7), (4, 7), (1, 7)]
        assert engine.get_batch_info() == (16, 4, 2) and engine.zero_optimization_stage() == stage
        engine.set_train_batch_size(32)
        assert (
            engine.get_batch_info() == (32, 4, 4) and not engine.is_gradient_accumulation_boundary()
        )
        engine.set_train_micro_batch_size(3)
        assert engine.get_batch_info() == (24, 3, 4)
        with pytest.raises(ValueError, match="train_batch_size=7 does not divide"):
            engine.set_train_batch_size(7)
        rank, numbers = dist.get_rank(), [torch.tensor(float(i)) for i in range(8)]
        assert [b.tolist() for b in engine.deepspeed_io(numbers, 2, route="eval")] == [
            [rank, rank + 2.0],
            [rank + 4.0, rank + 6.0],
        ]
        assert (engine.mp_world_size, engine.dp_process_group) == (1, dist.group.WORLD)
        assert engine.blocks is engine.module.blocks
        engine.eval()
        assert not engine.module.training
        for name, words in (
            ("train_batch", "is not served here: it is a pip"),
            ("nothing", "neither the engine nor its TinyMLP has"),
        ):
            with pytest.raises(AttributeError, match=words):
                getattr(engine, name)


@on_ranks(2)
def test_save_16bit_model_writes_the_whole_model(folder: Path) -> None:
    expected = {n: v.bfloat16() for n, v in built(TinyMLP).state_dict().items()}
    for stage in (0, 3):
        engine, place = made(stage, bf16={"enabled": True}), folder / str(stage)
        for name in ("pytorch_model.bin", "model.safetensors"):
            assert engine.save_16bit_model(place, name)
        assert engine.save_fp16_model(place, "again.bin")
        found = torch.load(place / "pytorch_model.bin")
        assert not differences(expected, found)
        assert {p.name for p in place.iterdir()} == {
            "pytorch_model.bin",
            "model.safetensors",
            "again.bin",
        }
    model = built(TinyMLP)
    model.blocks.requires_grad_(False)
    place = folder / "part"
    assert made(3, model).save_16bit_model(place, exclude_frozen_parameters=True)
    names = torch.load(place / "pytorch_model.bin").keys()
    assert names == {n for n in expected if not n.startswith("blocks")}
    with pytest.raises(RuntimeError, match="rank 0 could not write"):
        engine.save_16bit_model("/dev/null/nowhere")


def test_one_process_needs_no_process_group(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "ds_config.json"
    odd = {"steps_per_print": 1, "wall_clock_breakdown": True, "wandb": {"enabled": True}, "odd": 1}
    file.write_text(json.dumps(json_of(3, **odd)))
    with warnings_of() as said:
        engine, optimizer, loader, schedule = onefold.initialize(
            model=built(TinyMLP), config=str(file)
        )
    text = "\n".join(said)
    assert text.count("wandb") == 1 and text.count("unknown, without effect: odd") == 1
    assert engine.optimizer is optimizer and loader is None and schedule is None
    engine.backward(loss_of(engine(batch(0, 0))))
    engine.step()
    line = capsys.readouterr().out
    assert (
        line.startswith("step 1, skipped 0, lr [0.1]")
        and "backward" in line
        and line.count("\n") == 1
    )
    bare, *others = onefold.initialize(model=built(TinyMLP).eval(), config={"train_batch_size": 4})
    assert others == [None, None, None] and bare(batch(0, 0)).shape == (4, 5)
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        bare.backward(loss_of(bare(batch(0, 0))))


# -- generation ------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_that_is_unwrapped_or_gathered_for_generation_sends_nothing_inside() -> None:
    """Ranks make another number of passes there."""
    zero = served().zero
    for way in ("unwrapped", "gathered"):
        engine = made(3, bf16={"enabled": True})
        model, x = engine.module, batch(0).bfloat16()
        offload = engine.optimizer.parameter_offload
        with torch.no_grad():
            outside = engine(x)
        inside = (
            zero.unwrap_model_for_generation(engine)
            if way == "unwrapped"
            else zero.GatheredParameters(model.parameters())
        )
        with inside, torch.no_grad():
            looks.watch(model)
            for _ in range(2 + dist.get_rank()):
                assert torch.equal(engine(x), outside)
            assert not sum(looks.sent(model).values())
            assert tuple(model.leave.weight.data.shape) == (5, 10)
            assert {v.dtype for v in model.state_dict().values()} == {torch.bfloat16}
            assert bool(offload.forward_hooks) == (way == "gathered")
        if way == "gathered":
            with (
                zero.GatheredParameters(model.parameters()),
                pytest.raises(RuntimeError, match="gathers the whole model"),
            ):
                engine.backward(loss_of(engine(x)))
        for holder in (engine, engine.optimizer, offload):
            holder.empty_partition_cache()
        before = masters(engine)
        engine.backward(loss_of(engine(x)))
        engine.step()
        assert engine.was_step_applied() and apart(masters(engine), before) > 0


@on_ranks(2, fresh=True)
def test_a_stall_of_unequal_forward_passes_names_synced_gpus() -> None:
    model = onefold.shard(built(TinyMLP), onefold.Recipe.zero(3, stall_timeout=1.5))
    with torch.no_grad():
        for _ in range(2):
            model(batch(0))
        if dist.get_rank():
            with pytest.raises(onefold.StallError, match=r"synced_gpus=True"):
                model(batch(0))
