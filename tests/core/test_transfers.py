"""What an engine moves to the host and back: it ends when its copies have ended, whatever is under
way.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import onefold
import virtual
from onefold.memory import STAGING, MemoryLedger
from onefold.offload.transfers import Transfers

DEVICE = "virtual:0"


def transfers() -> Transfers:
    engine: Any = SimpleNamespace(
        recipe=onefold.Recipe.zero(1),
        rank=0,
        world_size=1,
        device=torch.device(DEVICE),
        memory=MemoryLedger(),
    )
    return Transfers(engine)


@virtual.alone
def test_closing_waits_for_what_goes_down_into_host_memory_that_is_about_to_go() -> None:
    for seed in range(5):
        virtual.reset(seed)
        moving, source = transfers(), torch.full((4096,), 2.0, device=DEVICE)
        low = moving.pool.fresh(4096, torch.float32)
        moving.down.copy(low, source)
        moving.close()
        assert virtual.cpu_alias(low).eq(2.0).all(), (
            "the host's memory was given back before the copy had written to it"
        )


@virtual.alone
def test_closing_waits_for_what_goes_up_from_buffers_that_are_about_to_go() -> None:
    for seed in range(5):
        virtual.reset(seed)
        moving, into = transfers(), torch.zeros(4096, device=DEVICE)
        whole = moving.pool.take(4096, torch.float32, STAGING, "unit")
        whole.fill_(3.0)
        moving.rise(into, whole)
        moving.close()
        assert virtual.cpu_alias(into).eq(3.0).all(), (
            "the buffer was given back before the copy had read it"
        )
