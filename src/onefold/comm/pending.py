"""Waiting for moves: what is under way, how far the host runs ahead, and the error of a wait in vain."""

from __future__ import annotations

import contextvars
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from onefold.comm.ledger import TrafficEvent
from onefold.device import capturing, current_stream, reached, use_stream

if TYPE_CHECKING:
    from onefold.comm.group import Group


# -- the ranks' store, asked with a limit ------------------------------------------------------------
#
# One process keeps it: rank 0, or the launcher. If that process is stopped, or its host is gone, torch
# waits for an answer without end (2.13): most calls have no limit, and a wait that has reached its own
# tells the store so, and waits for the answer to that. To make a group of ranks, torch asks it too.
# So each such call is made on a thread, which is left behind if no answer comes.


_T = TypeVar("_T")
#: Stores that have not answered, and the threads that still wait for them.
_silent: list[tuple[Any, threading.Thread]] = []


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def within(seconds: float, call: Callable[[], _T], store: Any = None) -> _T:
    """Return what `call` returns, which asks `store` (None: the default one).

    Raises:
        RuntimeError: no answer came within `seconds`, or an earlier call still waits for one.
    """
    store = default_store() if store is None else store
    _silent[:] = [(its, thread) for its, thread in _silent if thread.is_alive()]
    if all(its is not store for its, _ in _silent):
        answer: Future[_T] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(ask,), name="onefold-store", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # a script that ends during a save starts no threads any more
            ask()
        try:
            return answer.result(seconds)
        except TimeoutError:
            if answer.done():
                raise
        _silent.append((store, thread))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    raise RuntimeError(
        f"{'the launcher' if agent else 'rank 0'}, which keeps the ranks' store, does not answer: it is"
        " stopped, or its host cannot be reached"
    )


# -- the error -------------------------------------------------------------------------------------
#
# `StallError`: the error of a rank that waited for others in vain.
#
# A wait fails by timeout, or because a peer's connection closed. It then ends in a `StallError` on
# every rank that takes part. Before raising, a rank writes a note to the rendezvous store (which
# rank, which collective, for how long) and reads the notes of the others. So the error says where
# every rank is. A rank without a note was not waiting in any collective of this model.
#
# Who notices on a rank whose peer has died, or does not come (T: the recipe's `stall_timeout`, 300 s):
#
# | where this rank is                               | who notices                          | after                              |
# |--------------------------------------------------|--------------------------------------|------------------------------------|
# | gloo: waiting for a message                      | the wait itself                      | at once if the peer's process has  |
# |                                                  |                                      | ended, else T                      |
# | gloo: launching a message                        | the launch itself                    | at once                            |
# | NCCL: two units past the move that the device    | `RunAhead.comes`                     | T                                  |
# | waits for                                        |                                      |                                    |
# | NCCL: at the end of a backward pass              | the exchange over gloo in            | at once, or T                      |
# |                                                  | `agree_and_finish` (runtime/agree)   |                                    |
# | NCCL: in `loss.item()` or the like               | NCCL's watchdog: it ends the process | 2T + 30 s                          |
# | making communicators, in `shard()` or the first  | `within` (comm/pending.py)             | T + `GRACE`                        |
# | save or load                                     |                                      |                                    |
# | in a save or load, beside ranks that write       | `Together` (checkpoint/together.py)  | T after their last sign of progress|
#
# Whoever notices writes its note, waits up to `GRACE` seconds for those of the others (a second more
# for a store that does not answer), aborts its communicators of NCCL so that nothing on the device
# waits any longer, and raises.
#
# [Note: NCCL's patience] The device waits for NCCL, not the host, and NCCL's watchdog would end the
# process before the host has said which rank is missing. A native communicator therefore has twice
# the stall timeout plus half a minute: the host begins to wait at most a pass after the move that
# waits. Only the watchdog helps a script that reads a number of the device before that: torch then
# waits without a limit.


class StallError(RuntimeError):
    """A rank waited in vain; the message says where each rank waits, with unit and step."""


@dataclass
class CollectiveContext:
    """What a collective is for: the move, the unit, the step, the phase (forward, backward, state),
    for messages and the ledger. Of a stall, also what the rank has called since the last pass.

    `about`: two numbers that tell what is reduced or asked for. If ranks disagree on it, they do not
    take each other's bytes for their own.
    """

    move: str
    unit: str
    step: int
    phase: str
    after: Sequence[str] = ()
    about: tuple[int, int] | None = None

    def __str__(self) -> str:
        after = f", after {', '.join(self.after)}" if self.after else ""
        return (
            f"waiting in {self.move} of unit {self.unit!r} ({self.phase}, step {self.step}{after})"
        )


#: The unit of a stall in a save or a load
CHECKPOINT = "(checkpoint)"
_SAVING = (
    "A rank is stopped, or its disk or file system hangs or takes longer than this for one write or"
    " one read."
)
_PASSES = (
    "Ranks must run the same forward and backward passes on a sharded model, each with a batch of its"
    " own, step the same optimizers, and have the same parameters frozen."
)
#: Of a stall in a forward pass
_GENERATING = (
    " To generate texts, whose lengths differ between ranks, call generate(..., synced_gpus=True), so"
    " that every rank makes equally many passes."
)
# Seconds that a rank waits, after it gave up, for the notes of the others.
GRACE = 3.0


def stall_error(
    context: CollectiveContext,
    waited: float,
    cause: Exception,
    group_name: str,
    rank: int,
    ranks: list[int],
    heard: int | None,
    among: str = "",
    places: Mapping[int, str] | None = None,
) -> StallError:
    """Exchange notes through the store and return the error.

    Args:
        ranks: the global ranks of the model.
        heard: the last step that all ranks have ended, or None.
        among: the ranks that the collective is among, in words, if these are some of them.
        places: the place of each rank in its mesh, in words, if that has several axes.
    """
    at = {r: f" ({places[r]})" if places else "" for r in ranks}
    notes = {rank: f"{context}, {waited:.1f} s"}
    missing, silent = {*ranks} - {rank}, ""

    def exchange() -> None:
        store, key = default_store(), f"onefold/stall/{group_name}/"
        store.set(f"{key}{rank}", json.dumps({**asdict(context), "waited": waited}))
        end = time.monotonic() + GRACE
        while missing and time.monotonic() < end:
            for other in [r for r in missing if store.check([f"{key}{r}"])]:
                note: dict[str, Any] = json.loads(store.get(f"{key}{other}"))
                since = note.pop("waited")
                notes[other] = f"{CollectiveContext(**note)}, {since:.1f} s"
                missing.remove(other)
            time.sleep(0.05)

    told = "not waiting in any collective of this model (ended, or busy elsewhere)"
    try:
        within(GRACE + 1.0, exchange)
    except Exception as error:  # raise the error without the notes
        told = "not known"
        silent = f"The ranks could not tell each other more: {str(error).splitlines()[0][:200]}.\n"
    last = f"last heard of at the end of step {heard}" if heard is not None else "not heard of yet"
    notes |= dict.fromkeys(missing, f"{told}; {last}")
    text = (str(cause).splitlines() or [type(cause).__name__])[0]
    closed = "a peer's connection closed (a rank ended or gave up first)."
    why = closed if "closed" in text or "reset" in text else "the other ranks did not come."
    stand = "".join(f"  rank {r}{at[r]}: {notes[r]}\n" for r in sorted(notes))
    advice = _SAVING if context.unit == CHECKPOINT else _PASSES
    return StallError(
        f"rank {rank}{at[rank]} gave up {context}{among} after {waited:.1f} s: {why}\n"
        f"Where each rank stands:\n{stand}{silent}"
        f"{advice}{_GENERATING if context.phase == 'forward' else ''} If a rank may be slower than"
        f" this, raise stall_timeout in the recipe.\n(backend: {text[:200]})"
    )


# -- what is under way -----------------------------------------------------------------------------
#
# Moves in flight, and chains of two moves.


class Pending:
    """A move in flight. `wait` returns when this rank's buffers are complete (on CUDA: complete for
    work queued later on the current stream). `relays`: see [Note: chains go on in order].
    """

    __slots__ = ("_after", "_group", "_keep", "_works", "context", "event")

    def __init__(
        self,
        group: Group,
        works: list[Any],
        context: CollectiveContext,
        event: TrafficEvent | None = None,
        keep: Any = None,
        after: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._group, self._works, self.context, self.event = group, works, context, event
        self._keep, self._after = keep, after

    def wait(self, relays: bool = True) -> None:
        if self._works:
            works, self._works = self._works, []
            self._group.wait(works, self.context, self.event, relays=relays)
            works.clear()
        after, self._keep, self._after = self._after, None, ()
        for act in after:  # a pool takes a buffer back only if nothing else holds it
            act()

    def then(self, act: Callable[[], object]) -> Pending:
        """Call `act` at the end of `wait`, when the messages have arrived."""
        self._after = (*self._after, act)
        return self


class Chain(Pending):
    """Two moves, of which the second sends what the first has received. On CUDA the second waits
    for the first on a stream of its own.

    [Note: chains go on in order] gloo cannot tell whether a move is done, so no callback can start
    the second move. Instead, every wait of this rank first begins second moves, in the order in
    which the chains were made. That order is the same on all ranks. A wait for a reduction begins
    the second moves of all gathers that were launched up to the reduction's unit. Any other wait
    begins all of them. So a rank that took part in a gather and did not use the result does not
    keep the others waiting. The waits inside a chain begin none (`relays`).
    """

    __slots__ = ("_first", "_second", "_then")

    def __init__(self, group: Group, first: Pending, then: Callable[[], Pending]) -> None:
        super().__init__(group, [], first.context, first.event)
        self._first, self._then, self._second = first, then, Pending(group, [], first.context)
        # The relay stream waits for the first move, the compute stream for the second only
        if group.relay is None:
            group.chains.waiting.append(self)
            return
        # The relay has nothing else to wait for. The second move reads what the first receives,
        # and this rank's own part, which was there (or is ordered before it) at the launch.
        with use_stream(group.relay):
            self.begin()

    def begin(self) -> None:
        """Wait for the first move, and start the second."""
        self._first.wait(relays=False)
        self._second = self._then()
        del self._first, self._then  # and the buffers that they hold

    def wait(self, relays: bool = True) -> None:
        if self._group.broken is not None:  # the second move may never have begun
            raise self._group.broken
        self._group.chains.relay(self)
        self._second.wait(relays=False)
        super().wait()


class Chains:
    """The chains whose second moves have not begun, in the order in which they were made."""

    def __init__(self) -> None:
        self.waiting: deque[Chain] = deque()

    def relay(self, last: Chain | None = None) -> None:
        """Begin the second moves of all chains, or of those up to `last`."""
        if last is None or last in self.waiting:
            while self.waiting:
                chain = self.waiting.popleft()
                chain.begin()
                if chain is last:
                    break

    def relay_before(self, context: CollectiveContext) -> None:
        """Begin second moves that other ranks may need before they can do `context`."""
        if context.move not in ("reduce-scatter", "all-reduce"):
            self.relay()
        elif own := [chain for chain in self.waiting if chain.context.unit == context.unit]:
            # Gathers after this unit can stay: other ranks may only begin them once they have this
            # reduction
            self.relay(own[-1])


# -- how far the host runs ahead -------------------------------------------------------------------
#
# How far the host runs ahead of the device.
#
#     host      queues unit 2 | unit 3   asks for the beginning of unit 2 before it queues unit 4
#     device    ... unit 1    | waits for the gather of unit 2
#     peer      hangs
#
# [Note: two units ahead] The host queues work without waiting for it. If a peer hangs, the device
# waits in a collective, the host fills the device's queue of launches and blocks in a launch, where
# no timeout of its own applies. So before the host queues unit i, the device must have come to the
# beginning of unit i - 2. Two units are the device's work meanwhile, and the host never waits for what
# it has just queued: a device that keeps up finds its next work queued, and the host finds the event
# done. If the event does not come within the stall timeout, and the device is in a wait for a
# collective, the rank raises a `StallError` that names this collective.
#
# Only native backends on devices with streams need this: gloo's waits are the host's own.


#: Units that may be queued, and not begun by the device, when another one is queued.
AHEAD = 2

#: A wait of the device: (what for, an event before it, an event behind it).
_Wait = tuple[CollectiveContext, Any, Any]


class RunAhead:
    """The marks before the units that a rank has queued. See [Note: two units ahead]."""

    def __init__(self, group: Group) -> None:
        self.group = group
        # (event, the device's waits that were queued before it and after the event before)
        self._marks: deque[tuple[Any, list[_Wait]]] = deque()
        self._waits: list[_Wait] = []
        self._last: tuple[int, str] | None = None

    def waits(self, context: CollectiveContext, before: Any, behind: Any) -> None:
        """Note that the device will wait for a collective, between two events."""
        self._waits.append((context, before, behind))

    def comes(self, unit: int, phase: str, again: bool = False) -> None:
        """Called before a unit is queued: wait until the device has begun the last but one.

        Several calls for one unit, one after another, count once in a phase, unless `again` is
        True.

        Raises:
            StallError: the device waits for a collective for longer than the timeout.
        """
        device = self.group.device
        # Of a broken group the next move raises
        if self.group.broken is not None or ((unit, phase) == self._last and not again):
            return
        self._last = unit, phase
        if capturing(device):  # the work runs at each replay, and nobody may ask for it now
            return
        waits, self._waits = self._waits, []
        self._marks.append((current_stream(device).record_event(), waits))
        while len(self._marks) > AHEAD:
            self._reach(*self._marks[0])
            self._marks.popleft()

    def _reach(self, mark: Any, waits: list[_Wait]) -> None:
        if mark.query():
            return
        limit = self.group.timeout
        while not reached(mark, limit):
            for context, before, behind in waits:
                if before.query() and not behind.query():
                    cause = f"the device waits for it, and the host asked for {limit:.0f} s"
                    raise self.group.lost(context, limit, RuntimeError(cause))
            # Else the device computes, however long: no other rank is late
