"""What scripts read from an engine's optimizer, leaf modules, and generation with gathered weights."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.integrations.deepspeed.config import LossScaling
from onefold.integrations.deepspeed.names import access, gathered, leaves
from onefold.integrations.deepspeed.names.training import (
    DeepSpeedOptimizer,
    ZeROOptimizer,
    initialize,
)
from onefold.integrations.deepspeed.scaling import LossScaler
from ranks import run_ranks

WIDTH = 6


class Router(nn.Module):
    """Two experts, of which a rank uses the one of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.experts[rank % 2](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Router() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batch() -> Tensor:
    return torch.arange(4.0 * WIDTH).view(4, WIDTH) / 20


def made(stage: int, net: Net | None = None, zero: Any = None, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=net or Net(), config=config)[0]


# -- the optimizer's names -------------------------------------------------------------------------


def scales_seen(stage: int) -> list[tuple[Any, ...]]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    engine = made(stage, fp16=fp16)
    optimizer, seen = engine.optimizer, []
    scaler = optimizer.loss_scaler
    assert scaler is optimizer.loss_scale_config is engine.loss_scaler
    assert optimizer.dynamic_loss_scale and optimizer.needs_scaler() and scaler.scale_window == 2
    for value in (1.0, float("inf"), 1.0, 1.0, 1.0):
        engine.backward(engine(batch().half()).float().mean())
        for p in engine.module.parameters():
            access.safe_set_full_grad(p, torch.full(p.shape, value))
        engine.step()
        names = (scaler.cur_scale, scaler.loss_scale, optimizer.cur_scale, optimizer.loss_scale)
        assert len({engine.cur_scale, *names}) == 1, names
        seen.append((engine.cur_scale, scaler.cur_iter, scaler.last_overflow_iter))
        assert optimizer.overflow is (value != 1)
    scaler.cur_scale = 64
    return [*seen, (engine.cur_scale, optimizer.loss_scale)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_optimizer_tells_the_loss_scale_as_it_is(stage: int) -> None:
    for seen in run_ranks(2, scales_seen, stage):
        assert seen == [(16, 1, -1), (8, 2, 1), (8, 3, 1), (8, 4, 1), (16, 5, 1), (64, 64)]


@pytest.mark.parametrize("stage", [0, 1])
def test_outside_fp16_the_optimizer_tells_a_scale_of_one(stage: int) -> None:
    engine = made(stage, bf16={"enabled": True})
    optimizer = engine.optimizer
    assert optimizer.cur_scale == optimizer.loss_scale == optimizer.loss_scaler.cur_scale == 1
    assert not optimizer.dynamic_loss_scale and not optimizer.needs_scaler()
    assert not optimizer.overflow and not optimizer.custom_loss_scaler
    assert isinstance(optimizer, DeepSpeedOptimizer)
    assert isinstance(optimizer, ZeROOptimizer) is (stage > 0)
    assert not isinstance(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), ZeROOptimizer)


def test_the_scaler_has_deepspeeds_names() -> None:
    scaler = LossScaler(LossScaling(initial_power=8, window=5, hysteresis=3, minimum=2))
    assert (scaler.scale_factor, scaler.min_scale, scaler.min_loss_scale) == (2, 2, 2)
    assert (scaler.delayed_shift, scaler.cur_hysteresis, scaler.consecutive_hysteresis) == (
        3,
        3,
        False,
    )
    assert scaler.dynamic_loss_scale and scaler.raise_error_at_min_scale
    scaler.update(True)
    other = LossScaler(LossScaling(initial_power=8, hysteresis=3))
    other.load_state_dict(scaler.state_dict())
    assert other.cur_hysteresis == 2 and other.cur_iter == 1 and other.last_overflow_iter == 0


def test_an_optimizer_does_not_keep_its_engine_alive() -> None:
    net = Net()
    leaves.set_z3_leaf_modules(net, [Router])
    engine = made(3, net)
    optimizer, module = engine.optimizer, weakref.ref(engine.module)
    gc.disable()
    try:
        del engine, net
        assert module() is None
    finally:
        gc.enable()
    assert optimizer.loss_scaler.cur_scale == 1


# -- leaf modules ----------------------------------------------------------------------------------


def test_leaf_modules_are_marked_by_class_name_and_suffix() -> None:
    net, path = Net(), f"{Router.__module__}.Router"
    for kinds in ([Router], ["Router"], [path]):
        assert leaves.set_z3_leaf_modules(net, kinds) == list(net.layers)
        assert leaves.get_z3_leaf_modules(net) == list(net.layers)
        assert leaves.z3_leaf_module(net.layers[0]) and not leaves.z3_leaf_module(net.head)
        assert leaves.unset_z3_leaf_modules(net, kinds) == list(net.layers)
        assert leaves.get_z3_leaf_modules(net) == []
    found = leaves.set_z3_leaf_modules_by_name(net, ["layers.1", "none"], raise_if_not_found=False)
    assert found == ([net.layers[1]], ["none"])
    found = leaves.set_z3_leaf_modules_by_suffix(net, ["s.0", "?"], raise_if_not_found=False)
    assert found == ([net.layers[0], net.layers[0].experts[0], net.layers[1].experts[0]], ["?"])
    for call, what in (
        (leaves.set_z3_leaf_modules, "NoBlock"),
        (leaves.unset_z3_leaf_modules, "NoBlock"),
        (leaves.set_z3_leaf_modules_by_name, "layers.7"),
        (leaves.set_z3_leaf_modules_by_suffix, "nothing"),
    ):
        with pytest.raises(ValueError, match=f"{what}.*the model has none such"):
            call(net, [what])
    with pytest.raises(ValueError, match="expected classes, or names of classes"):
        leaves.set_z3_leaf_modules(net, [3])  # type: ignore[list-item]


def leaves_of_a_configuration() -> tuple[list[int], list[bool], float]:
    """A leaf of which each rank uses another part, marked by the configuration."""
    zero = {"leaf_module": {"classes": ["Router"], "names": ["head", "tail"]}}
    engine = made(3, zero=zero)
    counts = [len(found) for found in engine.optimizer.leaf_parameters.values()]
    marked = [leaves.z3_leaf_parameter(p) for p in engine.module.parameters()]
    net = Net()
    for _ in range(2):
        engine.backward(engine(batch()).square().mean())
        engine.step()
        net(batch()).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                p -= 0.1 * grad / 2
        net.zero_grad()
    pairs = zip(engine.module.parameters(), net.parameters(), strict=True)
    apart = max(float((access.safe_get_full_fp32_param(a) - b).abs().max()) for a, b in pairs)
    return counts, marked, apart


def test_a_configuration_may_name_leaf_modules() -> None:
    for counts, marked, apart in run_ranks(2, leaves_of_a_configuration):
        assert counts == [4, 4, 2] and all(marked) and len(marked) == 10
        assert apart < 1e-6


def test_names_of_leaf_modules_that_fit_none_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made(3, zero={"leaf_module": {"names": "tail", "name_suffixes": ["ead"]}})
    assert "leaf_module.names fits no module: ['tail']" in caplog.text
    assert "name_suffixes" not in caplog.text
    with pytest.raises(ValueError, match="leaf_module='Router': expected an object"):
        made(3, zero={"leaf_module": "Router"})


# -- generation ------------------------------------------------------------------------------------


def unequal_passes_inside() -> tuple[list[float], int, bool]:
    """Ranks make another number of passes with gathered weights."""
    engine = made(3, bf16={"enabled": True})
    rank, x = dist.get_rank(), batch().bfloat16()
    with torch.no_grad():
        outside = engine(x)
    before = onefold.engine_of(engine.module).traffic.total()
    offload = engine.optimizer.parameter_offload
    trace = offload.get_param_coordinator()
    assert offload.forward_hooks and not trace.is_invalid_trace()
    with gathered.unwrap_model_for_generation(engine) as model, torch.no_grad():
        assert model is engine and not offload.forward_hooks
        inside_before = onefold.engine_of(engine.module).traffic.total()
        outputs = [model(x) for _ in range(2 + rank)]
        sent = onefold.engine_of(engine.module).traffic.total() - inside_before
        shape = tuple(engine.module.head.weight.shape)
    assert before <= inside_before and shape == (3, WIDTH)
    assert offload.forward_hooks and trace.is_invalid_trace()
    for holder in (engine, engine.optimizer, offload):
        holder.empty_partition_cache()
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return [float((o - outside).abs().max()) for o in outputs], sent, engine.was_step_applied()


def test_a_model_unwrapped_for_generation_sends_nothing_inside() -> None:
    for apart, sent, applied in run_ranks(2, unequal_passes_inside):
        assert max(apart) == 0 and sent == 0 and applied


def unequal_passes() -> str:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    onefold.shard(model, onefold.Recipe.zero(3, stall_timeout=1.5))
    try:
        with torch.no_grad():
            for _ in range(2 + dist.get_rank()):
                model(batch())
    except onefold.StallError as error:
        return str(error)
    return ""


def test_a_stall_of_unequal_forward_passes_names_synced_gpus() -> None:
    first, second = run_ranks(2, unequal_passes)
    assert not first and "(forward, step 0)" in second
    assert "call generate(..., synced_gpus=True)" in second
