"""DeepSpeed's schedules as classes: constants of their keys, attributes, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from onefold.integrations.deepspeed.names import lr_schedules
from onefold.integrations.deepspeed.names.table import SERVED


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.Adam(groups, betas=(0.9, 0.99))


def test_every_served_constant_is_the_key_it_names() -> None:
    served = SERVED["deepspeed.runtime.lr_schedules"]
    keys = [name for name in served if name.isupper() and name.startswith(("CYCLE", "DECAY"))]
    assert len(keys) == 12
    for name in keys:
        assert getattr(lr_schedules, name) == name.lower()
    assert (lr_schedules.WARMUP_LOG_RATE, lr_schedules.ONE_CYCLE) == ("log", "OneCycle")
    with pytest.raises(AttributeError, match="no attribute 'CYCLE_NO_SUCH_KEY'"):
        _ = lr_schedules.CYCLE_NO_SUCH_KEY


def test_a_warmup_takes_each_groups_own_rate_and_says_its_parameters() -> None:
    rates = optimizer(0.1, 0.2)
    schedule = lr_schedules.WarmupLR(rates, warmup_num_steps=10)
    assert isinstance(schedule, lr_schedules.WarmupLR)
    assert not isinstance(schedule, lr_schedules.WarmupDecayLR)
    assert (schedule.min_lrs, schedule.max_lrs) == ([0.0, 0.0], [0.1, 0.2])
    assert (schedule.warmup_num_steps, schedule.warmup_type) == (10, "log")
    schedule.step(10)
    assert [group["lr"] for group in rates.param_groups] == [0.1, 0.2]
    cosine = lr_schedules.WarmupCosineLR(
        optimizer(0.1), total_num_steps=100, warmup_num_steps=10, warmup_type="linear"
    )
    cosine.step(3)
    assert cosine.get_lr() == pytest.approx([0.03]) and cosine.warmup_type == "linear"


def test_one_rate_for_groups_of_different_rates_says_what_it_replaces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rates(**params: Any) -> list[float]:
        held = optimizer(0.05, 0.001)  # as muon_lr and lr make them
        schedule = lr_schedules.WarmupLR(held, warmup_num_steps=2, **params)
        for _ in range(4):
            schedule.step()
        return [group["lr"] for group in held.param_groups]

    assert rates() == [0.05, 0.001] and rates(warmup_max_lr=[0.02, 0.01]) == [0.02, 0.01]
    assert not caplog.text
    assert rates(warmup_max_lr=0.003) == [0.003, 0.003]
    assert "one rate, 0.003, for 2 parameter groups, whose own rates 0.05, 0.001" in caplog.text


def test_a_rate_in_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    held = optimizer(rate)
    schedule = lr_schedules.WarmupLR(held, warmup_num_steps=10)
    schedule.step(1)
    assert held.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1 * math.log(2) / math.log(10))


def test_an_unknown_warmup_counts_as_logarithmic_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = lr_schedules.WarmupLR(optimizer(0.1), warmup_num_steps=10, warmup_type="cubic")
    schedule.step(1)
    assert schedule.get_lr() == pytest.approx([0.1 * math.log(2) / math.log(10)])
    assert "expected 'log' or 'linear'" in caplog.text


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("WarmupLR", {"warmup_num_steps": -5}, "warmup_num_steps=-5"),
        (
            "WarmupDecayLR",
            {"total_num_steps": 9, "warmup_num_steps": None},
            "warmup_num_steps=None",
        ),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": -1}, "warmup_num_steps=-1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0},
            "cycle_first_step_size=0",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": -1},
            "cycle_second_step_size=-1",
        ),
    ],
)
def test_steps_that_no_schedule_can_have_are_refused(
    name: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        getattr(lr_schedules, name)(optimizer(0.1), **params)
