"""What an engine computes in: loss scales, autocast, master weights of 16 bits, dtypes of parameters
and buffers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import looks
from ds.engines import (
    RATE,
    STAGES,
    Plain,
    adam,
    batch,
    loss_of,
    made,
    masters,
    served,
)
from on_ranks import on_ranks
from reference import adamw, built, weights
from zoo import TinyMLP

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def normed() -> nn.Module:
    """Two linear layers with a norm between them."""
    return nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def with_gradient(engine: Any, value: float) -> bool:
    """A step whose scaled gradients are `value`. Returns whether weights changed."""
    before = masters(engine)
    engine.backward(loss_of(engine(batch(0).half())))
    for p in engine.module.parameters():
        served().utils.safe_set_full_grad(
            p, torch.full(p.ds_shape if hasattr(p, "ds_shape") else p.shape, value)
        )
    engine.step()
    return not all(map(torch.equal, before, masters(engine)))


# -- loss scales -----------------------------------------------------------------------------------


@on_ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(folder: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    for stage, tier in ((0, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")):
        zero = {"offload_optimizer": {"device": tier, "nvme_path": str(folder)}}
        engine = made(stage, zero=zero, fp16=fp16, scheduler=schedule, optimizer=adam())
        for index, applied in enumerate((True, True, False, True)):
            before = masters(engine)
            loss = loss_of(engine(batch(index).half()))
            broken = not applied and torch.distributed.get_rank() == 1
            engine.backward(loss * math.inf if broken else loss)
            engine.step()
            assert engine.was_step_applied() is applied is not engine.optimizer.overflow
            # The rates of the first two steps are 0
            assert all(map(torch.equal, before, masters(engine))) == (index < 3)
            assert engine.cur_scale == (256 if index < 2 else 128)
            assert engine.lr_scheduler.last_batch_iteration == (0, 1, 1, 2)[index]
            assert not applied or 0 < engine.get_global_grad_norm() < 50, "norms are unscaled"
        assert (engine.global_steps, engine.skipped_steps) == (4, 1) and engine.fp16_enabled()


#: (the section fp16, steps of which x overflows, the scale after each)
SCALES: list[tuple[dict[str, Any], str, list[float]]] = [
    # The first overflow uses up the hysteresis; two finite steps after one double again
    (
        {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 4},
        "xx...xxx",
        [16, 8, 8, 8, 16, 16, 8, 4],
    ),
    (
        {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1},
        ".x...",
        [16, 8, 8, 8, 16],
    ),
    ({"initial_scale_power": 4, "consecutive_hysteresis": True}, "x.xx", [16, 16, 16, 8]),
    ({"loss_scale": 64}, "x.", [64, 64]),
]


@on_ranks(2)
def test_the_loss_scale_follows_deepspeeds_rule() -> None:
    for stage, (section, steps, scales) in zip((0, 2, 3, 3), SCALES, strict=True):
        engine = made(stage, fp16={"enabled": True, **section})
        assert engine.optimizer.needs_scaler() and not made(stage).optimizer.needs_scaler()
        for step, scale in zip(steps, scales, strict=True):
            assert with_gradient(engine, math.inf if step == "x" else 1.0) == (step == ".")
            assert {
                engine.cur_scale,
                engine.loss_scaler.cur_scale,
                engine.optimizer.loss_scale,
            } == {scale}
        if "min_loss_scale" in section:
            with pytest.raises(FloatingPointError, match="bf16"):
                with_gradient(engine, math.inf)


# -- beside DDP ------------------------------------------------------------------------------------


def beside(
    engine: Any, plain: Any, optimizer: Any, steps: int, low: Any = None, auto: Any = None
) -> tuple[list[float], list[float]]:
    """Losses of the engine and of DDP; `low` is what inputs are cast to, `auto` autocast's dtype."""
    mine, theirs = [], []
    for index in range(steps):
        inputs = batch(index) if low is None else batch(index).to(low)
        loss = loss_of(engine(inputs))
        engine.backward(loss)
        engine.step()
        mine.append(loss.item())
        with torch.autocast("cpu", auto, enabled=auto is not None):
            loss = loss_of(plain(inputs.to(next(plain.parameters()).dtype)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    return mine, theirs


@on_ranks(2)
def test_autocast_of_the_json_computes_as_ddp_under_autocast() -> None:
    section = {"enabled": True, "dtype": "bfloat16"}
    for stage in (0, 3):
        engine = made(stage, built(normed), torch_autocast=section)
        assert engine(batch(0)).dtype == engine.torch_autocast_dtype() == torch.bfloat16
        plain = DistributedDataParallel(built(normed))
        optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
        mine, theirs = beside(engine, plain, optimizer, 3, auto=torch.bfloat16)
        assert mine[0] == theirs[0] and mine == pytest.approx(theirs, rel=1e-2)
        assert mine[-1] != mine[0]
    model, sent = built(normed), []
    for more in ({}, {"torch_autocast": section}, {}):  # the recipe is the same
        for each in (model, built(normed)):
            engine = made(2, each, **more)
            looks.watch(engine.module)
            engine.backward(loss_of(engine(batch(0))))
            sent.append(sum(looks.sent(engine.module).values()))
    assert sent[0::2] == sent[1::2] and sent[2] < sent[0] == sent[4]
    with pytest.raises(ValueError, match="names 'Linear', and there is no such class"):
        made(0, torch_autocast={**section, "lower_precision_safe_modules": ["Linear"]})


# -- master weights and states of 16 bits ----------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", LOW)
def test_master_weights_and_states_may_have_16_bits(kind: str) -> None:
    """Beside DDP in bf16 throughout; in fp16 states stay in fp32, and it is beside DDP in fp32."""
    section = {"enabled": True, f"{kind}_master_weights_and_grads": True}
    section |= {"bf16_optimizer_states": True} if kind == "bf16" else {"loss_scale": 1}
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    for stage in (1, 3):
        engine = made(stage, **{kind: section}, optimizer=adam(eps=1e-4, weight_decay=0.01))
        plain = DistributedDataParallel(built(TinyMLP).to(dtype))
        mine, theirs = beside(engine, plain, adamw(plain, fused=True), 4, LOW[kind])
        assert mine == pytest.approx(theirs, rel=2e-2)
        assert mine[-1] != mine[0]
        states = [s["exp_avg"] for s in engine.optimizer.state.values() if "exp_avg" in s]
        assert {s.dtype for s in states if s.numel()} == {dtype}


# -- dtypes of parameters and buffers --------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("kind", LOW)
def test_parameters_show_the_precision_and_masters_keep_the_models_bits(kind: str) -> None:
    for stage in STAGES:
        engine = made(stage, **{kind: {"enabled": True}})
        assert all(map(torch.equal, masters(engine), Plain().weights()))
        assert {p.dtype for p in engine.module.parameters()} == {LOW[kind]}
        assert {v.dtype for v in weights(engine.module).values()} == {torch.float32}, "an export"


@on_ranks(2)
def test_buffers_keep_their_dtype_unless_the_json_names_one() -> None:
    low, full = torch.bfloat16, torch.float32
    for section, dtype in (
        ({}, full),
        ({"buffer_dtype": "bf16"}, low),
        ({"buffer_dtype": "bf16", "keep_in_fp32_modules": ["sc*le"]}, full),
    ):
        model: Any = nn.Sequential(nn.Linear(7, 3))
        model.register_buffer("scale", torch.ones(2))
        model.register_buffer("count", torch.zeros(1, dtype=torch.long))
        engine = made(3, model, bf16={"enabled": True}, data_types=section)
        engine(batch(0).bfloat16())
        found = [engine.module.scale.dtype, engine.module.count.dtype]
        assert found == [dtype, torch.int64], section
