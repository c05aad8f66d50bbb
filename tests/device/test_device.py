"""The room `device` on the virtual device: which device is meant, pinned buffers, and copies that
are right whenever they run.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import virtual
from onefold.device import (
    CopyStream,
    HostBuffers,
    Reading,
    default_device,
    guard,
    has_streams,
    host_empty,
    memory_figures,
    new_stream,
    synchronize,
    use_stream,
    with_index,
)
from onefold.device.streams import clocked
from zoo import TinyGPT, tokens_of


def test_what_has_no_streams_copies_at_once() -> None:
    cpu = torch.device("cpu")
    side, into = CopyStream(cpu), torch.zeros(3)
    assert not has_streams(cpu) and not side.asynchronous
    let_go = []
    assert side.copy(into, torch.ones(3), done=lambda: let_go.append(1)) is None
    assert into.tolist() == [1, 1, 1] and let_go == [1]
    with side.on_stream():
        pass
    side.wait()
    assert side.mark() is None and side.current() is None
    assert memory_figures(cpu) is None and with_index("cpu") == cpu and default_device() == cpu
    assert not HostBuffers(cpu).empty(5, torch.float32).is_pinned()


def test_a_device_that_is_not_there_is_told_of_in_a_sentence() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"device='xpu': torch finds no such device here .*Give a device that is there, or 'cpu'"
        ),
    ):
        with_index("xpu")


def test_shard_says_so_too() -> None:
    import onefold

    with pytest.raises(ValueError, match="device='cuda': torch finds no such device here"):
        onefold.shard(TinyGPT(), onefold.Recipe.zero(0), device="cuda")


@virtual.alone
def test_an_index_means_the_device_that_was_current_when_it_was_asked_for() -> None:
    assert default_device() == torch.device("virtual:0")
    with guard(torch.device("virtual:2")):
        found = with_index("virtual")
        assert found == torch.device("virtual:2") and default_device() == found
    assert with_index("virtual") == torch.device("virtual:0") and with_index(
        "virtual:1"
    ) == torch.device("virtual:1")
    assert has_streams(found)


@virtual.alone
def test_buffers_are_used_again_only_when_nobody_holds_them() -> None:
    device = torch.device("virtual:0")
    buffers = HostBuffers(device)
    first = buffers.empty(1000, torch.float32)
    assert first.is_pinned() and first.shape == (1000,)
    place, second = first.data_ptr(), buffers.empty(1000, torch.float32)
    assert second.data_ptr() != place
    del first
    half = buffers.empty(2000, torch.bfloat16)  # as many bytes
    assert half.data_ptr() == place
    view, _ = half[5:10], second
    del half
    assert buffers.empty(1000, torch.float32).data_ptr() != place, "a view of it was held"
    del view
    assert buffers.empty(1000, torch.float32).data_ptr() == place


@virtual.alone
def test_pinned_memory_begins_on_a_page_where_a_disk_wants_it() -> None:
    t = host_empty(3000, torch.float32, torch.device("virtual:0"), paged=True)
    assert t.is_pinned() and t.data_ptr() % 4096 == 0 and t.numel() == 3000


@virtual.alone
@pytest.mark.parametrize("window", [0, 4096, 1 << 20])
def test_copies_are_right_under_every_schedule_whatever_they_hold(window: int) -> None:
    """Down, changed on the host, and up again: the memory of both ends is handed on as soon as the
    copy stream lets go of it.
    """
    device = torch.device("virtual:0")
    for seed in range(30):
        virtual.reset(seed)
        down, up, pinned = (
            CopyStream(device, window),
            CopyStream(device, window),
            HostBuffers(device),
        )
        results: list[Tensor] = []
        for i in range(12):
            source = torch.full((1024,), float(i), device=device) * 2
            low = pinned.empty(1024, torch.float32)
            ticket = down.copy(low, source)
            del source  # the next one may get its memory
            ticket.synchronize()
            with torch.no_grad():
                low.add_(1)
            into = torch.empty(1024, device=device)
            raised = up.copy(into, low)
            del low
            up.order(raised)
            results.append(into * 10)
            del into
        assert [r[0].item() for r in results] == [10 * (2 * i + 1) for i in range(12)]
        assert all(bool((r == r[0]).all()) for r in results)
        assert [str(v) for v in virtual.violations()] == []


@virtual.alone
def test_the_window_bounds_what_copies_hold_and_the_stream_waits_not_the_host() -> None:
    device = torch.device("virtual:0")
    for seed in range(20):
        virtual.reset(seed)
        down, held, peak = CopyStream(device, window=3 * 4096), 0, 0
        pinned, lows = HostBuffers(device), []

        def let_go() -> None:
            nonlocal held
            held -= 1

        with virtual.no_synchronization():
            for i in range(20):
                source = torch.full((1024,), float(i), device=device)
                lows.append(pinned.empty(1024, torch.float32))
                held += 1
                down.copy(lows[-1], source, done=let_go)
                peak = max(peak, held)
                del source
        assert peak <= 4, f"{peak} shards of 4 KiB were held with a window of three"
        down.wait()
        assert held == 0
        for i, low in enumerate(lows):
            virtual.host_access(low, write=False)
            assert low.eq(float(i)).all(), (seed, i, low[:3])


def saved_from(folder: str) -> list[str]:
    """An asynchronous save of a model on a device that is not the first one, given without its
    index.
    """
    import onefold

    wrong = []
    torch.accelerator.set_device_index(1)
    for seed in range(8):
        virtual.reset(seed)
        torch.manual_seed(0)
        model: Any = onefold.shard(
            TinyGPT(), onefold.Recipe.zero(3, precision="fp32"), device="virtual"
        )
        engine = onefold.engine_of(model)
        assert engine.device == torch.device("virtual:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            model(tokens_of(step).to(engine.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        at = f"{folder}/{seed}"
        saving = onefold.save_async(at, model=model, optimizer=optimizer)
        model(tokens_of(5).to(engine.device)).backward()  # behind the copy
        optimizer.step()
        saving.wait()
        after = onefold.full_state_dict(model)
        onefold.load(at, model=model, optimizer=optimizer)
        model(tokens_of(5).to(engine.device)).backward()
        optimizer.zero_grad()
        model(tokens_of(5).to(engine.device)).backward()
        optimizer.step()
        again = onefold.full_state_dict(model)
        off = [name for name in after if not torch.equal(after[name].cpu(), again[name].cpu())]
        wrong += [f"seed {seed}: {off[:3]} differ"] if off else []
        wrong += [str(v) for v in virtual.violations()]
    return wrong


@virtual.alone
def test_an_asynchronous_save_copies_from_the_device_that_the_model_is_on(tmp_path: Path) -> None:
    assert saved_from(str(tmp_path)) == []


@virtual.alone
def test_the_host_waits_where_copies_hold_too_much_of_its_memory() -> None:
    device = torch.device("virtual:0")
    for seed in range(10):
        virtual.reset(seed)
        up, pinned, into = (
            CopyStream(device, window=4096),
            HostBuffers(device),
            torch.empty(1024, device=device),
        )
        places = set()
        for i in range(40):
            low = pinned.empty(1024, torch.float32)
            places.add(low.data_ptr())
            low.fill_(float(i))
            up.copy(into, low)
            del low
        assert len(places) <= 10, f"{len(places)} host buffers of 4 KiB under a bound of 8"
        up.order(up.mark())
        assert into.eq(39.0).all()


@virtual.alone
def test_a_thread_of_ours_works_on_the_device_that_it_is_given() -> None:
    found: list[torch.device] = []

    def work() -> None:
        with guard(torch.device("virtual:3")):
            found.append(torch.empty(1, device="virtual").device)
        found.append(torch.empty(1, device="virtual").device)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [torch.device("virtual:3"), torch.device("virtual:0")]


@virtual.alone
def test_a_stream_of_another_device_leaves_the_threads_own_device_as_it_was() -> None:
    torch.accelerator.set_device_index(1)
    with use_stream(new_stream(torch.device("virtual:3"))):
        assert torch.accelerator.current_device_index() == 3
    assert torch.accelerator.current_device_index() == 1


@virtual.alone
def test_synchronize_waits_for_every_stream_of_the_device() -> None:
    device = torch.device("virtual:0")
    for seed in range(5):
        virtual.reset(seed)
        beside, a = new_stream(device), torch.zeros(64, device=device)
        with use_stream(beside):
            b = torch.ones(64, device=device) * 2
        a += 1
        synchronize(device)
        assert virtual.pending() == "", virtual.pending()
        assert virtual.cpu_alias(a).sum() == 64 and virtual.cpu_alias(b).sum() == 128
        assert [waited.name for waited in virtual.synchronizations()], (
            "the wait of the host is not told"
        )


def test_synchronize_asks_the_clock_of_a_simulation() -> None:
    class Asked:
        times = 0

        def synchronize(self) -> None:
            self.times += 1

    clock: Any = Asked()
    with clocked(clock):
        synchronize(torch.device("cpu"))
    assert clock.times == 1


@virtual.alone
def test_numbers_are_read_without_waiting_for_what_was_launched_behind_them() -> None:
    ran: list[str] = []
    let_go: list[int] = []
    for seed in range(4):
        virtual.reset(seed)
        ran.clear()
        let_go.clear()
        first = torch.full((), 3.0, device="virtual")
        with virtual.no_synchronization():
            reading = Reading(first, first.square().reshape(1))
        virtual.enqueue(
            None, lambda t: ran.append("the next step"), reads=[first], ready=lambda: bool(let_go)
        )
        assert reading.numbers() == [3.0, 9.0] and not ran
        let_go.append(1)
        virtual.drain()
        assert reading.arrived and ran
    here = Reading(torch.tensor(3.0), torch.tensor([9.0]))
    assert here.arrived and here.numbers() == [3.0, 9.0]
