"""Invariant 5 on a native backend, which has no tags: ranks that diverge train as over gloo, or
stop with a sentence on every rank.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import standin
from invariants.test_diverging_ranks import (
    GROUPS,
    HANG,
    PATIENCE,
    STALL_TIMEOUT,
    ChosenByNobody,
    DropsBlocks,
    IgnoresTheTail,
    LayerDrop,
    OtherOrder,
    _told,
    assert_stalled,
    four_steps,
    said_when_given_up,
)
from ranks import outcomes_of, run_ranks
from trials import STAGES, Case, differences, train_sharded
from zoo import ResidualBlock, TinyMLP

ALONE: list[tuple[int, dict[str, Any]]] = [
    *((stage, {}) for stage in STAGES),
    (0, {"in_flight": 0}),
    (3, {"prefetch": 2}),
]
OVER: list[tuple[int, dict[str, Any]]] = [
    (0, {"group": 2}), (3, {"group": 2}), (3, {"shard_group": 2}), (3, {"group": 2, "second_copy": True, "reduce_codec": "int8"}),
]  # fmt: skip


def other_branches(asked: list[tuple[int, dict[str, Any], int]]) -> list[str]:
    """Ranks go different ways through the model, and different ways back: bit by bit as over
    gloo.
    """
    group, found = standin.new_group(), []
    cases: list[Any] = [
        LayerDrop,
        ChosenByNobody,
        lambda: IgnoresTheTail(dist.get_world_size() - 2, None),
    ]
    for stage, options, number in asked:
        expected: Any = train_sharded(cases[number](), stage, **options)
        native = train_sharded(cases[number](), stage, process_group=group, **options)
        found += differences(f"case {number}, stage {stage}, {options}", expected, native, 0.0, 0.0)
    return found


@pytest.mark.parametrize(
    ("world_size", "recipes"), [(2, ALONE), (4, OVER)], ids=["2", "4, in groups"]
)
def test_ranks_that_take_other_branches_train_as_over_gloo(
    world_size: int, recipes: Any, sample: Any
) -> None:
    cases = sample([(*recipe, number) for recipe in recipes for number in range(3)], 5)
    assert run_ranks(world_size, other_branches, cases) == [[]] * world_size


def in_another_order(case: type[Case], stage: int) -> list[str]:
    expected = train_sharded(case(), 1)
    return differences(
        f"stage {stage}",
        expected,
        train_sharded(case(), stage, process_group=standin.new_group()),
        0.0,
        0.0,
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_in_another_order_on_one_rank_train_right_or_are_told(stage: int) -> None:
    """NCCL takes a unit's bytes for another's where they have one size: the ranks say so before
    anything is stepped.
    """
    outcomes = outcomes_of(2, in_another_order, OtherOrder, stage, timeout=HANG)
    told = _told(outcomes)
    if any(o.error for o in outcomes):
        for outcome in outcomes:
            assert outcome.error == "StallError" and outcome.seconds < PATIENCE, told
            assert "in different orders" in outcome.message or "gave up" in outcome.message, told
    else:
        assert [o.value for o in outcomes] == [[], []], told


def swapped() -> None:
    """Rank 1 gathers two units of one size in the other order, once: nothing fails, and each takes
    one for the other.
    """
    import onefold

    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(3, units=(ResidualBlock,), stall_timeout=STALL_TIMEOUT)
    model = onefold.shard(DropsBlocks(3), recipe, group=standin.new_group())
    engine = onefold.engine_of(model)
    a, b = engine.units[1:3]
    for unit in (a, b) if dist.get_rank() == 0 else (b, a):
        engine.gather.launch(unit)
    for unit in (a, b):
        engine.gather.release(unit)
    model(torch.ones(2, 7)).sum().backward()


def test_units_that_were_taken_for_others_are_told_at_the_end_of_the_backward_pass() -> None:
    for outcome in outcomes_of(2, swapped, timeout=HANG):
        assert outcome.error == "StallError" and "in different orders" in outcome.message, _told(
            [outcome]
        )
        assert "standin matches them by their order" in outcome.message, outcome.message


def train_until(stage: int, event: str, rank: int, step: int, **options: Any) -> None:
    import onefold

    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(
        stage, stall_timeout=STALL_TIMEOUT, units=(ResidualBlock,), **options
    )
    model = onefold.shard(TinyMLP(), recipe, group=standin.new_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with said_when_given_up():
        four_steps(model, optimizer, event, rank, step)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_stops_is_an_error_on_the_one_that_waits(stage: int) -> None:
    outcomes = outcomes_of(2, train_until, stage, "runs out of batches", 1, 2, timeout=HANG)
    told = _told(outcomes)
    assert outcomes[1].error == "", told
    assert_stalled(outcomes[0], told, 2)
    assert "rank 1: not waiting" in outcomes[0].message, told
    assert "at the end of step 1" in outcomes[0].message, (
        f"it should say when it last heard of rank 1: {told}"
    )


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (3, {}), (3, GROUPS["HSDP"])])
def test_a_killed_rank_is_an_error_on_the_others(stage: int, options: dict[str, Any]) -> None:
    outcomes = outcomes_of(
        4 if options else 2, train_until, stage, "dies", 1, 2, timeout=HANG, **options
    )
    told = _told(outcomes)
    for survivor in (o for o in outcomes if o.rank != 1):
        assert survivor.error == "StallError" and survivor.seconds < PATIENCE, told


def in_the_exchange(stage: int) -> float:
    """Rank 1 leaves between its last move and the exchange at the end of its backward pass, which
    no data moves behind.

    It is where a host whose device waits for NCCL learns that a rank does not come.
    """
    import onefold

    torch.manual_seed(0)
    model = onefold.shard(
        TinyMLP(), onefold.Recipe.zero(stage, stall_timeout=2.0), group=standin.new_group()
    )
    loss = model(torch.ones(2, 7)).sum()
    if dist.get_rank() == 1:
        onefold.engine_of(model).group.any_of = lambda bits, context: time.sleep(8) or bits  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        loss.backward()
    finally:
        taken = time.monotonic() - start
    return taken


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_does_not_come_to_the_exchange_is_an_error_there(stage: int) -> None:
    waiting, _ = outcomes_of(2, in_the_exchange, stage, timeout=HANG)
    assert waiting.error == "StallError", waiting
    assert "(end of backward)" in waiting.message and 2.0 <= waiting.seconds < PATIENCE, waiting


def patience() -> list[float]:
    """Seconds of each communicator's own patience."""
    import onefold

    model = onefold.shard(
        TinyMLP(), onefold.Recipe.zero(3, stall_timeout=60.0), group=standin.new_group()
    )
    group = onefold.engine_of(model).group
    return [pg.timeout.total_seconds() for pg in (group.gather_group, group.reduce_group)]


def test_the_backends_own_patience_outlasts_the_stall_timeout_and_the_pass_before() -> None:
    assert run_ranks(2, patience) == [[150.0, 150.0]] * 2
