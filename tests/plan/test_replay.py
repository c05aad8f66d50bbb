"""What a plan computes in integers is what the engine's ledgers say: at rest, on the wire, and at
peak.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import states
from ranks import run_ranks
from replayed import batch_of, model_of

MIB = 1 << 20


def step_of(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, seed: int
) -> None:
    import onefold

    for k in range(micro_batches):
        last = k + 1 == micro_batches
        with contextlib.nullcontext() if last else onefold.no_sync(model):
            out = model(
                batch_of(
                    kind, 100 * seed + 10 * k + (dist.get_rank() if dist.is_initialized() else 0)
                )
            )
            out.float().square().mean().backward()
    # One rank has no hooks: its ledger sees gradients when it is asked
    onefold.engine_of(model).memory.now()
    optimizer.step()
    optimizer.zero_grad()


def observed_all(kind: str, precision: str) -> list[dict[str, Any]]:
    """All stages, one and three micro-batches, in one go: starting ranks costs more than training
    them.
    """
    return [
        {"setting": f"stage {stage}, {m} micro-batches"} | observed(kind, stage, precision, m, {})
        for stage in (0, 1, 2, 3)
        for m in (1, 3)
    ]


def observed(
    kind: str, stage: int, precision: str, micro_batches: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What the ledgers of a real engine say of a step in the steady state."""
    import onefold
    from onefold.plan.modules import model_shape
    from onefold.plan.replay import Replay
    from onefold.plan.states import at_rest, units_of
    from onefold.plan.wire import wire

    recipe = onefold.Recipe.zero(stage, precision=precision, stall_timeout=30.0, **options)
    shape = model_shape(model_of(kind))
    model = onefold.shard(model_of(kind), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = onefold.engine_of(model)
    for step in range(2):  # the order of units is learned in the first
        step_of(kind, model, optimizer, micro_batches, step)
    rest = engine.memory.now()
    engine.memory.reset_peak()
    engine.traffic.reset()
    step_of(kind, model, optimizer, micro_batches, 2)
    units = units_of(shape, recipe, engine.world_size, engine.rank)
    replay = Replay(units, recipe).run(micro_batches)
    return {
        "rest": rest | {"moments": states.nbytes(optimizer)},
        "wire": engine.traffic.by_move(),
        "peak": engine.memory.peak(),
        "planned rest": at_rest(units),
        "planned wire": wire(units, recipe, micro_batches),
        "planned peak": replay.peak,
        "left": replay.ledger.now(),
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "precision"),
    [
        *(
            (kind, ranks, precision)
            for kind in ("mlp", "gpt", "routed")
            for ranks in (1, 2)
            for precision in ("fp32", "bf16")
        ),
        *(("headed", 2, "fp32"), ("headed", 2, "bf16")),
        *(("mlp", 3, "bf16"), ("gpt", 3, "fp32"), ("routed", 3, "bf16")),
    ],
)
def test_a_plan_in_integers_equals_the_ledgers(kind: str, ranks: int, precision: str) -> None:
    for rank, settings in enumerate(run_ranks(ranks, observed_all, kind, precision)):
        assert len(settings) == 8
        for seen in settings:
            told = f"{seen['setting']}, {precision}, rank {rank} of {ranks}: {seen}"
            assert seen["rest"] == seen["planned rest"], told
            assert seen["wire"] == seen["planned wire"], told
            assert seen["left"] == {k: v for k, v in seen["rest"].items() if k != "moments"}, told
            assert sum(seen["peak"].values()) == sum(seen["planned peak"].values()), told


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"prefetch": 3},
        {"in_flight": 0},
        {"in_flight": 5},
        {"overlap": False},
        {"reshard_after_forward": False},
        {"reduce_at": "boundary"},
    ],
    ids=str,
)
def test_the_options_of_a_recipe_are_in_the_plan(options: dict[str, Any]) -> None:
    for seen in run_ranks(2, observed, "mlp", 3, "fp32", 2, options):
        assert seen["rest"] == seen["planned rest"], seen
        assert seen["wire"] == seen["planned wire"], seen
        assert sum(seen["peak"].values()) == sum(seen["planned peak"].values()), seen


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"precision": "bf16"}, {"gather_codec": "int8"}], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_last_units_leave_the_engines_peak_as_it_is_and_save_a_gather(
    name: str, options: dict[str, Any]
) -> None:
    """Every forward pass ends with them, and every backward pass begins with them."""
    from onefold.plan.replay import Replay
    from onefold.plan.shapes import architecture
    from onefold.plan.states import units_of
    from onefold.plan.wire import wire
    from onefold.recipe import Recipe

    recipe = Recipe.zero(3, **options)
    units = units_of(architecture(name), recipe, 8)
    released = [replace(u, turns=False) for u in units]
    turning = [f for u in units if u.turns for f in u.flats]
    peak, before = (sum(Replay(some, recipe).run(2).peak.values()) for some in (units, released))
    assert peak <= before, f"{name}, {options}: {peak} bytes, released {before}"
    saved = wire(released, recipe, 2)["all-gather"] - wire(units, recipe, 2)["all-gather"]
    assert saved == 2 * 7 * sum(f.each for f in turning) > 0
