"""Time a step's kernels, collectives and waits: the real engine launches them on simulated streams
that compute nothing.

    host          ▏▏▏▏▏▏▏▏▏▏▏                      launches, each `Software.launch_seconds`; waits where the engine makes the host wait
    compute       │ k0 │ k1 │░░░ wait ░░░│ k2 │    kernels and waits, in the order of their launch
    gathers          │▒▒▒ g1 ▒▒▒▒▒▒▒▒▒▒▒▒│         one stream per communicator: a collective begins when earlier launches are done
    link             │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│         and its link is free: two collectives on one link run one after the other

With tiers (simulation/places.py):

    copies down          │▓ c3 ▓│   │▓ c2 ▓│          the engine's copy streams; the host link carries one copy a direction at a time
    host          ▏▏▏▏▏▏▏▏▏▏▏▏░ wait ░│█ u0 █│█ u1 █   what the host computes takes its own time, and launches wait for it
    disk               │▒ read 2 ▒│▒ read 1 ▒│▒ written 2 ▒│   one read or write at a time, at the rank's share of the node's rate
    host: step               │█ u3 █│█ u2 █│               a thread of the engine (simulation/threads.py): steps in the backward pass

A `Clock` replaces the device's streams (`onefold.device.clocked`) while simulation/simulate.py runs
a step. The seconds of each operation come from the plan's own time model (simulation/prices.py).
The step's total differs from the plan's figure in one point: the plan assumes how much overlaps
(`Software.overlap`, the two ends of a micro-batch), and here overlap follows from the launches.

Not simulated are other ranks (all behave alike), the optimizer's Python code, and the allocator.
Pinning is not either: pinned buffers are kept from the first steps on.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.machine.kernels import flop_formulas, kernels_of, name_of, values_in
from onefold.memory import nbytes_of
from onefold.simulation.operations import moved_by, of_engine
from onefold.simulation.places import HOST as MEMORY
from onefold.simulation.places import Place, ends_of, place_of, waits_for_it
from onefold.simulation.prices import Link, Prices
from onefold.simulation.threads import Executor, HostThread, Lock, Threads
from onefold.simulation.timeline import (
    BACKWARD_STEPS,
    COMPUTE,
    COPIES,
    DISK,
    HOST,
    Kind,
    Span,
    Timeline,
    parts_of,
)

#: What carries one thing at a time.
Line = Link | Place | Literal["disk"]
LINKS: Mapping[Line, str] = {
    "inside": "link in the node",
    "between": "link between nodes",
    "up": "host link up",
    "down": "host link down",
    "disk": DISK,
}


class Stream:
    """A simulated stream. `free` is when its launched work is done, `last` its last span, `behind`
    the span that it has waited for last.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.free, self.last, self.behind = 0.0, -1, -1

    def wait(self, until: float, after: int) -> None:
        """Let later work begin at `until`, when span `after` ends, or later."""
        self.behind = after
        begin = max(self.free, self.clock.host)
        if until > begin:
            self.clock.waits(self, begin, until, after)

    def wait_stream(self, other: Stream) -> None:
        self.wait(other.free, other.last)

    def wait_event(self, event: Event) -> None:
        self.wait(event.at, event.after)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.clock)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.clock.host_waits(self.free, self.last)

    def query(self) -> bool:
        return self.free <= self.clock.host


class Event:
    """A simulated event: a time on a stream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at, self.after = 0.0, -1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._clock.current_stream()
        self.at, self.after = max(stream.free, self._clock.host), stream.last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clock.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._clock.host_waits(self.at, self.after)

    def query(self) -> bool:
        return self.at <= self._clock.host

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds."""
        return 1000 * (later.at - self.at)


class _Work:
    """The handle of a collective that was launched."""

    def __init__(self, clock: Clock, until: float, span: int) -> None:
        self._clock, self._until, self._span = clock, until, span

    def wait(self, *_: Any) -> None:
        self._clock.current_stream().wait(self._until, self._span)


class _Line:
    """The times at which a link is taken. A collective that is launched later may run earlier if it
    fits into a gap.
    """

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def free(self, since: float, seconds: float) -> float:
        """Return the first time, `since` or later, from which the link is free for `seconds`."""
        at = bisect.bisect_right(self.taken, (since, since))
        if at and self.taken[at - 1][1] > since:
            since = self.taken[at - 1][1]
        while at < len(self.taken) and self.taken[at][0] < since + seconds:
            since = max(since, self.taken[at][1])
            at += 1
        return since

    def take(self, begin: float, seconds: float) -> None:
        bisect.insort(self.taken, (begin, begin + seconds))

    def busy(self, begin: float, end: float) -> float:
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in self.taken)


class Clock:
    """Streams, events and collectives that take time and compute nothing; the argument of
    `onefold.device.clocked`. All times are in seconds.

    Attributes:
        memory: stands for the host's memory (`onefold.device.host_device`).
        threads: the host's threads.
        spans: all spans so far.
        engine: the engine whose units name the kernels, None until it is made.
        inside: makes the context in which another thread of the host works.
    """

    def __init__(self, prices: Prices, rank: int = 0, tiers: bool = False) -> None:
        """
        Args:
            tiers: the recipe stores some of its state on the host.
        """
        self.prices, self.rank, self.tiers = prices, rank, tiers
        self.memory = MEMORY if tiers else torch.device("cpu")
        self.spans: list[Span] = []
        self.engine: Any = None
        self.inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.optimizing = False
        self._computing, self._disk = Stream(self, COMPUTE), Stream(self, DISK)
        self.threads = Threads(HostThread(Stream(self, HOST), self._computing))
        self._others: list[HostThread] = []
        self._streams: dict[str, int] = {COMPUTE: 1, HOST: 1, DISK: 1}
        self._communicators: dict[tuple[tuple[int, ...], str], Stream] = {}
        self._lines: dict[Line, _Line] = {name: _Line() for name in LINKS}
        # Backward spans without a unit: the engine names their unit when that unit ends
        self._unnamed: list[Span] = []
        self._named = 0
        self._formulas = flop_formulas()
        self._marks: list[float] = []
        self._begun: tuple[int, float] = (0, 0.0)

    @property
    def host(self) -> float:
        """The current time of the host's thread that runs."""
        return self.threads.current.now

    @host.setter
    def host(self, now: float) -> None:
        self.threads.current.now = now

    @property
    def _current(self) -> Stream:
        stream: Stream = self.threads.current.stream
        return stream

    @property
    def _first(self) -> bool:
        """Whether the thread runs that runs the passes."""
        return self.threads.current is self.threads.first

    # -- what the room `device` asks for -----------------------------------------------------------

    def current_stream(self) -> Stream:
        return self._current

    def new_stream(self, name: str) -> Stream:
        self._streams[name] = count = self._streams.get(name, 0) + 1
        return Stream(self, name if count == 1 else f"{name} {count}")

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        thread = self.threads.current
        before, thread.stream = thread.stream, stream
        try:
            yield
        finally:
            thread.stream = before

    def new_event(self) -> Event:
        return Event(self)

    def new_lock(self) -> Lock:
        return Lock(self.threads)

    def new_thread(self, name: str) -> Executor:
        thread = HostThread(self.new_stream(f"{HOST}: {name}"), self._computing)
        self._others.append(thread)
        return Executor(self.threads, thread, lambda: self.inside(), self._joins)

    def synchronize(self) -> None:
        self.host = max(
            self.host, *(stream.free for stream in (self._computing, *self._communicators.values()))
        )

    def collective(self, event: Any, ranks: list[int], ring: bool, communicator: str) -> _Work:
        """Launch a collective on its communicator's stream.
        It begins when earlier work on that stream and on the current stream is done, and its links
        are free.
        """
        self._launch()
        stream = self._communicator(tuple(ranks), communicator)
        price = self.prices.move(event.move, event.nbytes, ranks, self.rank, ring)
        needs = [(self._lines[link], seconds) for link, seconds in price.links.items() if seconds]
        begin, later = -1.0, max(self._current.free, stream.free, self.host)
        while later > begin:
            begin = later
            later = max((line.free(begin, seconds) for line, seconds in needs), default=begin)
        for line, seconds in needs:
            line.take(begin, seconds)
        who = "collective", event.move, event.unit, event.phase
        after = self._current.last
        self._add(stream, *who, begin, begin + price.seconds, event.nbytes, after)  # type: ignore[arg-type]
        return _Work(self, stream.free, stream.last)

    def _communicator(self, ranks: tuple[int, ...], name: str) -> Stream:
        if (ranks, name) not in self._communicators:
            machine, where = self.prices.machine, ""
            if machine.nodes > 1 and len(ranks) < machine.ranks:
                nodes = {rank // machine.local for rank in ranks}
                where = " in the node" if len(nodes) == 1 else " between nodes"
            self._communicators[ranks, name] = self.new_stream(name + where)
        return self._communicators[ranks, name]

    def transfer(self, op: str, unit: str, nbytes: int) -> tuple[float, int]:
        """Start to read or write `nbytes` on the disk. Returns (when it ends, its span).

        The first bytes come a latency later, behind which earlier reads and writes go on.
        """
        self._launch()
        seconds = self.prices.disk(op, nbytes)
        begin = max(self._disk.free, self.host + self.prices.latency)
        self._lines["disk"].take(begin, seconds)
        self._add(self._disk, "disk", op, unit, self._phase, begin, begin + seconds, nbytes)
        return self._disk.free, self._disk.last

    # -- what runs ---------------------------------------------------------------------------------

    def _launch(self) -> None:
        self._spends(self.prices.software.launch_seconds)

    def _spends(self, seconds: float) -> None:
        """Let the host's thread be busy for `seconds`."""
        thread = self.threads.current
        thread.now += seconds
        thread.busy += seconds
        self.threads.pass_on()

    def _add(
        self,
        stream: Stream,
        kind: Kind,
        name: str,
        unit: str,
        phase: str,
        begin: float,
        end: float,
        nbytes: int = 0,
        after: int = -1,
    ) -> Span:
        span = Span(stream.name, kind, name, unit, phase, begin, end, nbytes, after)
        stream.free, stream.last = end, len(self.spans)
        self.spans.append(span)
        return span

    def waits(self, stream: Stream, begin: float, until: float, after: int, name: str = "") -> None:
        """Add a wait of `stream` from `begin` until `until`, when span `after` ends. `name`: what it
        waits for, if that is not the span.
        """
        cause = self.spans[after] if after >= 0 else None
        if cause is not None and cause.kind == "engine" and cause.after >= 0:
            # A sum of parts on a stream of its own: what is waited for is their reduction
            cause = self.spans[cause.after]
        if cause is not None and cause.kind == "collective" and cause.after >= 0:
            source = self.spans[cause.after]
            if source.kind == "copy" and source.end > begin:
                # A gather that begins with a copy from the host: the first part is for the copy
                between = min(source.end, until)
                self._add(
                    stream, "wait", source.name, source.unit, self._phase, begin, between,
                    after=cause.after,
                )  # fmt: skip
                begin = between
                if begin >= until:
                    return
        unit = ""
        if cause is not None and not name:
            name, unit = cause.name, cause.unit
        self._add(stream, "wait", name, unit, self._phase, begin, until, after=after)

    def host_waits(self, until: float, after: int, name: str = "") -> None:
        """Let the host wait until `until`, when span `after` ends. `name`: as of `waits`."""
        if until <= self.host:
            return
        if self.tiers:
            self.waits(self.threads.current.lane, self.host, until, after, name)
        self.host = until
        self.threads.pass_on()

    def _joins(self, until: float, after: int) -> None:
        """Let the host wait for a job of another thread of its own."""
        self.host_waits(until, after, BACKWARD_STEPS)

    @property
    def _stepping(self) -> bool:
        """Whether the optimizer runs, at its step or in a thread of its own."""
        return self.optimizing or not self._first

    @property
    def _phase(self) -> str:
        if self.optimizing:
            return "optimizer"
        return "forward" if self.engine is None else str(self.engine.phase)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Time an operation that has run on fake tensors."""
        name = name_of(func)
        if name == "set_":  # a tensor over memory that is there
            return
        place: Place = place_of(name, args, kwargs, out) if self.tiers else "device"
        if place == "host":
            self._works(name, moved_by(func, name, args, kwargs, out))
        elif place != "device":
            self._copy(place, nbytes_of(ends_of(args, out)[0]), waits_for_it(name, args, kwargs))
        elif name == "_local_scalar_dense":  # .item() and the like
            self._current.synchronize()
        elif self._stepping or of_engine():
            if nbytes := moved_by(func, name, args, kwargs, out):
                kind: Kind = "optimizer" if self._stepping else "engine"
                self._run(kind, name, self.prices.traffic(nbytes))
        elif kernels := kernels_of(func, args, kwargs, out, self._formulas):
            self._run("model", name, self.prices.operation(kernels))

    def kernel(
        self, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
    ) -> None:
        self._run("engine", name, self.prices.adding_up(sum(map(nbytes_of, (*read, *written)))))

    def _run(self, kind: Kind, name: str, seconds: float) -> None:
        """Launch a kernel on the current stream."""
        self._launch()
        begin, phase = max(self._current.free, self.host), self._phase
        self._name_backward()
        behind = self._current.behind
        if behind < 0 or self.spans[behind].kind != "collective":
            behind = -1
        span = self._add(
            self._current,
            kind,
            name,
            self._unit(phase),
            phase,
            begin,
            begin + seconds,
            after=behind if self._current is not self._computing else -1,
        )
        if phase == "backward" and self._first:
            self._unnamed.append(span)

    def _copy(self, way: Place, nbytes: int, waits: bool) -> None:
        """Launch a copy between device and host on the current stream."""
        self._launch()
        self._name_backward()
        stream, phase, seconds = self._current, self._phase, self.prices.copy(nbytes)
        begin = self._lines[way].free(max(stream.free, self.host), seconds)
        self._lines[way].take(begin, seconds)
        self._add(
            stream, "copy", COPIES[way], self._moved(way), phase, begin, begin + seconds, nbytes
        )
        if waits:
            stream.synchronize()

    def _moved(self, way: Place) -> str:
        """Return the unit that the ledger has noted last for a copy in this direction."""
        events = self.engine.transfers.moved.events if self.engine is not None else ()
        # What is read goes on to the device. Another thread may note what it moves meanwhile
        moves = (way, "read") if way == "up" else (way,)
        return next((e.unit or "(root)" for e in reversed(events) if e.move in moves), "")

    def _works(self, name: str, nbytes: int) -> None:
        """Let the host do an operation that reads and writes `nbytes`."""
        if not nbytes:
            return
        seconds, phase = self.prices.on_host(nbytes), self._phase
        kind: Kind = "optimizer" if self._stepping else "engine"
        lane, begin, unit = self.threads.current.lane, self.host, self._unit(phase)
        self._add(lane, kind, name, unit, phase, begin, begin + seconds)
        self._spends(seconds)

    def _unit(self, phase: str) -> str:
        if self._stepping or self.engine is None or not self.engine.stack:
            return ""
        return self.engine.stack[-1].unit.name or "(root)"

    def _name_backward(self) -> None:
        """Give backward spans their unit. The engine notes each unit whose gradients are complete;
        the spans since its last note belong to that unit.
        """
        done: Any = self.engine.timeline if self.engine is not None else ()
        if len(done) == self._named:
            return
        self._named, last = len(done), done[-1]
        if last.phase == "backward":
            for span in self._unnamed:
                span.unit = last.unit or "(root)"
            self._unnamed.clear()

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin the step that the timeline shows. The steps before it have recorded the order of
        units, and the operations whose prices are scaled (`Prices.learned`).
        """
        self.prices.learned()
        self._unnamed.clear()
        self._begun, self._marks = (len(self.spans), self._now), []
        for thread in (self.threads.first, *self._others):
            thread.busy = 0.0

    @property
    def _now(self) -> float:
        """When all that computes is done. The host computes too, if it has a part of the state."""
        return max(self._computing.free, self.host) if self.tiers else self._computing.free

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Count operations as the optimizer's, inside the context."""
        self.optimizing = True
        try:
            yield
        finally:
            self.optimizing = False

    def mark(self) -> None:
        """Note that a micro-batch has ended."""
        self._marks.append(self._now)

    def timeline(self) -> Timeline:
        """Return the timeline from `begin_step` until now."""
        self._name_backward()
        first, zero = self._begun
        end = self._now
        self.host = max(self.host, end)  # the host waits for the end of the step
        kept = self.spans[first:]
        own = [s for s in kept if s.stream == COMPUTE]
        host = [s for s in kept if s.stream == HOST]
        exposed: dict[str, dict[str, float]] = {}

        def waits(span: Span, seconds: float) -> None:
            of_unit = exposed.setdefault(span.unit, {})
            of_unit[span.name] = of_unit.get(span.name, 0.0) + seconds

        for span in (s for s in own if s.kind == "wait"):
            waits(span, span.seconds)
        busy = {"compute": sum(s.seconds for s in own if s.kind != "wait")}
        threads = (self.threads.first, *self._others)
        busy |= {thread.lane.name: thread.busy for thread in threads}
        busy |= {
            LINKS[link]: line.busy(zero, end) for link, line in self._lines.items() if line.taken
        }
        marks = self._marks
        middle = parts_of(own, marks[0], marks[1], host)[0] if len(marks) > 2 else None
        for span in kept:
            # A wait on another stream may have begun in the step before
            span.begin, span.end = max(span.begin - zero, 0.0), span.end - zero
            span.after = span.after - first if span.after >= first else -1
        parts, idle = parts_of(own, 0.0, end - zero, host)
        for span, seconds in idle:
            waits(span, seconds)
        streams = dict.fromkeys([COMPUTE, *(s.stream for s in kept)])
        return Timeline(
            tuple(kept), tuple(streams), parts, exposed, busy, middle, max(len(marks), 1)
        )  # fmt: skip


class Recording(TorchDispatchMode):
    """A dispatch mode that times each operation on fake tensors as a kernel of `clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _run(func, args, kwargs)
        if _fake((args, kwargs, out)):
            self._clock.ran(func, args, kwargs, out)
        return out


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache

    name = name_of(func)
    if name == "_fused_sgd_":
        # torch has no rule for it on fake tensors, and would make real ones of the same sizes
        return None
    if name == "set_" and isinstance(args[0], FakeTensor):
        # The cache of rules would hold the storage that a tensor is set to, which would never die
        with disable_fake_tensor_cache(args[0].fake_mode):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _fake(found: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(t, FakeTensor) for t in values_in(found))
