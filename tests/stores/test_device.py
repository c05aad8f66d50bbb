"""The device, its streams, and copies between it and the host.

What has streams runs on the virtual device: copies are late there, in any order that waits allow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
import virtual
from onefold import device as room
from onefold.comm import Chain, Pending
from onefold.memory import IDLE, MemoryLedger, Pool
from zoo import TinyGPT, features_of, tokens_of

LINE = 4096  # bytes: 1,024 elements
MIB = 1 << 20


def schedules(count: int) -> Iterator[torch.device]:
    """The device, under one schedule after the other. What no wait orders fails the test."""
    for seed in range(count):
        virtual.start(seed, timeout=10)
        yield torch.device("virtual:0")
        assert [str(v) for v in virtual.violations()] == [], f"seed {seed}"


def pinned_for(device: torch.device) -> Pool:
    return Pool(torch.device("cpu"), MemoryLedger(), pinned=device)


def on_host(low: Tensor) -> Tensor:
    virtual.host_access(low, write=False)
    return low


@virtual.alone
def test_a_save_in_the_background_reads_the_device_that_the_model_is_on(tmp_path: Path) -> None:
    torch.accelerator.set_device_index(1)
    for _ in schedules(2):
        torch.manual_seed(0)
        recipe = onefold.Recipe.zero(3, precision="fp32")
        model: Any = onefold.shard(TinyGPT(), recipe, device="virtual")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(number: int, model: Any = model, optimizer: Any = optimizer) -> dict[str, Tensor]:
            model(tokens_of(number).to("virtual:1")).backward()
            optimizer.step()
            optimizer.zero_grad()
            return onefold.full_state_dict(model)

        step(0)
        saving = onefold.save_async(
            tmp_path / "at", model=model, optimizer=optimizer, overwrite=True
        )
        after = step(1)  # behind the copy
        saving.wait()
        onefold.load(tmp_path / "at", model=model, optimizer=optimizer)
        again = step(1)
        assert all(torch.equal(after[name].cpu(), again[name].cpu()) for name in after)


# -- copies ----------------------------------------------------------------------------------------


@virtual.alone
def test_copies_are_right_whenever_they_run() -> None:
    """Down, changed on the host, and up again. Whoever allocates next gets the memory of both ends
    as soon as a copy lets go of it.
    """
    for seed, device in enumerate(schedules(30)):
        window = (0, LINE, MIB)[seed % 3]
        down, up = room.CopyStream(device, window), room.CopyStream(device, window)
        pinned, results = pinned_for(device), []
        for i in range(12):
            source = torch.full((1024,), float(i), device=device) * 2
            low = pinned.fresh(1024, torch.float32)
            ticket = down.copy(low, source)
            del source
            ticket.synchronize()
            low.add_(1)
            into = torch.empty(1024, device=device)
            raised = up.copy(into, low)
            del low
            up.order(raised)
            results.append(into * 10)
            del into
        assert [r[0].item() for r in results] == [10 * (2 * i + 1) for i in range(12)]
        assert all(bool((r == r[0]).all()) for r in results)


@virtual.alone
def test_copies_hold_the_window_and_the_host_does_not_wait() -> None:
    for device in schedules(10):
        down, pinned = room.CopyStream(device, window=3 * LINE), pinned_for(device)
        held: list[int] = []
        lows = [pinned.fresh(1024, torch.float32) for _ in range(6)]
        with virtual.no_synchronization():
            for i, low in enumerate(lows):
                held.append(i)
                source = torch.full((1024,), float(i), device=device)
                down.copy(low, source, done=partial(held.remove, i))
                del source
                assert len(held) <= 4, f"copies hold {held}"
        down.wait()
        assert held == []
        for i, low in enumerate(lows):
            assert on_host(low).eq(float(i)).all()


@virtual.alone
def test_the_host_waits_where_copies_hold_too_much_of_its_memory() -> None:
    for device in schedules(10):
        up, pinned = room.CopyStream(device, window=LINE), pinned_for(device)
        into, places = torch.empty(1024, device=device), set()
        for i in range(40):
            low = pinned.fresh(1024, torch.float32).fill_(float(i))
            places.add(low.data_ptr())
            up.copy(into, low)
            del low
        assert len(places) <= 10, f"{len(places)} buffers of {LINE} bytes on the host"
        up.order(up.mark())
        assert into.eq(39.0).all()


@virtual.alone
def test_the_device_adds_to_sums_on_the_host_what_the_host_would() -> None:
    for seed, device in enumerate(schedules(8)):
        chunk, dtype = (512, 4096)[seed % 2], (torch.float32, torch.bfloat16)[seed // 2 % 2]
        taken: list[int] = []
        down, pinned = room.CopyStream(device), pinned_for(device)
        sums = room.HostSums(down, taken=taken.append, chunk=chunk)
        low, cast = (pinned.fresh(3000, torch.float32).zero_() for _ in range(2))
        steps = [pinned.fresh(3000, dtype) for _ in range(4)]
        expected = torch.zeros(3000)
        for i, step in enumerate(steps):  # each finds what the one before has sent
            step.copy_(features_of(i, 3000) * 10.0**i)
            expected += step
        with virtual.no_synchronization():
            for step in steps:
                whole = torch.empty(3000, dtype=dtype, device=device)
                whole.copy_(step, non_blocking=True)
                sums.add([(low[:1000], whole[:1000]), (low[1024:], whole[1024:])], whole)
                if dtype == torch.bfloat16:
                    sums.cast(cast, whole)
                del whole
        down.wait()
        sums.release()
        expected[1000:1024] = 0
        assert torch.equal(on_host(low), expected)
        assert dtype == torch.float32 or torch.equal(on_host(cast), steps[-1].float())
        assert taken == [2 * chunk, -2 * chunk], "bytes on the device that nobody counts"


@virtual.alone
def test_the_computation_copies_and_second_moves_do_not_keep_each_other_waiting() -> None:
    virtual.start(timeout=10)
    device, go_on = torch.device("virtual:0"), threading.Event()
    hold = partial(virtual.enqueue, function=list, ready=go_on.is_set)
    up, down, computing = *(room.CopyStream(device) for _ in range(2)), room.current_stream(device)
    ones, low = torch.ones(256, device=device), pinned_for(device).fresh(256, torch.float32)
    sums: Any = room.HostSums(down, chunk=512)
    bring = sums._bring
    sums._bring = lambda *chunk: (bring(*chunk), hold(down.stream))
    sums.add([(low.fill_(5.0), ones)], ones)
    sums._up.synchronize()  # while the first chunk is held
    assert virtual.cpu_alias(sums._buffers[1].view(torch.float32)).eq(5.0).all()
    group: Any = SimpleNamespace(relay=room.new_stream(device))
    first = Pending(group, [], group).then(partial(down.order, down.mark()))
    Chain(group, first, lambda: first)
    computing.synchronize()  # while the first move is held
    with up.on_stream():
        hold(computing)
        fours = torch.ones(64, device=device) * 4
    up.mark().synchronize()
    assert virtual.cpu_alias(fours).eq(4.0).all()
    go_on.set()


@virtual.alone
def test_work_for_a_stream_of_another_device_goes_there_and_can_be_waited_for() -> None:
    device = torch.device("virtual:3")
    with room.use_stream(room.new_stream(device)):
        assert torch.ones(64, device="virtual").device == device
    assert torch.accelerator.current_device_index() == 0
    room.synchronize(device)
    assert virtual.pending() == ""


# -- pinned memory ---------------------------------------------------------------------------------


@virtual.alone
def test_pinned_buffers_are_used_again_when_nobody_holds_them() -> None:
    buffers = pinned_for(torch.device("virtual:0"))

    def idle() -> int:
        buffers.ledger.look()
        return buffers.ledger.held(IDLE)

    buffers.ledger.probes[IDLE] = buffers.idle
    first = buffers.fresh(1000, torch.float32)
    assert first.is_pinned()
    place = first.data_ptr()
    assert buffers.fresh(1000, torch.float32).data_ptr() != place and idle() == 4000
    del first
    assert idle() == 8000
    places = [buffers.fresh(1000, torch.float32) for _ in range(2)]
    assert place in {each.data_ptr() for each in places} and idle() == 0
    view = places.pop()[5:10]
    place = view.data_ptr() - 20
    assert buffers.fresh(1000, torch.float32).data_ptr() != place, "a view of it was held"
    del view
    again = [buffers.fresh(1000, torch.float32) for _ in range(2)]
    assert place in {each.data_ptr() for each in again} and idle() == 0
    del places, again
    for _ in range(3):
        assert idle()
        buffers.drain()
    assert idle() == 0
    paged = room.host_empty(3000, torch.float32, torch.device("virtual:0"), paged=True)
    assert paged.is_pinned() and paged.data_ptr() % 4096 == 0 and paged.numel() == 3000


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as file:
        ends = [line.split()[0].split("-") for line in file]
    return any(int(a, 16) <= address < int(b, 16) for a, b in ends)


class Driver:
    """Takes the calls of CUDA's library, and notes whether the memory was mapped then, and the
    thread's device.
    """

    def __init__(self) -> None:
        self.answer = 0
        self.calls: list[tuple[str, bool, int]] = []

    def called(self, name: str, address: int) -> None:
        self.calls.append((name, is_mapped(address), torch.accelerator.current_device_index()))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.called("pin", address + nbytes - 1)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.called("unpin", address)
        return 0


def pages(of: str = "virtual:2") -> Tensor:
    return room.host_pages(4 * MIB, huge=True, device=torch.device(of) if of else None)


@virtual.alone
def test_pages_are_pinned_for_their_device_and_unpinned_before_they_are_unmapped() -> None:
    driver = Driver()
    room.pinned._runtime = lambda device: driver
    found = pages()
    address, view = found.data_ptr(), found[-100:].view(torch.float32)
    del found
    assert driver.calls == [("pin", True, 2)], "a view still reads the pages"
    del view
    assert driver.calls == [("pin", True, 2), ("unpin", True, 2)] and not is_mapped(address)
    driver.answer = 2
    with pytest.raises(RuntimeError, match="cudaHostRegister ended with error 2"):
        pages()
    assert driver.calls[2:] == [("pin", True, 2)]
    del (plain := [pages("")])[0]
    assert plain == [] and len(driver.calls) == 3


# -- the host's threads ----------------------------------------------------------------------------

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("cores", "now", "environment", "expected"),
    [
        (96, 1, TORCHRUN, 12),  # torchrun has set 1: the share of the cores
        (96, 2, TORCHRUN | {"OMP_NUM_THREADS": "2"}, 2),  # its user has set another number
        (96, 3, TORCHRUN, 3),  # the script has
        (96, 96, {"LOCAL_WORLD_SIZE": "8"}, 12),  # torch's own number, at most the share
        (1, 1, {}, 1),
    ],
)
def test_threads_are_the_share_of_the_cores_unless_the_user_has_set_a_number(
    cores: int,
    now: int,
    environment: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(room.streams, "physical_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: now)
    assert room.host_threads(4) == expected
