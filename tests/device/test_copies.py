"""Copies beside the computation: what they hold, and who waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import virtual
from onefold.device import CopyStream, HostBuffers, current_stream
from onefold.device.streams import clocked

LINE = 4096  # bytes: 1,024 elements


@virtual.alone
def test_a_copy_larger_than_the_window_is_waited_for_by_nobody() -> None:
    device = torch.device("virtual:0")
    for seed in range(5):
        virtual.start(seed, timeout=10)
        down, pinned = CopyStream(device, window=LINE), HostBuffers(device)
        arrive: list[int] = []
        virtual.enqueue(down.stream, lambda: None, ready=lambda ok=arrive: bool(ok))
        source = torch.full((16 * 1024,), 3.0, device=device)
        with virtual.no_synchronization():
            low = pinned.empty(16 * 1024, torch.float32)
            ticket = down.copy(low, source)
        # What the computing stream runs now must not wait for the copy, which cannot run yet
        assert float((torch.ones(8, device=device) * 2).sum()) == 16
        arrive.append(1)
        ticket.synchronize()
        virtual.host_access(low, write=False)
        assert low.eq(3.0).all()


@virtual.alone
def test_copies_larger_than_the_window_hold_two_of_them() -> None:
    device = torch.device("virtual:0")
    held: list[int] = []
    for seed in range(10):
        virtual.reset(seed)
        down, pinned = CopyStream(device, window=LINE), HostBuffers(device)
        for i in range(12):
            source = torch.full((3 * 1024,), float(i), device=device)
            low = pinned.empty(3 * 1024, torch.float32)
            held.append(i)
            down.copy(low, source, done=partial(held.remove, i))
            assert len(held) <= 2 and i in held, (seed, i, held)
            del source, low
        down.wait()
        assert held == []


@virtual.alone
def test_work_beside_the_computation_does_not_wait_for_what_is_queued_there_later() -> None:
    device = torch.device("virtual:0")
    for seed in range(5):
        virtual.start(seed, timeout=10)
        up, computing = CopyStream(device), current_stream(device)
        source = torch.full((64,), 3.0, device=device)
        go_on: list[int] = []
        with up.on_stream():
            virtual.enqueue(computing, lambda: None, ready=lambda ok=go_on: bool(ok))
            doubled = source * 2
            ticket = up.mark()
        ticket.synchronize()
        assert virtual.cpu_alias(doubled).eq(6.0).all()
        assert current_stream(device) == computing
        go_on.append(1)
        up.order(ticket)


class Handmade:
    """Streams and events whose copies are done when a test says so."""

    memory = torch.device("cpu")

    def __init__(self) -> None:
        self.done = 0
        self.launched = 0
        self.waited: list[int] = []  # numbers of the copies that the computing stream waits for
        self.in_synchronize: Callable[[int], None] = lambda number: None

    def current_stream(self) -> Any:
        return _Stream(self)

    def new_stream(self, name: str) -> Any:
        return _Stream(self)

    def new_lock(self) -> Any:
        return threading.RLock()

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        yield


class _Stream:
    def __init__(self, clock: Handmade) -> None:
        self.clock = clock

    def wait_stream(self, other: Any) -> None:
        self.clock.launched += 1

    def wait_event(self, event: Any) -> None:
        if not event.query():
            self.clock.waited.append(event.number)

    def record_event(self) -> Any:
        return _Event(self.clock, self.clock.launched)


class _Event:
    def __init__(self, clock: Handmade, number: int) -> None:
        self.clock, self.number = clock, number

    def query(self) -> bool:
        return self.number <= self.clock.done

    def synchronize(self) -> None:
        self.clock.in_synchronize(self.number)
        self.clock.done = max(self.clock.done, self.number)


def handmade(window: int) -> tuple[Handmade, CopyStream]:
    clock = Handmade()
    with clocked(clock):  # type: ignore[arg-type]
        side = CopyStream(torch.device("cpu"), window=window)
    return clock, side


def copied(clock: Handmade, side: CopyStream, *lines: int) -> None:
    for count in lines:
        with clocked(clock):  # type: ignore[arg-type]
            side.copy(torch.empty(count * LINE // 4), torch.empty(count * LINE // 4))


def test_small_copies_beside_a_large_one_make_nobody_wait_for_it() -> None:
    """As of a unit whose parameters lie in two flat buffers."""
    clock, side = handmade(window=LINE)
    copied(clock, side, 10, 1, 1)
    assert clock.waited == []
    copied(clock, side, 10)
    assert clock.waited == [1], "22 lines are in flight, and the largest copy has 10"
    copied(clock, side, 1, 1)
    assert clock.waited == [1]
    copied(clock, side, 10)
    assert clock.waited == [1, 2, 3, 4]


def test_a_large_copy_that_is_done_leaves_the_window_as_it_was() -> None:
    clock, side = handmade(window=2 * LINE)
    copied(clock, side, 50)
    clock.done = 1
    copied(clock, side, 1, 1, 1, 1)
    assert clock.waited == [2, 3], "more than the window of two lines was held"


def test_the_host_waits_only_for_the_fourth_large_copy_before() -> None:
    clock, side = handmade(window=LINE)
    waited: list[int] = []
    clock.in_synchronize = waited.append
    copied(clock, side, *[9] * 4)
    assert waited == []
    copied(clock, side, 9)
    assert waited == [1]


def test_a_thread_that_waits_lets_others_begin_copies() -> None:
    clock, side = handmade(window=LINE)
    inside, go_on = threading.Event(), threading.Event()

    def held_up(number: int) -> None:
        inside.set()
        assert go_on.wait(60)

    clock.in_synchronize = held_up
    done: list[str] = []
    with clocked(clock):  # type: ignore[arg-type]
        side.copy(torch.empty(8), torch.empty(8), done=lambda: done.append("first"))
    waits = threading.Thread(target=side.wait, daemon=True)
    waits.start()
    assert inside.wait(60)

    def begins() -> None:
        with clocked(clock):  # type: ignore[arg-type]
            side.copy(torch.empty(8), torch.empty(8), done=lambda: done.append("second"))

    other = threading.Thread(target=begins, daemon=True)
    other.start()
    other.join(20)
    assert not other.is_alive(), "a copy could not begin while another thread waited"
    go_on.set()
    waits.join(60)
    assert done == ["first"], "the copy that began meanwhile was taken for done"
    clock.in_synchronize = lambda number: None
    side.wait()
    assert done == ["first", "second"]
