"""Units of many bytes: one is gathered ahead and one reduction is in flight, whatever the recipe's
counts allow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.memory import REDUCTION
from onefold.plan import replay
from onefold.plan.modules import model_shape
from onefold.plan.replay import Replay
from onefold.plan.shapes import architecture
from onefold.plan.states import bound_of, units_of
from onefold.recipe.core import LARGE_TRAFFIC
from onefold.runtime import schedule
from onefold.runtime.reduce_paths import Reduction
from ranks import run_ranks

WIDTH, LAYERS = 24, 9
UNIT = 4 * (WIDTH * WIDTH + 64)  # with the padding behind the bias


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def limit(nbytes: int) -> None:
    """Let units be large from these bytes on, and none be small."""
    for module in (schedule, replay):
        module.SMALL_TRAFFIC, module.LARGE_TRAFFIC = 0, nbytes


def at_once(nbytes: int, in_flight: int, prefetch: int) -> tuple[int, int]:
    """The most reductions that stay in flight, and units gathered ahead of their use, in a step."""
    limit(nbytes)
    recipe = onefold.Recipe.zero(3, in_flight=in_flight, prefetch=prefetch)
    model = onefold.shard(layers(), recipe, units=(nn.Linear,))
    engine = onefold.engine_of(model)
    flying, ahead = [0], [0]
    land, look = engine.reduce._land_what_is_due, engine.gather._look_ahead

    def landed() -> None:
        land()
        flying.append(len(engine.reduce.under_way))

    def looked(cursor: Any) -> None:
        look(cursor)
        ahead.append(sum(not unit.leases.used for unit in engine.gather.gathered.values()))

    for _ in range(3):
        engine.reduce._land_what_is_due, engine.gather._look_ahead = landed, looked
        model(torch.randn(3, WIDTH)).square().mean().backward()
        model.zero_grad()
    return max(flying), max(ahead)


@pytest.mark.parametrize(
    ("nbytes", "in_flight", "prefetch", "expected"),
    [
        (1 << 30, 4, 3, (4, 3)),
        (0, 4, 3, (1, 1)),
        (3 * UNIT, 4, 3, (1, 3)),
        (6 * UNIT, 4, 5, (3, 5)),
        (6 * UNIT, 0, 0, (0, 0)),
    ],
)
def test_large_units_move_one_at_a_time_and_others_as_the_recipe_says(
    nbytes: int, in_flight: int, prefetch: int, expected: tuple[int, int]
) -> None:
    """A reduction counts with what it sends and what it receives."""
    found = run_ranks(2, at_once, nbytes, in_flight, prefetch)
    assert found == [expected] * 2, found


def planned(nbytes: int, options: dict[str, Any]) -> dict[str, int]:
    limit(nbytes)
    recipe = onefold.Recipe.zero(
        3, precision="bf16", units=(nn.Linear,), stall_timeout=30.0, **options
    )
    model = onefold.shard(layers(), recipe)
    engine, optimizer = onefold.engine_of(model), torch.optim.AdamW(model.parameters())
    for step in range(3):
        if step == 2:
            engine.memory.now()
            engine.memory.reset_peak()
        with onefold.no_sync(model):
            model(torch.randn(3, WIDTH)).float().square().mean().backward()
        model(torch.randn(3, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    units = units_of(model_shape(layers(), (nn.Linear,)), recipe, 4, engine.rank)
    return {
        "peak": sum(engine.memory.peak().values()),
        "planned": sum(Replay(units, recipe).run(2).peak.values()),
        "bound": bound_of(units, recipe, 2),
    }


@pytest.mark.parametrize("options", [{}, {"group": 2}, {"shard_group": 2}], ids=str)
def test_the_plan_counts_the_bytes_of_large_units_as_the_ledger_does(
    options: dict[str, Any],
) -> None:
    options |= {"prefetch": 3, "in_flight": 3}
    peaks = []
    for nbytes in (0, 2 * UNIT, 1 << 30):
        for rank, seen in enumerate(run_ranks(4, planned, nbytes, options)):
            assert seen["peak"] == seen["planned"] <= seen["bound"], (nbytes, rank, seen)
        peaks.append(seen["peak"])
    assert peaks[0] < peaks[1] <= peaks[2], peaks


def test_a_small_unit_behind_a_large_one_is_no_reason_to_wait_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "SMALL_TRAFFIC", 10)
    monkeypatch.setattr(schedule, "LARGE_TRAFFIC", 1000)

    def flying(*reductions: tuple[str, int]) -> bool:
        return bool(
            schedule.are_large([SimpleNamespace(unit=u, sent_bytes=n) for u, n in reductions])
        )

    assert not flying(("head", 900)) and not flying(("head", 900), ("head", 900))
    assert not flying(("head", 900), ("norm", 10))
    assert flying(("head", 900), ("norm", 10), ("block", 100))
    assert flying(("head", 900), ("block", 100), ("block", 5))
    assert not flying(("block 1", 250), ("block 0", 250))
    assert flying(("block 1", 250), ("block 0", 251))


def test_what_is_in_flight_counts_by_its_bytes_on_the_wire_on_every_rank() -> None:
    """A buffer in which a rank has added up gradients is wider than those of other ranks: what is
    due must not depend on it.
    """
    flat: Any = SimpleNamespace(dtypes=SimpleNamespace(wire=torch.bfloat16), hops=())
    unit: Any = None
    narrow, wide = (
        Reduction(unit, flat, (0, 10), [], torch.empty(10, dtype=dtype), (0, 10))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert narrow.sent_bytes == wide.sent_bytes == 20


def test_reductions_of_llama_3_70b_hold_two_pairs_of_buffers_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a unit sends and what it receives, of the one in flight and the one that is launched."""
    recipe = onefold.Recipe.zero(3, precision="bf16")
    units = units_of(architecture("llama-3-70b"), recipe, 8, nccl=True)

    def most() -> int:
        return max(m.held.get(REDUCTION, 0) for m in Replay(units, recipe).run().moments)

    pairs = [2 * sum(2 * f.numel for f in u.flats if f.trainable) for u in units]
    small = sum(pair for pair in pairs if pair < 1 << 20)  # the norm behind the blocks
    assert most() <= max(a + b for a, b in zip(pairs, pairs[1:], strict=False)) + small < 8.1e9
    block = pairs[2]
    assert 2 * block < 6.9e9 and block > LARGE_TRAFFIC
    for module in (schedule, replay):
        monkeypatch.setattr(module, "LARGE_TRAFFIC", 1 << 60)
    assert most() >= 3 * block > 10.2e9
