"""What a plan says of optimizers that step whole matrices: states, bytes and buffers are those of the
ledgers, and owners have about as much to do as the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import states
from on_ranks import on_ranks, slow
from onefold.plan.api import plan
from onefold.plan.modules import model_shape
from onefold.plan.owned import owned_matrices, stepped_whole
from onefold.plan.program import Program
from onefold.plan.rank import at_rest, units_of
from replayed import batch_of, model_of

WHOLE_ONES: dict[str, Any] = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}


def check(optimizer: str, stage: int, options: dict[str, Any]) -> None:
    """On a rank: the ledgers of a step in the steady state, with AdamW for what is not stepped whole,
    are what the plan says of this rank; owners differ.
    """
    recipe = onefold.Recipe.zero(stage, precision="bf16", stall_timeout=60.0, **options)
    shape, rank = model_shape(model_of("gpt")), dist.get_rank()
    model = onefold.shard(model_of("gpt"), recipe)
    engine, names = onefold.engine_of(model), stepped_whole(shape, optimizer)
    named = dict(model.named_parameters())
    optimizers = [WHOLE_ONES[optimizer]([named[n] for n in sorted(names)], lr=1e-3)]
    if rest := [p for n, p in named.items() if n not in names]:
        optimizers.append(torch.optim.AdamW(rest, lr=1e-3, fused=True))
    for step in range(3):  # the order of units is learned in the first
        if step == 2:
            at_rest_now = engine.memory.now()
            engine.memory.reset_peak()
            engine.traffic.reset()
        model(batch_of("gpt", 10 * step + rank)).float().square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    units = units_of(shape, recipe, engine.world_size, rank)
    mine = owned_matrices(units, names, optimizer, own=True)
    assert mine is not None
    held = sum(map(states.nbytes, optimizers))
    assert at_rest_now == at_rest(units, optimizer, 0)
    assert held == (mine.host_states if "offload_optimizer" in options else mine.states) > 0
    planned = Program(units, recipe, optimizer=optimizer, owned=mine)
    assert engine.traffic.by_move() == planned.bytes_of("move") | {"owners": mine.sent}
    assert sum(engine.memory.peak().values()) == sum(planned.peak.values())
    every: list[int] = [0] * engine.world_size
    dist.all_gather_object(every, held)
    assert len(set(every)) > 1, "owners differ: the figures are of ranks, not one for all"


@on_ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "stage", "options"),
    [
        *(("muon", stage, {}) for stage in (1, 2, 3)),
        ("muon", 2, {"offload_optimizer": "cpu"}),
        ("adafactor", 3, {}),
    ],
)
def test_states_bytes_and_buffers_of_owners_are_those_of_the_ledgers(
    optimizer: str, stage: int, options: dict[str, Any]
) -> None:
    check(optimizer, stage, options)


@slow
@on_ranks(4)
@pytest.mark.parametrize("options", [{}, {"optimizer_over": "all"}])
def test_owners_over_groups_hold_what_the_plan_says(options: dict[str, Any]) -> None:
    check("muon", 3, {"shard_group": 2, **options})


def test_a_plan_with_muon_has_its_states_bytes_and_seconds() -> None:
    with_muon, with_adamw = (
        plan("llama-3-8b", gpus=64, optimizer=name, stage=3, largest=False)
        for name in ("muon", "adamw")
    )
    muon, adamw = (found.stages[3].account for found in (with_muon, with_adamw))
    model = with_muon.model
    matrices = sum(
        p.numel for u in model.units for p in u.parameters if p.name in stepped_whole(model, "muon")
    )
    # One state for matrices and two for the rest, and at most a tenth more than the mean
    mean = (4 * matrices + 8 * (model.numel - matrices)) / 64
    assert mean < muon.rest["moments"] < 1.1 * mean < adamw.rest["moments"]
    assert set(muon.wire) - set(adamw.wire) == {"owners"}
    assert muon.seconds["optimizer"] > adamw.seconds["optimizer"]
    assert muon.seconds["exposed communication"] > adamw.seconds["exposed communication"]
    assert muon.links["inside"] + muon.links["between"] == pytest.approx(muon.wire_bytes, rel=0.01)
    shown = with_muon.to_json()["stages"]
    assert shown[0]["owners"]["ranks"] == 1  # at stage 0 every rank steps all
    assert shown[3]["owners"]["matrices"] == 224 and 1 <= shown[3]["owners"]["busiest"] <= 1.1
    assert with_adamw.to_json()["stages"][3]["owners"] is None
    lines = [line.split() for line in str(with_muon).splitlines()]
    assert ["busiest", "owner", "over", "the", "mean", "–", "1.06", "1.06", "1.06"] in [
        line[:9] for line in lines
    ]
    assert "owners" in [line[0] for line in lines if line]


def test_a_plan_with_adafactor_counts_rows_and_columns() -> None:
    found = plan("llama-3-8b", gpus=8, optimizer="adafactor", stage=3, largest=False)
    states = sum(
        sum(p.numel // n for n in p.shape[-2:]) if len(p.shape) > 1 else p.numel
        for u in found.model.units
        for p in u.parameters
    )
    mean = (4 * states + 4 * sum(len(u.parameters) for u in found.model.units)) / 8
    moments = found.stages[3].account.rest["moments"]
    assert mean <= moments < 4 * mean  # owners are chosen by work, and not by states
    assert moments < 1e-3 * 4 * found.model.numel / 8
    assert any("adafactor steps 291 parameters whole" in said for said in found.assumptions)
    assert not found.stages[3].account.seconds.get("products")
