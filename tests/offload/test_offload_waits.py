"""What rests on the host and is being copied up may be given new values, or let go, at any time."""

from __future__ import annotations

from typing import Any

import torch

import onefold
import virtual
from models import TinyGPT, tokens_of
from onefold.comm import StallError


def offloaded(**options: Any) -> Any:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(
        3, precision="bf16", offload_optimizer="cpu", offload_param="cpu", **options
    )
    model = onefold.shard(TinyGPT(), recipe, device="virtual")
    model(tokens_of(0).to("virtual")).backward()  # now what a pass needs is there
    return model


@virtual.alone
def test_new_values_of_a_unit_whose_copy_up_is_under_way_wait_for_it() -> None:
    for seed in range(5):
        virtual.reset(seed)
        model = offloaded()
        engine = onefold.engine_of(model)
        unit = engine.units[1]
        [flat] = unit.flats
        assert flat.storage.offloaded
        before = flat.storage.shown.to(torch.bfloat16)
        engine.gather.launch(unit)
        flat.storage.stepped(0, flat.storage.numel, torch.full_like(flat.storage.shown, 7.0))
        engine.gather.wait(unit)
        assert flat.full is not None and torch.equal(flat.full[: before.numel()].cpu(), before), (
            "the copy took the new values"
        )
        engine.gather.release(unit)


@virtual.alone
def test_a_unit_let_go_by_ranks_that_have_lost_each_other_leaves_no_copy_behind_in_its_memory() -> (
    None
):
    for seed in range(5):
        virtual.reset(seed)
        model = offloaded()
        engine = onefold.engine_of(model)
        [flat] = engine.units[1].flats
        engine.gather.launch(engine.units[1])
        engine.group.broken = StallError("the others have gone")
        engine.gather.release(engine.units[1])
        engine.pool.drain()
        # Whoever gets that memory next
        torch.empty(flat.layout.numel, dtype=torch.bfloat16, device="virtual").fill_(1.0)
        engine.group.broken = None
