"""`onefold.initialize`: DeepSpeed's calls over the engine, against a plain DDP loop and against its
own promises.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onefold
from onefold.integrations.deepspeed import recipe_from
from onefold.integrations.deepspeed.config import LossScaling, SchedulerSpec
from onefold.integrations.deepspeed.scaling import LossScaler
from onefold.integrations.deepspeed.schedules import build_schedule
from ranks import run_ranks

STEPS, ACCUMULATION, WIDTH = 3, 2, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.lift(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + index))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 9},
        },
        **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw in all of the trials below, which share one start of the
    processes.
    """
    return run_ranks(2, every_trial, str(tmp_path_factory.mktemp("saved")))


def every_trial(folder: str) -> dict[str, Any]:
    return {
        "train": train_every_stage(),
        "optimizers": optimizers_of_ones_own(),
        "part": part_of_the_parameters(),
        "traffic": {stage: bytes_of_two_micro_batches(stage) for stage in (0, 1)},
        "overflow": {stage: overflow_on_one_rank(stage) for stage in (0, 3)},
        "saved": save_and_load(folder),
        "unsaved": fail_to_save(),
    }


# -- equal to DDP ----------------------------------------------------------------------------------


def ddp_curve(rank: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, norms = [], []
    # WarmupDecayLR, iterations -1, 0 and 1
    for step, rate in zip(range(STEPS), (0.0, 0.0, 0.02), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        for micro in range(ACCUMULATION):
            model.require_backward_grad_sync = micro == ACCUMULATION - 1
            loss = model(batch(rank, step * ACCUMULATION + micro)).square().mean()
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.module.named_parameters()}, losses, norms


def onefold_curve(
    stage: int, rank: int, **arguments: Any
) -> tuple[dict[str, Tensor], list[float], list[float], Any]:
    engine, _, _, _ = onefold.initialize(
        model=arguments.pop("model", None) or build(), config=config(stage), **arguments
    )
    losses, norms = [], []
    for index in range(STEPS * ACCUMULATION):
        loss = engine(batch(rank, index)).square().mean()
        scaled = engine.backward(loss)
        assert torch.equal(scaled, loss / ACCUMULATION)
        assert engine.is_gradient_accumulation_boundary() == (index % 2 == 1)
        engine.step()
        assert engine.was_step_applied() == (index % 2 == 1)
        losses.append(loss.item())
        if index % 2:
            norms.append(engine.get_global_grad_norm())
    return onefold.full_state_dict(engine.module), losses, norms, engine


def differences(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> float:
    """The largest difference of weights, losses and norms."""
    weights = [float((ours[0][n] - theirs[0][n]).abs().max()) for n in theirs[0]] if ours[0] else []
    return max(
        [*weights, *(abs(a - b) for i in (1, 2) for a, b in zip(ours[i], theirs[i], strict=True))]
    )


def train_every_stage() -> dict[str, Any]:
    rank = dist.get_rank()
    theirs = ddp_curve(rank)
    found: dict[str, Any] = {"norms": theirs[2]}
    curves = {}
    for stage in range(4):
        ours = onefold_curve(stage, rank)
        engine = ours[3]
        found[f"stage {stage}"] = differences(ours, theirs)
        found[f"counts {stage}"] = (
            engine.global_steps,
            engine.micro_steps,
            engine.skipped_steps,
            engine.global_samples,
        )
        found[f"rates {stage}"] = engine.get_lr()
        curves[stage] = ours
    # With accumulation the order of the sums is that of the traffic: micro-batches first (0, 1), or
    # ranks first (2, 3).
    found["stages differ by"] = max(differences(curves[a], curves[b]) for a, b in ((0, 1), (2, 3)))
    return found


def test_training_through_the_engine_equals_ddp_at_every_stage(found: list[dict[str, Any]]) -> None:
    for seen in (rank["train"] for rank in found):
        assert all(norm > 0.2 for norm in seen["norms"]), (
            f"clipping never acts in this test: {seen}"
        )
        assert seen["stages differ by"] == 0.0, seen
        for stage in range(4):
            assert seen[f"stage {stage}"] < 2e-6, seen
            assert seen[f"counts {stage}"] == (
                STEPS,
                STEPS * ACCUMULATION,
                0,
                STEPS * ACCUMULATION * 4 * 2,
            ), seen
            assert seen[f"rates {stage}"] == pytest.approx([0.02]), seen


# -- optimizers of one's own -----------------------------------------------------------------------


def optimizers_of_ones_own() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    reference = onefold_curve(3, rank)
    for stage in (0, 2, 3):
        model = build()
        early = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
        made_early = onefold_curve(stage, rank, model=model, optimizer=early)
        assert made_early[3].optimizer is early
        made_late = onefold_curve(
            stage,
            rank,
            optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, fused=True),
        )
        found[f"late {stage}"] = differences(made_late, made_early)
        found[f"early {stage}"] = differences(made_early, reference) if stage else 0.0
    return found


def test_an_optimizer_made_before_sharding_or_by_a_function_serves_as_well(
    found: list[dict[str, Any]],
) -> None:
    for seen in (rank["optimizers"] for rank in found):
        assert set(seen.values()) == {0.0}, seen


def part_of_the_parameters() -> tuple[bool, bool]:
    model = build()
    groups = [{"params": list(model.head.parameters()), "lr": 0.5}]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, optimizer, _, _ = onefold.initialize(
        model=model, model_parameters=groups, config=config(2, scheduler=None)
    )
    assert optimizer.param_groups[0]["lr"] == 0.5 and engine.get_lr() == [0.5]
    for index in range(ACCUMULATION):
        engine.backward(engine(batch(dist.get_rank(), index)).square().mean())
        engine.step()
    assert all(p.grad is None for p in model.parameters()), (
        "gradients outside the optimizer must not pile up"
    )
    after = onefold.full_state_dict(model)
    same = [name for name in after if torch.equal(after[name], before[name])]
    return "head.weight" in same, all(name in same for name in after if name != "head.weight")


def test_model_parameters_may_be_groups_over_a_part_of_the_model(
    found: list[dict[str, Any]],
) -> None:
    head_same, rest_same = found[0]["part"]
    assert not head_same and rest_same


# -- traffic ---------------------------------------------------------------------------------------


def bytes_of_two_micro_batches(stage: int) -> tuple[int, int, int]:
    """Bytes sent in the backward pass of the first and of the second micro-batch, and Ψ in
    bytes.
    """
    model = build()
    size = 4 * sum(p.numel() for p in model.parameters())
    engine, *_ = onefold.initialize(model=model, config=config(stage))
    sent = []
    for index in range(ACCUMULATION):
        loss = engine(batch(dist.get_rank(), index)).square().mean()
        before = onefold.engine_of(model).traffic.total()
        engine.backward(loss)
        sent.append(onefold.engine_of(model).traffic.total() - before)
        engine.step()
    return sent[0], sent[1], size


@pytest.mark.parametrize("stage", [0, 1])
def test_nothing_is_sent_before_the_boundary_at_stages_0_and_1(
    stage: int, found: list[dict[str, Any]]
) -> None:
    first, second, size = found[0]["traffic"][stage]
    assert first == 0 and second >= size // 2, f"first {first}, second {second}, model {size} bytes"


# -- fp16 ------------------------------------------------------------------------------------------


def overflow_on_one_rank(stage: int) -> dict[str, Any]:
    rank = dist.get_rank()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, _, _, _ = onefold.initialize(
        model=build(), config=config(stage, fp16=fp16, gradient_accumulation_steps=1)
    )
    seen: dict[str, Any] = {"scales": [], "applied": [], "iterations": [], "norms": []}
    for index in range(4):
        before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        loss = engine(batch(rank, index)).float().square().mean()
        if index == 2 and rank == 1:
            loss = loss * math.inf
        engine.backward(loss)
        engine.step()
        same = all(torch.equal(before[n], p.detach()) for n, p in engine.module.named_parameters())
        assert same == (index in (0, 1, 2)), (
            f"index {index}: rates are 0 at first, and an overflow must change nothing"
        )
        seen["scales"].append(engine.cur_scale)
        seen["applied"].append(engine.was_step_applied())
        seen["iterations"].append(engine.lr_scheduler.last_batch_iteration)
        seen["norms"].append(engine.get_global_grad_norm())
    return {
        **seen,
        "counts": (engine.global_steps, engine.skipped_steps),
        "on": engine.fp16_enabled(),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    stage: int, found: list[dict[str, Any]]
) -> None:
    for seen in (rank["overflow"][stage] for rank in found):
        assert seen["scales"] == [256, 256, 128, 128], seen
        assert seen["applied"] == [True, True, False, True], seen
        assert seen["iterations"] == [0, 1, 1, 2], seen
        assert seen["counts"] == (4, 1) and seen["on"], seen
        assert all(0 < n < 50 for i, n in enumerate(seen["norms"]) if i != 2), (
            f"norms must be unscaled: {seen}"
        )


def test_the_loss_scale_follows_deepspeeds_rule() -> None:
    scaler = LossScaler(LossScaling(initial_power=4, window=2, hysteresis=2, minimum=4.0))
    scales = []
    for overflow in (True, True, False, False, False, True, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    # The first overflow uses up the hysteresis, the second halves; two finite steps after one
    # finite step double again.
    assert scales == [16, 8, 8, 8, 16, 16, 8, 4]
    with pytest.raises(FloatingPointError, match="bf16"):
        scaler.update(True)
    fixed = LossScaler(LossScaling(static=64.0))
    fixed.update(True)
    assert fixed.scale == 64.0 and not fixed.dynamic


# -- the rest of the four-tuple --------------------------------------------------------------------


def save_and_load(folder: str) -> tuple[bool, dict[str, torch.dtype], list[str]]:
    bf16 = config(3, bf16={"enabled": True})
    engine, _, loader, _ = onefold.initialize(
        model=build(), config=bf16, training_data=[batch(0, i)[0] for i in range(17)]
    )
    indices = [x.shape for x in loader]
    assert engine.save_16bit_model(folder) and engine.save_16bit_model(folder, "model.safetensors")
    assert Path(folder, "pytorch_model.bin").is_file()
    state = torch.load(Path(folder, "pytorch_model.bin"))
    expected = build().state_dict()
    whole = (
        all(torch.equal(state[n], expected[n].bfloat16()) for n in expected)
        and state.keys() == expected.keys()
    )
    assert indices == [(4, WIDTH), (4, WIDTH), (1, WIDTH)], indices
    return (
        whole,
        {n: t.dtype for n, t in state.items()},
        sorted(p.name for p in Path(folder).iterdir()),
    )


def test_save_16bit_model_writes_the_whole_model_at_stage_3(found: list[dict[str, Any]]) -> None:
    for whole, dtypes, names in (rank["saved"] for rank in found):
        assert whole and set(dtypes.values()) == {torch.bfloat16}
        assert names == ["model.safetensors", "pytorch_model.bin"]


def fail_to_save() -> str:
    engine, *_ = onefold.initialize(model=build(), config=config(3))
    with pytest.raises(RuntimeError) as caught:
        engine.save_16bit_model("/dev/null/nowhere")
    return str(caught.value)


def test_a_save_that_fails_on_rank_0_raises_on_every_rank(found: list[dict[str, Any]]) -> None:
    assert all("rank 0 could not write" in rank["unsaved"] for rank in found)


def test_one_process_needs_no_process_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            config(3, steps_per_print=1, wall_clock_breakdown=True, wandb={"enabled": True}, odd=1)
        )
    )
    with caplog.at_level(logging.WARNING, logger="onefold"):
        engine, optimizer, loader, schedule = onefold.initialize(model=build(), config=str(path))
    assert (
        caplog.text.count("wandb") == 1 and caplog.text.count("unknown, without effect: odd") == 1
    )
    assert engine.optimizer is optimizer and engine.lr_scheduler is schedule and loader is None
    assert isinstance(optimizer, torch.optim.AdamW) and engine.blocks is engine.module.blocks
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    assert sizes == (8, 4, 2) and engine.zero_optimization_stage() == 3
    for index in range(2):
        engine.backward(engine(batch(0, index)).square().mean())
        engine.step()
    line = capsys.readouterr().out
    assert (
        line.startswith("step 1, skipped 0, lr [0]")
        and "backward" in line
        and line.count("\n") == 1
    )
    engine.eval()
    with torch.no_grad():
        assert engine(batch(0, 9)).shape == (4, 3) and not engine.module.training


def test_wrong_calls_are_sentences() -> None:
    engine, *_ = onefold.initialize(model=build(), config=config(1))
    with pytest.raises(NotImplementedError, match="load by names"):
        engine.load_checkpoint("somewhere", custom_load_fn=print)
    with pytest.raises(ValueError, match="a name for one in it"):
        engine.save_checkpoint("somewhere", "a/b")
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 3\)"):
        engine.backward(engine(batch(0, 0)))
    with engine.no_sync():
        engine.backward(engine(batch(0, 0)).mean())
        with pytest.raises(RuntimeError, match="Leave the block first"):
            engine.step()
    with pytest.raises(AttributeError, match="neither the engine nor its Net has"):
        _ = engine.no_such_thing


def test_a_model_that_is_only_evaluated_needs_no_optimizer() -> None:
    bare, *others = onefold.initialize(model=build().eval(), config={"train_batch_size": 4})
    assert others == [None, None, None] and bare(batch(0, 0)).shape == (4, 3)
    with pytest.raises(RuntimeError, match="needs an optimizer"):
        bare.backward(bare(batch(0, 0)).mean())


AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
}  # fmt: skip


def test_auto_is_refused_at_once_with_what_to_give_in_place_of_it() -> None:
    """The file of a Hugging Face Trainer: every value that it would fill in is named, and those
    that only tune are not.
    """
    with pytest.raises(
        ValueError, match="the Hugging Face Trainer does that from its own arguments"
    ) as told:
        onefold.initialize(model=build(), config=AUTO)
    for words in (
        '"optimizer.params.lr": the learning rate, such as 5e-5', '"gradient_clipping"', '"bf16.enabled": true or false',
        '"train_micro_batch_size_per_gpu": samples', '"scheduler.params.warmup_num_steps"', '"optimizer.params.betas"',
    ):  # fmt: skip
        assert words in str(told.value), (words, told.value)
    assert "bucket_size" not in str(told.value) and "weight_decay" not in str(told.value)
    with pytest.raises(ValueError, match=r'"bf16\.enabled": true or false.*$') as told:
        recipe_from(AUTO)
    assert "optimizer.params.lr" not in str(told.value), "that is no part of a recipe"


def test_auto_that_something_else_decides_is_no_question() -> None:
    """A batch size that follows from the others, fp16 beside bf16, an optimizer and a schedule that
    are passed.
    """
    settled = {
        **AUTO,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
    }
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = onefold.initialize(
        model=model,
        config=settled,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
    )
    assert engine.train_micro_batch_size_per_gpu() == 4 and engine.settings.precision == "bf16"
    assert recipe_from(settled) == onefold.Recipe.zero(1, precision="bf16")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"model": None, "config": {}}, "no model"),
        ({}, "no configuration"),
        ({"config": {}, "config_params": {}}, "more than once, by config and config_params"),
        ({"config": {"gradient_accumulation_steps": 2}}, "no batch size"),
        ({"config": {"train_batch_size": 4}, "optimizer": 3}, "expected a torch optimizer"),
        (
            {"config": {"train_batch_size": 4}, "model_parameters": [nn.Parameter(torch.zeros(2))]},
            "not one of the model",
        ),
        ({"config": {"train_batch_size": 4, "scheduler": {"type": "WarmupLR"}}}, "no optimizer"),
        (
            {"config": {"train_batch_size": 4}},
            r"initialize was given none\. Write one, as in .*AdamW.* call model\.eval\(\) before",
        ),
        ({"config": {"train_batch_size": 4}, "dist_init_required": True}, "start with torchrun"),
    ],
)
def test_arguments_that_cannot_be_raise(arguments: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        onefold.initialize(**{"model": build(), **arguments})


# -- schedules -------------------------------------------------------------------------------------

WARMUP = {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}


@pytest.mark.parametrize(
    ("name", "params", "rates"),
    [
        ("WarmupLR", WARMUP, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4]),
        ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, *(math.log(i) / math.log(4) for i in (2, 3)), 1, 1, 1, 1]),
        ("WarmupDecayLR", {**WARMUP, "total_num_steps": 6}, [0, 0, 0.1, 0.2, 0.3, 0.4, 0.2, 0]),
        ("WarmupCosineLR", {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 4, "cos_min_ratio": 0.2},
         [0, 0, 0.5, 0.6, 0.2, 0.2, 0.2, 0.2]),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2,
          "cycle_second_step_size": 4},
         [0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}, [0.1 + i / 20 for i in range(8)]),
        ("StepLR", {"step_size": 2, "gamma": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
    ],
)  # fmt: skip
def test_schedules_have_deepspeeds_rates(
    name: str, params: dict[str, Any], rates: list[float]
) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule = build_schedule(SchedulerSpec(name, params), optimizer)
    seen = []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx(rates)
    again = build_schedule(
        SchedulerSpec(name, params), torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1.0)
    )
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == pytest.approx(schedule.get_last_lr())


def test_one_cycle_moves_the_momentum_the_other_way() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=1.0)
    params = {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.5,
        "cycle_first_step_size": 2,
        "decay_step_size": 1,
        "decay_lr_rate": 1.0,
    }
    schedule = build_schedule(SchedulerSpec("OneCycle", params), optimizer)
    betas = []
    for _ in range(4):
        betas.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert betas == pytest.approx([0.8, 0.85, 0.8, 0.85])
    schedule.step()
    assert schedule.get_lr() == pytest.approx([0.1 / 2])
