"""What `onefold train --stage auto --micro-batch auto` and `onefold.plan.recipe_for` choose off the
plain case; runs take it.
"""

from __future__ import annotations

import os

import torch
from choices import asked
from torch import nn

import onefold
from onefold.plan import api
from onefold.plan.job import Job
from onefold.train.prepare import choose
from ranks import run_ranks
from zoo import Language

MIB = 1 << 20
ROOMY = 1 << 34


def language() -> nn.Module:
    """Some hundred thousand parameters."""
    return Language(vocabulary=257, width=64, heads=2, depth=6, length=64)


def test_whole_gradients_of_accumulation_move_the_choice_from_stage_1_to_2() -> None:
    several = {"global_batch": 2 * 4 * 4}
    peaks = choose(language(), *asked(**several)).needed
    assert peaks[1] > peaks[2]
    assert (
        choose(
            language(), *asked(**several, free=int((peaks[1] + peaks[2]) / 2 / api.USABLE))
        ).stage
        == 2
    )


def test_what_does_not_fit_is_said_and_tried_all_the_same() -> None:
    chosen = choose(language(), *asked(free=MIB))
    assert chosen.stage == 3 and "may run out of memory" in chosen.reason
    assert choose(language(), *asked(stage="1", free=MIB)).stage == 1


def test_what_only_higher_stages_do_does_not_hinder_a_lower_one() -> None:
    config, ranks, free = asked(reduce_at="micro-batch")
    assert config.recipe(choose(language(), config, ranks, free).stage).stage == 1


# -- onefold.plan.recipe_for -----------------------------------------------------------------------


def test_a_recipe_by_itself_fits_one_process() -> None:
    recipe = onefold.plan.recipe_for(language(), seq=16, precision="bf16", prefetch=1)
    assert recipe.stage == 0 and recipe.parameters.dtype is torch.bfloat16 and recipe.prefetch == 1
    model = onefold.shard(language(), recipe)
    ids = torch.zeros((1, 16), dtype=torch.long)
    model(input_ids=ids, labels=ids).float().backward()


def recipe_here(free: tuple[int, int], seq: int) -> int | None:
    """The stage that this rank gets when the ranks have this much free."""
    import torch.distributed as dist

    api.free_host_memory = lambda: 2 * free[dist.get_rank()]
    recipe = onefold.plan.recipe_for(language(), seq=seq)
    onefold.shard(language(), recipe)
    return recipe.stage


def nodes_here(launcher: list[str]) -> list[int]:
    """The ranks of a node, for what a launcher says to the two ranks: one text for each."""
    import torch.distributed as dist

    found = []
    api.device_count = lambda: 0
    for said in launcher:
        os.environ["LOCAL_WORLD_SIZE"] = said.split(",")[dist.get_rank()]
        found.append(api._here(Job(), 2).local)
    return found


def test_two_ranks_agree_on_their_nodes_whatever_the_launcher_says() -> None:
    launcher, expected = ["2,2", "1,1", "2,1", ",", "0,0", "8,8"], [2, 1, 1, 2, 2, 2]
    assert run_ranks(2, nodes_here, launcher) == [expected, expected]


def test_two_ranks_agree_on_what_fits_the_one_that_has_least() -> None:
    peaks = choose(language(), *asked(ranks=2, local_ranks=2, micro_batch=1, seq=16)).needed
    tight = int((peaks[2] + peaks[3]) / 2 / api.USABLE)
    assert run_ranks(2, recipe_here, (ROOMY, ROOMY), 16) == [1, 1]
    assert run_ranks(2, recipe_here, (ROOMY, tight), 16) == [3, 3]
