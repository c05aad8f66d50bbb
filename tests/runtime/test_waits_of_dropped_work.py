"""What a failure leaves under way: its memory is given to nobody before it is done."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
import standin
import virtual
from onefold.comm import StallError
from onefold.memory.pool import GATHERED
from ranks import run_ranks
from zoo import TinyGPT, tokens_of

pytestmark = pytest.mark.skipif(not virtual.available(), reason=virtual.why_not())


def fill_what_is_free(engine: Any) -> int:
    """Write to every buffer that the pool would hand out; how many there were."""
    kinds = [(*kind, len(free)) for kind, free in engine.pool._free.items()]
    taken = [
        engine.pool.take(numel, dtype, GATHERED).fill_(1)
        for numel, dtype, count in kinds
        for _ in range(count)
    ]
    return len(taken)


@virtual.alone
def test_a_unit_let_go_after_a_lost_rank_leaves_its_memory_to_what_comes_behind_its_cast() -> None:
    for seed in range(6):
        virtual.reset(seed)
        torch.manual_seed(0)
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(3, precision="bf16"), device="virtual")
        model(tokens_of(0).to("virtual")).backward()
        engine = onefold.engine_of(model)
        engine.pool.drain()
        virtual.drain()
        unit = engine.units[1]
        engine.gather.launch(unit)
        assert unit.arriving
        engine.group.broken = StallError("the others have gone")
        engine.gather.release(unit)
        assert fill_what_is_free(engine) == 1
        engine.group.broken = None


def dropped_reductions(folder: str, options: dict[str, Any]) -> tuple[int, int, list[str]]:
    """On one of two ranks: a backward pass that raises with reductions under way, whose buffers are
    written to as soon as they are dropped. (Buffers, sums that come back, what no wait orders.)
    """
    from waits.trials import _raising_behind

    rank = dist.get_rank()
    virtual.start(seed=None, check=False)
    dist.destroy_process_group()
    standin.register()
    store = dist.FileStore(f"{folder}/virtual", 2)
    dist.init_process_group("cpu:gloo,virtual:standin", store=store, rank=rank, world_size=2)
    filled, gathered, found = 0, 0, []
    for seed in range(6):
        virtual.start(seed=seed)
        torch.manual_seed(0)
        model = onefold.shard(TinyGPT(), onefold.Recipe.zero(**options), device="virtual")
        batch = tokens_of(rank).to("virtual")
        engine = onefold.engine_of(model)
        drop = engine.reduce.drop

        def drop_and_fill(engine: Any = engine, drop: Any = drop) -> None:
            nonlocal filled, gathered
            sums = [
                r.total
                for r in engine.reduce.summed
                if r.gathering is not None and r.total is not None
            ]
            gathered += len(sums)
            like = [(t.numel(), t.dtype) for t in sums]
            del sums
            # What has been moved is held by nobody else, and yet only a wait orders it
            deadline = time.monotonic() + 0.5
            while virtual.pending() and time.monotonic() < deadline:
                time.sleep(0.01)
            drop()
            filled += fill_what_is_free(engine)
            # And what went back to the device's own allocator
            for numel, dtype in like:
                torch.empty(numel, dtype=dtype, device="virtual").fill_(1)

        engine.reduce.drop = drop_and_fill
        _raising_behind(model, model(batch))
        model(batch)  # forgets what the failed pass has left
        virtual.drain()
        found += [str(violation) for violation in virtual.violations()]
    return filled, gathered, found


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "overlap": False},
        {"stage": 1, "in_flight": 5},
        {"stage": 2, "precision": "bf16", "in_flight": 5},
    ],
    ids=lambda options: f"stage {options['stage']}",
)
def test_buffers_of_dropped_reductions_are_given_to_what_comes_behind_them(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for filled, gathered, found in run_ranks(2, dropped_reductions, str(tmp_path), options):
        assert filled >= 6 and (gathered > 0) is (options["stage"] == 0)
        assert found == []


def weights_after(raising: bool, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from waits.trials import _raising_behind

    torch.manual_seed(0)
    model = onefold.shard(TinyGPT(), onefold.Recipe.zero(stall_timeout=20.0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = tokens_of(10 * step + dist.get_rank())
        if raising and step == 1:
            _raising_behind(model, model(batch))
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model)


def a_slow_rank_behind_a_dropped_pass(slow: str, options: dict[str, Any]) -> list[str]:
    """Rank 0 drops its pass before what rank 1 sends in `slow` has come."""
    from onefold.runtime import reduce, reduce_paths

    expected = weights_after(False, options)
    owner: Any = reduce if slow == "broadcast_back" else reduce_paths.PairwiseReduce
    send = getattr(owner, slow)

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return send(*args)

    if dist.get_rank() == 1:
        setattr(owner, slow, slowly)
    got = weights_after(True, options)
    return [name for name, value in expected.items() if not torch.equal(value, got[name])]


def test_sums_that_come_after_their_pass_was_dropped_are_taken_for_no_later_ones() -> None:
    options = {"stage": 0, "overlap": False}
    assert run_ranks(2, a_slow_rank_behind_a_dropped_pass, "broadcast_back", options) == [[], []]


def test_parts_that_come_after_their_pass_was_dropped_find_the_buffer_that_waits_for_them() -> None:
    """On a backend without streams: the buffers are given back behind the messages to them."""
    options = {"stage": 2, "in_flight": 5}
    assert run_ranks(2, a_slow_rank_behind_a_dropped_pass, "start", options) == [[], []]
