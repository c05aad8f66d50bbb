"""What a plan says of optimizers that step whole matrices: states, bytes and buffers are those of the
ledgers, and owners have about as much to do as the others.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import states
from onefold.plan.api import plan
from onefold.plan.modules import model_shape
from onefold.plan.owned import OwnedMatrices, owned_matrices, place_of, stepped_whole
from onefold.plan.shapes import ModelShape, Parameter, architecture
from onefold.plan.states import units_of
from onefold.recipe import Recipe
from ranks import run_ranks
from replayed import batch_of, model_of

pytestmark = pytest.mark.one_in(2)

# -- against the ledgers ---------------------------------------------------------------------------


WHOLE_ONES: dict[str, Any] = {"muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}


def observed(
    kind: str, cases: list[tuple[int, str, dict[str, Any]]], optimizer: str = "muon"
) -> list[dict[str, Any]]:
    """What the ledgers of a real engine say of a step with Muon and AdamW, or with Adafactor, in the
    steady state, and what the plan says of this rank, and of the largest of all ranks.
    """
    import onefold
    from onefold.memory import OWNED
    from onefold.plan.replay import Replay
    from onefold.plan.states import at_rest, bound_of
    from onefold.plan.wire import wire

    out = []
    for stage, precision, options in cases:
        recipe = Recipe.zero(stage, precision=precision, stall_timeout=60.0, **options)
        shape = model_shape(model_of(kind))
        model = onefold.shard(model_of(kind), recipe)
        engine, names = onefold.engine_of(model), stepped_whole(shape, optimizer)
        named = dict(model.named_parameters())
        optimizers = [
            WHOLE_ONES[optimizer]([named[n] for n in sorted(names)], lr=1e-3),
        ]
        if len(names) < len(named):
            rest = [p for n, p in named.items() if n not in names]
            optimizers.append(torch.optim.AdamW(rest, lr=1e-3, fused=True))
        for step in range(3):  # the order of units is learned in the first
            if step == 2:
                at_rest_now = engine.memory.now()
                engine.memory.reset_peak()
                engine.traffic.reset()
            output = model(batch_of(kind, 10 * step + dist.get_rank()))
            output.float().square().mean().backward()
            engine.memory.record = step == 2
            for each in optimizers:
                each.step()
                each.zero_grad()
        whole = [n for _, category, _, n in engine.memory.timeline if category == OWNED]
        units = units_of(shape, recipe, engine.world_size, engine.rank)
        owned = owned_matrices(units, names, optimizer)
        assert owned is not None
        mine = owned.at(place_of(units[0].flats[0]))
        replay = Replay(units, recipe).run(1, mine.buffers)
        out.append(
            {
                "case": f"stage {stage}, {precision}, {options}, rank {engine.rank}",
                "rest": at_rest_now,
                "states": sum(map(states.nbytes, optimizers)),
                "sent": engine.traffic.by_move(),
                "peak": engine.memory.peak(),
                "planned rest": at_rest(units, optimizer, 0),
                "planned states": mine.host_states
                if "offload_optimizer" in options
                else mine.states,
                "planned sent": wire(units, recipe) | {"owners": mine.sent},
                "planned peak": replay.peak,
                "buffers": max(itertools.accumulate(whole)),
                "left": sum(whole),
                "bound": bound_of(units, recipe) + owned.most.buffers,
                "most": vars(owned.most),
                "mine": vars(mine),
            }
        )
        engine.close()
    return out


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (stage, precision, {}) for stage in (1, 2, 3) for precision in ("fp32", "bf16")
]
GROUPS: list[tuple[int, str, dict[str, Any]]] = [
    (3, "bf16", {"shard_group": 2}),
    (3, "fp32", {"shard_group": 2, "optimizer_over": "all"}),
]
HOST: list[tuple[int, str, dict[str, Any]]] = [(2, "bf16", {"offload_optimizer": "cpu"})]


@pytest.mark.parametrize(
    ("ranks", "optimizer", "cases"),
    [
        (2, "muon", [*CASES, *HOST]),
        (4, "muon", [*CASES, *GROUPS]),
        (2, "adafactor", [*CASES[-2:], *HOST]),
        (3, "adafactor", [CASES[0], CASES[-1]]),
    ],
)
def test_states_bytes_and_buffers_of_owners_are_those_of_the_ledgers(
    ranks: int, optimizer: str, cases: list[Any]
) -> None:
    every = run_ranks(ranks, observed, "gpt", cases, optimizer, timeout=240.0)
    for of_ranks in zip(*every, strict=True):
        for seen in of_ranks:
            told = json.dumps(seen, indent=1)
            assert seen["rest"] == seen["planned rest"], told
            assert seen["states"] == seen["planned states"] > 0, told
            assert seen["sent"] == seen["planned sent"], told
            assert seen["sent"]["owners"] > 0, told
            assert sum(seen["peak"].values()) == sum(seen["planned peak"].values()), told
            assert seen["buffers"] == seen["mine"]["buffers"] and seen["left"] == 0, told
            # A plan shows the largest of each
            assert sum(seen["peak"].values()) <= seen["bound"], told
            assert all(seen["mine"][name] <= most for name, most in seen["most"].items()), told
        # Owners differ: the figures are of ranks, not one for all
        assert len({seen["states"] for seen in of_ranks}) > 1


# -- balance ---------------------------------------------------------------------------------------


def in_matrices(model: ModelShape) -> ModelShape:
    """The same model with experts that are matrices of their own, as in code with a module each."""

    def cut(p: Parameter) -> list[Parameter]:
        if len(p.shape) != 3:
            return [p]
        experts, rows, columns = p.shape
        name = p.name.replace("experts.", "experts.{}.")
        halves = 2 if "gate_up" in p.name else 1
        return [
            Parameter(f"{name.format(e)}.{half}", (rows // halves, columns))
            for e in range(experts)
            for half in range(halves)
        ]

    units = tuple(
        replace(u, parameters=tuple(part for p in u.parameters for part in cut(p)))
        for u in model.units
    )
    return replace(model, units=units)


@cache
def owners_of(name: str, ranks: int, group: int = 0, form: str = "matrices") -> OwnedMatrices:
    model = architecture(name)
    model = in_matrices(model) if form == "matrices" else model
    recipe = Recipe.zero(3, **({"shard_group": group} if group else {}))
    names = stepped_whole(model, "muon", stacks=form == "stacks")
    found = owned_matrices(units_of(model, recipe, ranks), names, "muon")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "group", "form"),
    [
        ("llama-3-8b", 64, 0, "matrices"),
        ("llama-3-70b", 64, 0, "matrices"),
        ("deepseek-v3", 64, 0, "matrices"),
        ("deepseek-v3", 64, 0, "stacks"),
        ("deepseek-v3", 1024, 0, "matrices"),
        ("llama-3-8b", 1024, 64, "matrices"),
        ("llama-3-70b", 1024, 64, "matrices"),
    ],
)
def test_the_busiest_owner_does_at_most_a_tenth_more_than_the_mean(
    name: str, ranks: int, group: int, form: str
) -> None:
    found = owners_of(name, ranks, group, form).balance
    assert found.ranks == (group or ranks)
    assert 1 <= found.least <= found.busiest <= 1.1, found


# -- what a plan says ------------------------------------------------------------------------------


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
    assert "owners" not in with_adamw.to_json()["stages"][3]
    lines = [line.split() for line in str(with_muon).splitlines()]
    assert ["busiest", "owner", "over", "the", "mean", "–", "1.06", "1.06", "1.06"] in lines
    assert ["to", "and", "from", "owners"] in [line[:4] for line in lines]


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
    assert "adafactor steps all 291 parameters whole" in str(found)
    assert not found.stages[3].account.seconds.get("products")
