"""Precisions of a DeepSpeed configuration beyond fp16 and bf16: torch_autocast, master weights in 16
bits, dtypes of buffers.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from onefold.integrations.deepspeed.autocast import (
    get_comm_dtype,
    get_default_autocast_lower_precision_modules,
    has_comm_dtype,
)
from onefold.integrations.deepspeed.config import read_deepspeed
from onefold.integrations.deepspeed.names import access
from onefold.integrations.deepspeed.names.training import initialize
from ranks import run_ranks

WIDTH, STAGES = 6, (0, 1, 2, 3)
SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.lift(x))
        return self.head(x * self.scale.to(x.dtype))


def batch(index: int = 0) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def made(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": SGD,
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=Net(), config=config)[0]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def weights(engine: Any) -> list[Tensor]:
    return [access.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


# -- torch_autocast --------------------------------------------------------------------------------


def autocast_beside_ddp(stage: int) -> tuple[list[float], list[float], float, list[Any]]:
    """(losses, DDP's, largest difference of weights after three steps, what parameters say)"""
    engine = made(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    plain = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine, theirs = [], []
    for i in range(3):
        output = engine(batch(i))
        assert output.dtype == torch.bfloat16 and engine.torch_autocast_dtype() == torch.bfloat16
        mine.append(loss_of(output).item())
        engine.backward(loss_of(output))
        engine.step()
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(batch(i))
        theirs.append(loss_of(output).item())
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(weights(engine), plain.parameters(), strict=True)
    apart = max(float((a - b.detach()).abs().max()) for a, b in pairs)
    said = [(has_comm_dtype(p), get_comm_dtype(p)) for p in engine.module.parameters()]
    flats = [f for u in onefold.engine_of(engine.module).units for f in u.flats]
    said += [(sorted(e.slot.name for e in f.entries), f.dtypes.wire) for f in flats]
    return mine, theirs, apart, said


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_of_the_file_computes_as_ddp_under_autocast(stage: int) -> None:
    for mine, theirs, apart, said in run_ranks(2, autocast_beside_ddp, stage):
        assert mine[0] == theirs[0] and mine == pytest.approx(theirs, rel=1e-2)
        assert apart < 5e-3  # gradients of linear layers travel in bf16
        low, own = (True, torch.bfloat16), (False, torch.float32)
        assert said[:6] == [low, low, own, own, low, low]
        assert said[6:] == [
            (["head.bias", "head.weight", "lift.bias", "lift.weight"], torch.bfloat16),
            (["norm.bias", "norm.weight"], torch.float32),
        ]


def autocast_in_fp16(stage: int) -> tuple[list[bool], list[float], list[bool], str]:
    """An overflow in the first step, as a scale of 2**16 gives it."""
    auto = {"enabled": True, "dtype": "torch.float16"}
    engine = made(stage, torch_autocast=auto)
    applied, scales, moved = [], [engine.cur_scale], []
    for i in range(3):
        before = weights(engine)
        loss = loss_of(engine(batch(i)))
        engine.backward(loss * (1e4 if i == 0 else 1e-2))
        engine.step()
        applied.append(engine.was_step_applied())
        scales.append(engine.cur_scale)
        moved.append(not all(map(torch.equal, before, weights(engine))))
    try:
        loss_of(engine(batch(4))).backward()
    except RuntimeError as error:
        return applied, scales, moved, str(error)
    return applied, scales, moved, ""


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_in_fp16_scales_losses_and_skips_overflows(stage: int) -> None:
    for applied, scales, moved, said in run_ranks(2, autocast_in_fp16, stage):
        assert applied == moved == [False, True, True]
        assert scales == [2**16, 2**15, 2**15, 2**15]
        assert "Loss scaling is required" in said


def test_without_it_the_file_decides_and_not_the_code_around_the_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = made(1)
    with caplog.at_level(logging.WARNING, "onefold"), torch.autocast("cpu", torch.bfloat16):
        assert engine(batch()).dtype == engine(batch()).dtype == torch.float32
        assert engine.module(batch()).dtype == torch.bfloat16
    said = [r.message for r in caplog.records if "under torch.autocast" in r.message]
    assert len(said) == 1 and '"torch_autocast": {"enabled": true' in said[0]


def test_autocast_names_its_dtype_and_classes_that_exist() -> None:
    for section, said in (
        ({"enabled": True}, "torch_autocast.dtype is not set"),
        ({"enabled": True, "dtype": "int8"}, "torch_autocast.dtype='int8': there is no such dtype"),
        (
            {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": "torch.nn.Linear"},
            "expected a list of full class names",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            read_deepspeed({"torch_autocast": section})
    for name in ("torch.nn.Lineer", "Linear", "no.such.module"):
        section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": [name]}
        with pytest.raises(ValueError, match=f"names '{name}', and there is no such class"):
            made(0, torch_autocast=section)
    assert read_deepspeed({"torch_autocast": {"enabled": False, "dtype": "int8"}}).autocast is None
    assert get_default_autocast_lower_precision_modules()[0] == "torch.nn.modules.linear.Linear"


def chosen_classes() -> list[bool]:
    section = {
        "enabled": True,
        "dtype": "bf16",
        "lower_precision_safe_modules": ["torch.nn.LayerNorm"],
    }
    return [has_comm_dtype(p) for p in made(2, torch_autocast=section).module.parameters()]


def test_the_file_may_name_the_classes_whose_gradients_travel_in_it() -> None:
    assert run_ranks(2, chosen_classes)[0] == [False, False, True, True, False, False]


# -- master weights in 16 bits ---------------------------------------------------------------------


def low_masters(stage: int, kind: str) -> tuple[list[float], list[float], list[str]]:
    """Losses of four steps of Adam beside DDP in bf16 (or fp16) throughout, and the dtypes of the
    optimizer's states.
    """
    low = torch.bfloat16 if kind == "bf16" else torch.float16
    section = {"enabled": True, f"{kind}_master_weights_and_grads": True}
    section |= {"bf16_optimizer_states": True} if kind == "bf16" else {"loss_scale": 1}
    engine = made(
        stage, **{kind: section}, optimizer={"type": "Adam", "params": {"lr": 0.01, "eps": 1e-4}}
    )
    plain = DistributedDataParallel(Net().to(low))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4, weight_decay=0, fused=True)
    mine, theirs = [], []
    for i in range(4):
        loss = loss_of(engine(batch(i).to(low)))
        mine.append(loss.item())
        engine.backward(loss)
        engine.step()
        loss = loss_of(plain(batch(i).to(low)))
        theirs.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dtypes = []
    for p in engine.module.parameters():
        local = access.safe_get_local_optimizer_state(p, "exp_avg")
        if local is not None and local.numel():
            dtypes.append(str(engine.optimizer.state[p]["exp_avg"].dtype))
    return mine, theirs, dtypes


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_master_weights_and_states_may_have_16_bits(stage: int, kind: str) -> None:
    states = "torch.bfloat16" if kind == "bf16" else "torch.float32"
    for mine, theirs, dtypes in run_ranks(2, low_masters, stage, kind):
        assert mine == pytest.approx(theirs, rel=2e-2 if kind == "bf16" else 4e-3)
        assert mine[-1] != mine[0]
        assert set(dtypes) == {states}


def travelled(stage: int, kind: str, given: str) -> float:
    """How far thirty steps of Adam with small gradients move weights that are `kind` throughout,
    as a multiple of what they move fp32 weights.
    """
    rates = {"lr": 0.01, "weight_decay": 0.0}
    named = {
        "fused": {"optimizer": {"type": "Adam", "params": rates}},
        "torch_adam": {"optimizer": {"type": "AdamW", "params": {**rates, "torch_adam": True}}},
        "object": {"own": lambda parameters: torch.optim.AdamW(parameters, **rates)},
    }[given]
    section = {"enabled": True, f"{kind}_master_weights_and_grads": True}
    section |= {"loss_scale": 1.0} if kind == "fp16" else {}
    engine = made_with_own(stage, **{kind: section}, **named)
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), **rates)
    before = [p.detach().clone() for p in plain.parameters()]
    low = torch.float16 if kind == "fp16" else torch.bfloat16
    for i in range(30):
        engine.backward(loss_of(engine(batch(i).to(low))).float() * 0.01)
        engine.step()
        (loss_of(plain(batch(i))) * 0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = [access.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    far = [sum(float((a - b).square().sum()) for a, b in zip(x, before, strict=True)) ** 0.5
           for x in (mine, [p.detach() for p in plain.parameters()])]  # fmt: skip
    return far[0] / far[1]


def made_with_own(stage: int, own: Any = None, **more: Any) -> Any:
    if own is None:
        return made(stage, **more)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=model, optimizer=own(model.parameters()), config=config)[0]


@pytest.mark.parametrize("given", ["fused", "torch_adam", "object"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_adam_over_16_bit_masters_steps_as_far_as_over_fp32_ones(kind: str, given: str) -> None:
    """In fp16 the squares of such gradients are 0: with states in fp16 a step would be tens of
    times too large, or not a number.
    """
    for ranks, stage in ((1, 1), (2, 0), (2, 3)):
        for far in run_ranks(ranks, travelled, stage, kind, given):
            assert far == pytest.approx(1.0, abs=0.1), (ranks, stage)


def refused_states() -> list[str]:
    section = {"enabled": True, "fp16_master_weights_and_grads": True}
    said = []
    for own in (
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    ):
        try:
            made_with_own(0, own, fp16=section)
        except ValueError as error:
            said.append(str(error))
    made_with_own(0, lambda parameters: torch.optim.SGD(parameters, lr=0.01), fp16=section)
    model = Net()
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": section}
    try:
        initialize(model=model, optimizer=lambda ps: torch.optim.AdamW(list(ps)), config=config)
    except ValueError as error:
        said.append(str(error))
    return said


def test_optimizers_that_would_keep_squares_in_fp16_are_refused() -> None:
    said = run_ranks(1, refused_states)[0]
    assert [text.split(":")[0] for text in said] == [
        f"fp16_master_weights_and_grads with {name}" for name in ("RMSprop", "NAdam", "AdamW")
    ]


def test_options_of_a_precision_that_is_off_have_no_effect() -> None:
    read = read_deepspeed(
        {
            "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "fp16": {"fp16_master_weights_and_grads": True},
        }
    )
    assert len(read.without_effect) == 3 and "master_dtype" not in read.recipe_arguments
    alone = read_deepspeed({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})
    assert alone.recipe_arguments["master_dtype"] == "bf16"
    assert any("so they are bf16 too" in remark for remark in alone.remarks)
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    named = read_deepspeed(
        {**adam, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    )
    assert named.recipe_arguments["moments"] == "fp32"
    assert not any("bf16 too" in remark for remark in named.remarks)


# -- dtypes of parameters and buffers ---------------------------------------------------------------------------------------


def dtypes_of_parameters(stage: int, kind: str) -> tuple[set[str], bool, set[str]]:
    """(dtypes that parameters show, whether masters have the bits of the model that was given, dtypes
    of the state dict of an fp32 export)
    """
    given = Net()
    values = [p.detach().clone() for p in given.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": SGD,
        kind: {"enabled": True},
    }
    engine = initialize(model=given, config=config)[0]
    kept = all(map(torch.equal, weights(engine), values))
    with onefold.unsharded(engine.module):
        pass
    shown = {str(p.dtype) for p in engine.module.parameters()}
    whole = onefold.full_state_dict(engine.module) or {}
    return shown, kept, {str(whole[n].dtype) for n in ("lift.weight", "norm.bias") if n in whole}


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_show_the_precision_of_the_file_and_masters_keep_the_models_bits(
    stage: int, kind: str
) -> None:
    low = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[kind]
    for ranks in (1, 2):
        shown, kept, exported = run_ranks(ranks, dtypes_of_parameters, stage, kind)[0]
        assert shown == {low} and kept and exported == {"torch.float32"}


def gradients_of_ones_own(stage: int) -> list[tuple[float, bool, float]]:
    """Steps with gradients that a script has made like the parameters."""
    engine = made(stage, fp16={"enabled": True, "initial_scale_power": 3, "hysteresis": 1})
    found = []
    for value in (0.5, float("inf"), 0.5):
        before = weights(engine)
        for p in engine.parameters():
            p.grad = torch.full_like(p, value, dtype=p.dtype)
        engine.step()
        moved = max(
            float((a - b).abs().max()) for a, b in zip(before, weights(engine), strict=True)
        )
        found.append((engine.cur_scale, engine.optimizer.overflow, moved))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_may_be_given_in_the_dtype_that_a_parameter_shows(stage: int) -> None:
    for ranks in (1, 2):
        for found in run_ranks(ranks, gradients_of_ones_own, stage):
            assert [row[:2] for row in found] == [(8, False), (4, True), (4, False)]
            # Gradients are those of a scaled loss; the rate is 0.1
            assert [row[2] for row in found] == pytest.approx([0.5 / 80, 0, 0.5 / 40], rel=1e-3)


def frozen_in_8_bits(stage: int) -> tuple[str, str, bool]:
    model = Net()
    model.frozen = nn.Module()
    payload = torch.full((WIDTH, WIDTH), 9 - dist.get_rank(), dtype=torch.uint8)
    low = payload.view(torch.float8_e4m3fn)
    model.frozen.weight = nn.Parameter(low, requires_grad=False)
    model.frozen.register_buffer("scale", torch.zeros(2, dtype=torch.float8_e5m2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": SGD,
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "bf16"},
    }
    engine = initialize(model=model, config=config)[0]
    with onefold.full_params(engine.module):
        same = bool((model.frozen.weight.data.view(torch.uint8) == 9).all())
    return str(model.frozen.weight.dtype), str(model.frozen.scale.dtype), same


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_buffers_of_8_bits_keep_their_dtype_and_rank_0s_values(stage: int) -> None:
    for weight, scale, same in run_ranks(2, frozen_in_8_bits, stage):
        assert (weight, scale, same) == ("torch.float8_e4m3fn", "torch.float8_e5m2", True)


def buffers(stage: int) -> list[Any]:
    found = []
    for section in ({}, {"buffer_dtype": "bf16"}):
        engine = made(stage, bf16={"enabled": True}, data_types=section)
        engine(batch().bfloat16())
        found.append((engine.module.scale.dtype, engine.module.count.dtype))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_keep_their_dtype_unless_the_file_names_one(stage: int) -> None:
    for ranks in (1, 2):
        assert run_ranks(ranks, buffers, stage)[0] == [
            (torch.float32, torch.int64),
            (torch.bfloat16, torch.int64),
        ]


class Listed(Net):
    """Lists a buffer as transformers' models do."""

    _keep_in_fp32_modules_strict = ("sc*le",)


def kept_buffers() -> list[Any]:
    found = []
    for kind, names in ((Net, ["sc*le"]), (Net, []), (Net, "auto"), (Listed, "auto"), (Listed, [])):
        model = kind()
        data_types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": names}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "data_types": data_types,
        }
        found.append(initialize(model=model, config=config)[0].module.scale.dtype)
    return found


def test_buffers_that_the_file_or_the_model_keeps_in_fp32_stay_so() -> None:
    low, full = torch.bfloat16, torch.float32
    assert run_ranks(1, kept_buffers)[0] == [full, low, low, full, low]
    with pytest.raises(ValueError, match="expected a list of names"):
        read_deepspeed({"data_types": {"keep_in_fp32_modules": "scale"}})
    # "auto" is the key's own default, which nobody has to fill in
    assert not read_deepspeed({"data_types": {"keep_in_fp32_modules": "auto"}}).left_auto


def test_a_dtype_of_parameters_must_be_that_of_the_precision() -> None:
    ok = {"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}
    assert read_deepspeed(ok).precision == "bf16"
    for precision, given, said in (
        ({"bf16": {"enabled": True}}, "fp16", "contradicts bf16.enabled"),
        ({}, "bf16", "contradicts neither fp16 nor bf16"),
    ):
        with pytest.raises(ValueError, match=said):
            read_deepspeed({**precision, "data_types": {"param_dtype": given}})
