"""`--stage auto` where state rests off the device: the plan's figures decide
(tests/promises/table.py has engines beside them).
"""

from __future__ import annotations

from typing import Any

import choices
import pytest
from torch import nn

from onefold.memory import MOMENTS
from onefold.plan import api
from onefold.train.prepare import choose
from zoo import Language


def language(depth: int = 24) -> nn.Module:
    """Many blocks, so that one of them is little of the whole."""
    return Language(width=64, depth=depth, length=32)


def asked(tiers: dict[str, Any] | None = None, **changes: Any) -> choices.Asked:
    return choices.asked(
        **{"micro_batch": 1, "seq": 16, "ranks": 2, "local_ranks": 2, **changes, **(tiers or {})}
    )


EVERYTHING = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme": ["/nvme"]}
ON_DISK = {"offload_optimizer": "nvme", "nvme": ["/nvme"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_off_the_device_mean_stage_3_however_many_ranks(ranks: int) -> None:
    chosen = choose(language(2), *asked(ranks=ranks, local_ranks=ranks, tiers=EVERYTHING))
    assert chosen.stage == 3 and set(chosen.needed) == {3}
    assert (
        chosen.planned is not None
        and chosen.planned.account.offloaded["nvme"]
        and "on NVMe" in chosen.reason
    )


def test_what_fits_at_no_stage_fits_with_its_states_on_nvme() -> None:
    whole, away_ = (
        choose(language(), *asked()).needed,
        choose(language(), *asked(tiers=ON_DISK)).needed,
    )
    assert away_[3] < whole[3], (whole, away_)
    tight = int((whole[3] + away_[3]) / 2 / api.USABLE)
    assert "may run out of memory" in choose(language(), *asked(free=tight)).reason
    chosen = choose(language(), *asked(free=tight, tiers=ON_DISK))
    assert "may run out" not in chosen.reason and chosen.planned is not None
    assert (
        chosen.planned.account.rest.get(MOMENTS, 0) == 0
        and chosen.needed[chosen.stage] <= chosen.available
    )
