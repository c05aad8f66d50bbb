"""The host's threads on a clock: one runs at a time, the one whose time is the earliest.

    host          ▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏░░ waits ░░│    launches
    host: step           │█ u3 █│█ u2 █│█ u1 █│    a thread of the engine

The engine's threads run their own code in threads of this process. A thread whose time has gone on
lets those run that are behind. So launches, copies and reads of all threads come in the order of
their times, and every run of a simulation is the same.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class HostThread:
    """A thread of the host.

    Attributes:
        now: its time, in seconds.
        stream: its current stream.
        lane: the stream that shows what it does and waits for.
        busy: seconds of its launches and its own work.
        ready: whether it can go on; None: it can.
    """

    def __init__(self, lane: Any, stream: Any, now: float = 0.0) -> None:
        self.lane, self.stream, self.now = lane, stream, now
        self.busy = 0.0
        self.ready: Callable[[], bool] | None = None
        self.turn = threading.Semaphore(0)


class Threads:
    """All threads of the host. `current` is the one that runs."""

    def __init__(self, first: HostThread) -> None:
        self.first = self.current = first
        self._all = [first]

    def add(self, thread: HostThread) -> None:
        self._all.append(thread)

    def pass_on(self) -> None:
        """Let other threads run whose time is earlier. Called whenever a thread's time goes on."""
        if len(self._all) > 1:
            self._to(self._earliest())

    def until(self, ready: Callable[[], bool]) -> None:
        """Let other threads run until `ready()`."""
        me = self.current
        if ready():
            return
        me.ready = ready
        self._to(self._earliest())
        me.ready = None

    def end(self) -> None:
        """Remove the current thread, and let another one run."""
        self._all.remove(self.current)
        self._wake(self._earliest())

    def _earliest(self) -> HostThread:
        able = [thread for thread in self._all if thread.ready is None or thread.ready()]
        assert able, "each of the host's threads waits for another one"
        return min(able, key=lambda thread: thread.now)

    def _to(self, thread: HostThread) -> None:
        me = self.current
        if thread is not me:
            self._wake(thread)
            me.turn.acquire()

    def _wake(self, thread: HostThread) -> None:
        self.current = thread
        thread.turn.release()


class Lock:
    """A lock between the threads. The thread that holds it may take it again."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._owner: HostThread | None = None
        self._times, self._free = 0, 0.0

    def __enter__(self) -> None:
        me = self._threads.current
        if self._owner is not me:
            while self._owner is not None:
                self._threads.until(lambda: self._owner is None)
            me.now = max(me.now, self._free)
            self._owner = me
        self._times += 1

    def __exit__(self, *_: object) -> None:
        self._times -= 1
        if not self._times:
            self._owner, self._free = None, self._threads.current.now


class Job:
    """What a thread was given to do; like a Future."""

    def __init__(self, work: Callable[[], Any], executor: Executor) -> None:
        self.work: Callable[[], Any] | None = work
        self._executor = executor
        self.answer: Any = None
        self.error: BaseException | None = None
        # When it was done, and the last span of its thread then
        self.at, self.after = 0.0, -1

    def done(self) -> bool:
        return self.work is None

    def result(self) -> Any:
        """Wait for the end of the work, and return what it has returned, or raise its error."""
        self._executor.wait_for(self)
        if self.error is not None:
            raise self.error
        return self.answer


class Executor:
    """A thread of the host that does one job after another.

    Args:
        inside: makes the context in which its jobs run: dispatch modes are a thread's own.
        waits: called as (time, last span) where a thread waits for a job.
    """

    def __init__(
        self,
        threads: Threads,
        thread: HostThread,
        inside: Callable[[], AbstractContextManager[Any]],
        waits: Callable[[float, int], None],
    ) -> None:
        self._threads, self._thread, self._inside, self._waits = threads, thread, inside, waits
        self._jobs: deque[Job] = deque()
        self._begun = self._closed = self._over = False

    def submit(self, work: Callable[[], Any]) -> Job:
        job = Job(work, self)
        if not self._begun:
            self._begun = True
            self._thread.ready = self._has_work
            self._threads.add(self._thread)
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._run,), name=self._thread.lane.name).start()
        if not self._jobs:
            self._thread.now = max(self._thread.now, self._threads.current.now)
        self._jobs.append(job)
        return job

    def wait_for(self, job: Job) -> None:
        self._threads.until(lambda: job.done() or self._over)
        assert job.done(), "its thread has ended"
        self._waits(job.at, job.after)

    def shutdown(self) -> None:
        """Wait for all jobs, and end the thread."""
        self._closed = True
        if self._begun:
            self._threads.until(lambda: self._over)

    def _has_work(self) -> bool:
        return bool(self._jobs) or self._closed

    def _run(self) -> None:
        me = self._thread
        me.turn.acquire()
        me.ready = None
        try:
            with self._inside():
                while True:
                    self._threads.until(self._has_work)
                    if not self._jobs:
                        break
                    self._do(self._jobs[0])
                    self._jobs.popleft()
                    self._threads.pass_on()
        finally:
            self._over = True
            self._threads.end()

    def _do(self, job: Job) -> None:
        assert job.work is not None
        try:
            job.answer = job.work()
        except BaseException as error:  # it belongs to the thread that waits for the job
            job.error = error
        job.work, job.at, job.after = None, self._thread.now, self._thread.lane.last
