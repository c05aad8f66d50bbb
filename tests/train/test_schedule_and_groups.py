"""The learning rate over a run, which parameters decay, and which stage is chosen."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from onefold.train.choose import choose_stage, state_bytes
from onefold.train.errors import TrainError
from onefold.train.groups import names_without_decay, parameter_groups
from onefold.train.machine import free_host_memory, physical_cores, process_memory, readable
from onefold.train.schedule import lr_factor, warmup_steps

GIB = 1 << 30


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_schedules_rise_to_the_peak_and_fall_to_the_minimum(kind: str) -> None:
    factor = lr_factor(kind, steps=100, warmup=10, minimum=0.1)
    values = [factor(step) for step in range(101)]
    assert 0 < values[0] < values[9] < 1 and values[10] == 1
    assert all(a >= b for a, b in itertools.pairwise(values[10:]))
    assert values[100] == pytest.approx(0.1)
    assert factor(5000) == pytest.approx(0.1)


def test_constant_stays_and_wsd_holds_before_it_falls() -> None:
    assert {lr_factor("constant", 10, 0, 0.1)(step) for step in range(10)} == {1.0}
    assert lr_factor("wsd", 100, 10, 0.0)(79) == 1 > lr_factor("wsd", 100, 10, 0.0)(81)
    with pytest.raises(TrainError, match="expected constant"):
        lr_factor("step", 10, 0, 0.1)


def test_warmup_is_steps_or_a_share() -> None:
    assert (warmup_steps(5, 100), warmup_steps(0.1, 40), warmup_steps(0, 40)) == (5, 4, 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(nn.Parameter(self.norm.weight.detach().clone()))


def test_matrices_decay_and_nothing_else_does() -> None:
    model = Model()
    no_decay = names_without_decay(model)
    model.layer.bias.requires_grad_(False)
    decayed, others = parameter_groups(model.named_parameters(), no_decay, 0.1)
    assert [p is model.layer.weight for p in decayed["params"]] == [True]
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {id(p) for p in others["params"]} == {id(model.embed.weight), id(model.norm.weight), id(model.norm.bias), id(model.gain)}


def test_state_bytes_follow_the_table() -> None:
    psi, n = 1_000_000, 4
    assert [state_bytes(s, n, "fp32", psi) for s in range(4)] == [16 * psi, 8 * psi + 2 * psi, 4 * psi + 3 * psi, 4 * psi]
    assert [state_bytes(s, n, "bf16", psi) for s in range(4)] == [18 * psi, 6 * psi + 3 * psi, 2 * psi + 4 * psi, 18 * psi // 4]
    assert state_bytes(3, n, "fp32", 0, frozen=psi) == psi


@pytest.mark.parametrize(("free", "stage"), [(100, 1), (11, 2), (8, 3), (1, 3)])
def test_auto_takes_the_lowest_stage_that_fits(free: int, stage: int) -> None:
    choice = choose_stage("auto", 4, "fp32", GIB, 0, free * GIB)
    assert choice.stage == stage and str(stage) in choice.reason
    assert choice.available == int(free * GIB * 0.8)
    assert choose_stage("auto", 1, "fp32", GIB, 0, free * GIB).stage == 0
    assert choose_stage("0", 4, "fp32", GIB, 0, free * GIB).stage == 0


def test_the_machine_answers() -> None:
    assert physical_cores() >= 1 and free_host_memory() > 0
    now, peak = process_memory()
    assert 0 < now <= peak
    assert (readable(10), readable(2048), readable(513 << 20), readable(3 << 39)) == ("10 B", "2 KiB", "513 MiB", "1.5 TiB")
