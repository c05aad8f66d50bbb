"""How much of the optimizer's states leaves the device under a share or a budget."""

from __future__ import annotations

import math

import pytest
from torch import nn

import looks
import onefold
from on_ranks import on_ranks
from reference import adamw, built, train
from zoo import features_of

UNITS, WIDTH, RANKS = 5, 64, 2
#: Elements of a unit on a rank; no size of it has padding.
ELEMENTS = WIDTH * WIDTH // RANKS


def check(given: float | str, stage: int, **options: object) -> None:
    """As many units leave the device as `given` says."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
    recipe = onefold.Recipe.zero(
        stage, precision="bf16", offload_optimizer="cpu", offload_amount=given, **options
    )
    model = onefold.shard(built(lambda: nn.Sequential(*layers)), recipe)
    optimizer = adamw(model)
    train(model, optimizer, [features_of(0, 4, WIDTH)])
    # At least a share; a budget is never exceeded: masters, two moments and a gradient in fp32
    gone = (
        math.ceil(given * UNITS)
        if isinstance(given, float)
        else int(given.removesuffix("KB")) * 1000 // (4 * 4 * ELEMENTS)
    )
    held = looks.held(model, optimizer)
    for tier, units in (("host", gone), ("device", UNITS - gone)):
        masters = held.get(tier, {}).get("master weights", 0)
        moments = held.get(tier, {}).get("moments", 0)
        assert masters == 4 * ELEMENTS * units, f"{tier}: {held}"
        assert 0 <= moments - 8 * ELEMENTS * units <= 8 * UNITS, f"{tier}: {held}"  # step counts


@on_ranks(RANKS)
@pytest.mark.parametrize("given", [0.3, 0.6, 1.0, "40KB", "100KB"])
@pytest.mark.parametrize("stage", [1, 3])
def test_as_many_units_leave_the_device_as_a_share_or_a_budget_says(
    stage: int, given: float | str
) -> None:
    check(given, stage)


@on_ranks(2 * RANKS)
def test_a_budget_is_of_a_rank_also_where_states_are_divided_inside_groups() -> None:
    check("100KB", 3, shard_group=RANKS)
