"""What DeepSpeed's own documentation shows beyond what libraries ask for, on two ranks and on one."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onefold.integrations.deepspeed import data_loader
from onefold.integrations.deepspeed.config import SchedulerSpec, explain, read_deepspeed
from onefold.integrations.deepspeed.lion import Lion
from onefold.integrations.deepspeed.names import (
    accelerator,
    access,
    communication,
    gathered,
    logs,
    recompute,
)
from onefold.integrations.deepspeed.names.training import initialize
from onefold.integrations.deepspeed.schedules import build_schedule
from ranks import run_ranks

SERVE = "import onefold.deepspeed; onefold.deepspeed.serve(say=False)\n"
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def made(stage: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": SGD,
        "gradient_clipping": 0.0,
        **more,
    }
    return initialize(model=build(), config=config)[0]


def batch(micro: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.arange(12.0).view(2, 6) / 10 + rank + micro / 3


def weights(engine: Any) -> list[torch.Tensor]:
    return [access.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


# -- names -----------------------------------------------------------------------------------------


def imported(statement: str) -> str:
    """What the statement raises after the name is served."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(SERVE + statement, {})
        except ImportError as error:
            print(f"{type(error).__name__}: {error}")
    return said.getvalue()


def all_imports() -> list[str]:
    return [
        imported(statement)
        for statement in (
            "from deepspeed.moe.layer import MoE",
            "from deepspeed import PipelineModule",
            "import deepspeed.runtime.no_such_file",
            "from deepspeed.utils import *\nprint(safe_get_full_grad.__name__, RepeatingLoader.__name__)",
            "from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam\n"
            "from deepspeed.runtime.activation_checkpointing import checkpointing\n"
            "import deepspeed\nprint(checkpointing.checkpoint is deepspeed.checkpointing.checkpoint)",
        )
    ]


def test_an_import_of_what_is_not_served_says_who_serves_and_why() -> None:
    moe, pipe, unknown, star, same = run_ranks(1, all_imports, process_group=False)[0]
    assert moe.startswith(
        "ModuleNotFoundError: deepspeed.moe.layer is not served here: other parallel"
    )
    assert pipe.startswith("ModuleNotFoundError: deepspeed.PipelineModule is not served here")
    assert "there is no deepspeed.runtime.no_such_file here: the name deepspeed is" in unknown
    assert star == "safe_get_full_grad RepeatingLoader\n"
    assert same == "True\n"


# -- the engine ------------------------------------------------------------------------------------


def trained(stage: int, own: bool) -> list[torch.Tensor]:
    """Two steps of three micro-batches, by `engine.backward` or by the loss's own `backward`."""
    engine = made(stage, gradient_accumulation_steps=3)
    for micro in range(6):
        loss = engine(batch(micro)).square().mean()
        if own:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    assert engine.global_steps == 2
    return weights(engine)


def use_everything(stage: int, folder: str) -> None:
    """What DeepSpeed's documentation shows of an engine and of the accessors; raises."""
    for mine, theirs in zip(trained(stage, True), trained(stage, False), strict=True):
        torch.testing.assert_close(mine, theirs)

    engine = made(stage, optimizer={"type": "Lion", "params": {"lr": 0.01}})
    assert isinstance(engine.optimizer, Lion) and engine.optimizer_name() == "lion"
    engine.backward(engine(batch()).square().mean())
    params = list(engine.module.parameters())
    grads = [access.safe_get_full_grad(p).clone() for p in params]
    access.safe_update_full_grad_vectorized(params, lambda grad, param: 2 * grad)
    for param, grad in zip(params, grads, strict=True):
        assert torch.equal(access.safe_get_full_grad(param), 2 * grad)
        local = access.safe_get_local_grad(param)
        if local is not None:
            access.safe_set_local_grad(param, local / 2)
        assert torch.equal(access.safe_get_full_grad(param), grad)
    engine.step()
    before = weights(engine)
    for param in params:
        access.safe_set_local_fp32_param(param, 3 * access.safe_get_local_fp32_param(param))
        state = access.safe_get_full_optimizer_state(param, "exp_avg").clone()
        local = access.safe_get_local_optimizer_state(param, "exp_avg")
        five = torch.empty(0) if local is None else 5 * local
        access.safe_set_local_optimizer_state(param, five, "exp_avg")
        assert torch.equal(access.safe_get_full_optimizer_state(param, "exp_avg"), 5 * state)
    # What was written is what is computed with
    with gathered.GatheredParameters(params):
        for param, was in zip(params, before, strict=True):
            assert torch.equal(param, 3 * was)
    plain = build()
    with torch.no_grad():
        for param, was in zip(plain.parameters(), before, strict=True):
            param.copy_(3 * was)
    torch.testing.assert_close(engine(batch()), plain(batch()))
    with pytest.raises(ValueError, match=r"was given 1000 elements, expected the \d+ that this"):
        access.safe_set_local_fp32_param(params[0], torch.zeros(1000))

    engine.set_train_batch_size(16)
    assert engine.get_batch_info() == (16, 2, 4) and not engine.is_gradient_accumulation_boundary()
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (24, 3, 4)
    with pytest.raises(ValueError, match="train_batch_size=7 does not divide"):
        engine.set_train_batch_size(7)
    rank = dist.get_rank()
    data = [torch.tensor(float(i)) for i in range(8)]
    assert [b.tolist() for b in engine.deepspeed_io(data, 2, route="eval")] == [
        [rank, rank + 2.0],
        [rank + 4.0, rank + 6.0],
    ]
    assert engine.save_fp16_model(folder, f"{stage}.bin")
    assert (engine.mp_world_size, engine.dp_process_group) == (1, dist.group.WORLD)
    with pytest.raises(
        AttributeError, match=r"engine\.train_batch is not served here: it is a pip"
    ):
        _ = engine.train_batch


def use_all_stages(folder: str) -> None:
    for stage in (0, 1, 3):
        use_everything(stage, folder)


def test_the_documented_surface_of_an_engine_works_at_every_stage(tmp_path: Path) -> None:
    run_ranks(2, use_all_stages, str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"0.bin", "1.bin", "3.bin"}


@pytest.mark.parametrize("there", [True, False])
def test_batches_are_pinned_if_asked_for_and_there_is_an_accelerator(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_loader, "available", lambda: there)
    engine, data = made(0), [torch.tensor(0.0)]
    assert engine.deepspeed_io(data).pin_memory is there
    assert engine.deepspeed_io(data, pin_memory=False).pin_memory is False


def test_in_fp16_a_loss_that_nothing_scaled_is_refused() -> None:
    scaled = {"fp16": {"enabled": True, "loss_scale": 128}}
    engine, other = made(0, **scaled), made(0, **scaled)
    engine.backward(engine(batch().half()).float().square().mean())
    other.scale(other(batch().half()).float().square().mean()).backward()
    for one in (engine, other):
        one.step()
    assert all(map(torch.equal, weights(engine), weights(other)))
    with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)\.backward\(\)"):
        engine(batch().half()).float().square().mean().backward()


def test_an_optimizer_with_nothing_to_train_is_a_sentence() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        initialize(model=frozen, config={"train_batch_size": 1, "optimizer": SGD})


# -- the configuration -----------------------------------------------------------------------------


def test_sizes_that_were_computed_and_sections_that_ask_for_nothing_are_read() -> None:
    given = {
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 3686.4, "stage3_prefetch_bucket_size": 3686.4,
            "sub_group_size": 1e9,
        },
        "tensor_parallel": {"autotp_size": 1}, "inference": {"tensor_parallel": {"tp_size": 1}},
        "msamp": {"enabled": False}, "train_batch_size": 2,
    }  # fmt: skip
    told = explain(given, 2)
    assert told.refusal is None
    assert not [row for row in told.keys if row.outcome in ("refused", "unknown")]
    for asks in (
        {"inference": {"tensor_parallel": {"tp_size": 2}}},
        {"msamp": {"enabled": True}},
        {"tensor_parallel": {"autotp_size": 2}},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(asks))):
            read_deepspeed(asks)
    with pytest.raises(ValueError, match="did you mean 2"):
        read_deepspeed({"train_batch_size": 1.5})


def test_rates_of_a_logarithmic_warmup_are_deepspeeds_to_the_bit() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    params = {"total_num_steps": 10, "warmup_num_steps": 3}
    schedule = build_schedule(SchedulerSpec("WarmupDecayLR", params), optimizer)
    schedule.step(1)
    # 1 / log(3) is rounded before it is multiplied: the quotient is 0.0006309297535714574
    assert schedule.get_last_lr() == [0.001 * ((1.0 / math.log(3)) * math.log(2))]
    assert repr(schedule.get_last_lr()[0]) == "0.0006309297535714573"


# -- beside the engine -----------------------------------------------------------------------------


def test_the_accelerator_answers_for_a_machine_without_one_and_unknown_questions_say_so() -> None:
    here = accelerator.get_accelerator()
    if not here.is_available():
        assert here.memory_allocated() == here.max_memory_cached() == 0
        assert here.total_memory() >= here.available_memory() > 0
    state = here.get_rng_state()
    drawn = torch.rand(2, device=here.current_device_name())
    here.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=here.current_device_name()), drawn)
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'graph_pool' here"):
        _ = here.graph_pool


def test_what_has_no_effect_is_said(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logs.see_memory_usage("unseen")
    logs.see_memory_usage("before the step", force=True)
    assert capsys.readouterr().out.startswith("before the step: ")
    communication.log_summary()
    recompute.configure_checkpointing(None, partition_activations=True, profile=False)
    assert ["log_summary: collectives are" in caplog.text, "partition_act" in caplog.text] == [
        True
    ] * 2
    assert "profile" not in caplog.text
    with pytest.raises(NotImplementedError, match=r"configure\(mpu_=\.\.\.\)"):
        recompute.configure_checkpointing(object())
