"""What rests on the host and is being copied up may be given new values, or let go, at any time."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import onefold
import virtual
from onefold.comm import StallError
from onefold.device import new_stream, use_stream
from onefold.device.copies import CopyStream
from onefold.memory import STAGING, pool
from onefold.offload import in_backward
from onefold.offload.activations import ActivationStore
from onefold.offload.storage import joined
from zoo import TinyGPT, tokens_of


def offloaded(**options: Any) -> Any:
    torch.manual_seed(0)
    tier = "nvme" if "nvme" in options else "cpu"
    recipe = onefold.Recipe.zero(
        3, precision="bf16", offload_optimizer=tier, offload_param=tier, **options
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
def test_a_unit_released_after_a_lost_rank_leaves_no_copy_in_its_memory() -> None:
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


@virtual.alone
def test_the_thread_that_steps_behind_the_backward_pass_works_on_the_ranks_device() -> None:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(
        3, precision="bf16", offload_optimizer="cpu", offload_param="cpu", step_in_backward=True
    )
    model = onefold.shard(TinyGPT(), recipe, device="virtual:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = onefold.engine_of(model)
    seen: list[tuple[bool, int]] = []
    before = engine.masters.about_to_write

    def noted() -> None:
        main = threading.current_thread() is threading.main_thread()
        seen.append((main, torch.accelerator.current_device_index()))
        before()

    engine.masters.about_to_write = noted  # type: ignore[method-assign]
    for step in range(3):
        model(tokens_of(step).to("virtual:1")).backward()
        optimizer.step()
        optimizer.zero_grad()
    behind = [device for main, device in seen if not main]
    assert behind and set(behind) == {1}, seen


@virtual.alone
def test_the_backward_pass_waits_where_too_many_units_wait_for_their_step() -> None:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(0, offload_optimizer="cpu", step_in_backward=True)
    blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    model = onefold.shard(blocks, recipe, device="virtual", units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped: list[int] = []
    held: list[int] = []
    step, landed = in_backward.step_flat, in_backward.InBackwardStepper.landed

    def slowly(optimizer: Any, engine: Any, flat: Any, entries: Any) -> None:
        time.sleep(0.1)
        step(optimizer, engine, flat, entries)
        stepped.append(flat.index)

    def counted(self: Any, flat: Any) -> None:
        landed(self, flat)
        held.append(len(held) + 1 - len(stepped))

    # This process has the test alone
    in_backward.step_flat = slowly
    in_backward.InBackwardStepper.landed = counted  # type: ignore[method-assign]
    for number in range(2):  # the first step is not in the backward pass
        model(torch.ones(2, 16, device="virtual")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(stepped) == 8 * number
    assert len(held) == 8 and max(held) <= in_backward.WAITING, held


@virtual.alone
def test_an_activation_read_on_another_stream_keeps_its_memory_until_it_was_read() -> None:
    device = torch.device("virtual:0")
    for seed in range(6):
        virtual.reset(seed)
        side = CopyStream(device)
        first, second = new_stream(device), new_stream(device)
        with use_stream(first):
            saved = torch.full((4096,), 3.0, device=device)
            ticket = first.record_event()
        with use_stream(second):
            read = ActivationStore._readable(SimpleNamespace(side=side), saved, ticket, first)
            total = read.sum()
        del saved
        with use_stream(first):  # takes the memory that was let go of
            again = torch.empty(4096, device=device).fill_(5.0)
        virtual.drain()
        assert float(total) == 3.0 * 4096 and float(again[0]) == 5.0


@virtual.alone
def test_a_unit_read_ahead_and_let_go_gives_its_buffer_back_when_the_disk_is_done(
    tmp_path: Path,
) -> None:
    model = offloaded(nvme=str(tmp_path))
    engine = onefold.engine_of(model)
    engine.pool.drain()
    unit, store = engine.units[1], engine.transfers.store
    [flat] = unit.flats

    def slowly(*piece: Any) -> None:
        time.sleep(0.3)

    store.fault = slowly
    engine.gather.fetch(unit)
    staging, transfer, direct = flat.storage._fetching
    numel, dtype, at = staging.numel(), staging.dtype, staging.data_ptr()
    del staging
    flat.storage.forget()
    taken = engine.transfers.pool.take(numel, dtype, STAGING, "another").fill_(7.0)
    assert taken.data_ptr() == at and not direct
    transfer.wait()
    assert taken.eq(7.0).all(), "the disk has written to it"


@virtual.alone
def test_buffers_of_chunks_are_used_again_when_the_copies_up_have_read_them(tmp_path: Path) -> None:
    made: list[int] = []
    empty = pool.empty

    def counted(numel: int, *rest: Any) -> torch.Tensor:
        made.append(numel)
        return empty(numel, *rest)

    pool.empty = counted  # this process has the test alone
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(0, offload_optimizer="nvme", nvme=str(tmp_path), chunk=65536)
    blocks = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    model = onefold.shard(blocks, recipe, device="virtual")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    new = []
    for _ in range(5):
        model(torch.ones(2, 256, device="virtual")).square().sum().backward()
        made.clear()
        optimizer.step()
        new.append(len(made))
        optimizer.zero_grad()
    # Six chunks of four buffers each, of which three are under way at a time (read, stepped,
    # written): 24 buffers if none were used again
    assert 0 < max(new) <= 13, new


def waits_of_backward_passes(options: dict[str, Any]) -> list[list[str]]:
    """Where the host waited in the backward pass of each of three micro-batches."""
    torch.manual_seed(0)
    model = onefold.shard(
        TinyGPT(), onefold.Recipe.zero(3, precision="bf16", **options), device="virtual"
    )
    found = []
    for micro in range(3):
        with onefold.no_sync(model) if micro < 2 else nullcontext():
            loss = model(tokens_of(micro).to("virtual"))
            before = len(virtual.synchronizations())
            loss.backward()
        found.append([wait.stack[0] for wait in virtual.synchronizations()[before:]])
    assert all(p.grad is not None for p in model.parameters())
    return found


@virtual.alone
def test_later_micro_batches_make_the_host_wait_no_more_than_the_first() -> None:
    for seed in range(3):
        virtual.reset(seed)
        first, *later = waits_of_backward_passes(
            {"offload_optimizer": "cpu", "offload_param": "cpu"}
        )
        assert all(len(waits) == len(first) <= 2 for waits in later), (first, later)


@virtual.alone
def test_gradients_of_16_bits_come_down_in_32_without_a_wait_of_the_host() -> None:
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(0, precision="bf16", offload_optimizer="cpu")
    model = onefold.shard(TinyGPT(), recipe, device="virtual")
    loss = model(tokens_of(0).to("virtual"))
    before = len(virtual.synchronizations())
    loss.backward()
    waits = [wait.stack[0] for wait in virtual.synchronizations()[before:]]
    assert len(waits) <= 2, waits
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@virtual.alone
def test_gradients_that_the_user_put_in_place_are_added_to_by_the_host() -> None:
    """They lie in no pinned buffer of the engine."""
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(3, precision="fp32", offload_optimizer="cpu")
    model = onefold.shard(TinyGPT(), recipe, device="virtual")
    model(tokens_of(0).to("virtual")).backward()
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    for p in model.parameters():
        p.grad = torch.ones_like(p.grad)  # type: ignore[arg-type]
    model(tokens_of(0).to("virtual")).backward()
    for p, grad in zip(model.parameters(), once, strict=True):
        assert p.grad is not None and torch.equal(p.grad, grad + 1)


def test_neighbours_are_added_to_as_one() -> None:
    low, total = torch.arange(100.0), torch.arange(60.0)
    cuts = [(0, 10), (12, 20), (20, 20), (20, 40), (48, 60)]
    pairs = [(low[30 + a : 30 + b], total[a:b]) for a, b in cuts]
    [(one, part)] = joined(pairs, total)
    assert torch.equal(one, low[30:90]) and torch.equal(part, total)
    elsewhere = torch.zeros(20)
    pairs[3] = (elsewhere, total[20:40])
    first, second, third = joined(pairs, total)
    assert torch.equal(first[0], low[30:50])
    assert torch.equal(second[1], total[20:40]) and second[0].data_ptr() == elsewhere.data_ptr()
    assert torch.equal(third[0], low[78:90]) and torch.equal(third[1], total[48:60])


@virtual.alone
def test_pinned_buffers_of_a_step_on_disk_are_used_again_in_the_next(tmp_path: Path) -> None:
    made: list[int] = []
    empty = pool.empty

    def counted(numel: int, *rest: Any) -> torch.Tensor:
        if len(rest) == 4 and rest[3] is not None:  # pinned
            made.append(numel)
        return empty(numel, *rest)

    pool.empty = counted  # this process has the test alone
    torch.manual_seed(0)
    recipe = onefold.Recipe.zero(
        3, offload_optimizer="nvme", offload_param="nvme", nvme=str(tmp_path), chunk=65536
    )
    blocks = nn.Sequential(nn.Linear(64, 256), *(nn.Linear(256, 256) for _ in range(3)))
    model = onefold.shard(blocks, recipe, device="virtual", units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    new, at_rest = [], []
    for _ in range(6):
        made.clear()
        model(torch.ones(2, 64, device="virtual")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        new.append(len(made))
        at_rest.append(sum(onefold.engine_of(model).transfers.host.now().values()))
    # How many are under way at a time depends on when copies are done
    assert new[0] > 10 and max(new[3:]) <= 2, new
    assert max(at_rest) <= 2 * at_rest[-1], at_rest
