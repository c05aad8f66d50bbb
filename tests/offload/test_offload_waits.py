"""What rests on the host and is being copied up may be given new values, or let go, at any time."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import onefold
import virtual
from models import TinyGPT, tokens_of
from onefold.comm import StallError
from onefold.device import new_stream, use_stream
from onefold.device.copies import CopyStream
from onefold.memory import pool
from onefold.offload.activations import ActivationStore


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
