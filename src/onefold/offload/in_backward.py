"""Stepping offloaded units behind the rest of the backward pass, where the user has said that
nothing looks at gradients in between.

    backward   unit 3     unit 2     unit 1     unit 0    end
    down           grad 3     grad 2     grad 1    grad 0
    this thread        step 3 ...  step 2 ...  step 1 ...  |  joined at the end of the pass

The first step of an optimizer is an ordinary one: it tells which parameters are whose. A unit's
gradients are dropped when they have been stepped; at `optimizer.step()` those parameters have none,
and are passed over.

[Note: gradients held at once] A unit's gradients lie in host memory from their landing until they
are stepped. When one lands while WAITING others are under way, the backward pass waits: never more
than WAITING + 1 units that follow each other in the backward pass are held. The first step makes
the moments on the host, unit by unit, and drops each unit's gradients, which are half as large,
when it has them: so that it too ends with no more than masters, moments and one unit's gradients.
(Before it all gradients wait; with Adam they are less than the moments that replace them.)
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.device import current_stream, use_stream
from onefold.offload.step import HALF, drop_stepped_gradients, step_flat
from onefold.runtime.engine import Engine
from onefold.runtime.entry import Entry
from onefold.runtime.flat import Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.unit import Unit

#: Units whose step is under way or waits, beyond which the backward pass waits. See [Note:
#: gradients held at once].
WAITING = 2


class InBackwardStepper:
    """The thread of one engine that steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._owners: dict[int, weakref.ref[Optimizer]] = {}
        self._flying: deque[Future[None]] = deque()
        self._stepped: list[Entry] = []
        # The last backward pass behind which a flat buffer was stepped, by its index
        self._stepped_in: dict[int, int] = {}
        self._thread: ThreadPoolExecutor | None = None
        # Optimizers whose step() has not come yet: the backward pass behind which they stepped, and
        # the options they did it with.
        self._owed: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[dict[str, Any]]]] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, optimizer: Optimizer, entries: Iterable[Entry]) -> None:
        """`optimizer` steps `entries` from now on."""
        known = weakref.ref(optimizer)
        self._owners |= {entry.number: known for entry in entries if entry.flat.storage.offloaded}

    def comes(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` has come.

        Raises:
            ValueError: its groups say something else than they did in the backward pass, when it
                stepped.
        """
        _, before = self._owed.pop(optimizer, (0, []))
        for was, group in zip(before, optimizer.param_groups, strict=False):
            for name in (
                name for name in was if name not in group or not _equal(was[name], group[name])
            ):
                raise ValueError(
                    f"{name!r} of a parameter group was {was[name]!r} in the backward pass, where"
                    f" step_in_backward=True has stepped, and is {group.get(name)!r} at"
                    f" {_name(optimizer)}.step(): change it before backward(), or leave"
                    " step_in_backward out."
                )

    def takes(self, flat: Flat, which: list[bool]) -> bool:
        """Whether the flat buffer is stepped as soon as the gradients of the entries `which` are
        there: they are all of its own, and in memory. Not where what was frozen meanwhile gets the
        gradient of earlier micro-batches: its weights may still be read in this pass.
        """
        engine, storage = self._engine(), flat.storage
        if (
            not storage.offloaded
            or flat.lingering
            or len(flat.runs) != 1
            or not all(which[e.index] for e in flat.entries if e.active)
        ):
            return False
        if storage.gradients_on_disk and any(e.param.grad is not None for e in flat.entries):
            return False
        return (
            engine is not None
            and engine.progress.sync
            and all(self._owner(e) is not None for e in flat.entries if e.active)
        )

    def _owner(self, entry: Entry) -> Optimizer | None:
        known = self._owners.get(entry.number)
        return known() if known is not None else None

    def has_stepped(self, unit: Unit) -> bool:
        """Whether part of the unit was stepped in the backward pass under way."""
        engine = self._engine()
        return engine is not None and any(
            self._stepped_in.get(flat.index) == engine.step for flat in unit.flats
        )

    def landed(self, flat: Flat) -> None:
        """All gradients of `flat` are `.grad` of its parameters, in host memory: step them.

        Raises:
            RuntimeError: an optimizer steps in a second backward pass, and its step() did not come
                in between.
        """
        self._owe(flat)
        engine = self._engine()
        self._stepped_in[flat.index] = engine.step if engine is not None else 0
        while len(self._flying) >= WAITING:
            self._flying.popleft().result()
        self._stepped += flat.entries
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="onefold step")
        here = current_stream(engine.device) if engine is not None else None
        self._flying.append(self._thread.submit(partial(self._step, flat, here)))

    def _owe(self, flat: Flat) -> None:
        engine = self._engine()
        now = engine.step if engine is not None else 0
        for optimizer in {
            id(o): o for e in flat.entries if (o := self._owner(e)) is not None
        }.values():
            if optimizer not in self._owed:
                self._owed[optimizer] = now, [_options(group) for group in optimizer.param_groups]
            elif self._owed[optimizer][0] != now:
                raise RuntimeError(
                    f"a second backward pass came without {_name(optimizer)}.step() in between, and"
                    " step_in_backward=True has stepped in the first already: accumulate under"
                    " onefold.no_sync(model), step every optimizer after each backward pass, or"
                    " leave step_in_backward out."
                )

    def _step(self, flat: Flat, computing: Any) -> None:
        """In the thread: `computing` is the stream that the backward pass runs on, in whose order
        device memory is read and written.
        """
        engine = self._engine()
        if engine is None or engine.progress.failure is not None:
            return
        try:
            # Faces are taken off in this thread alone: the main thread goes on seeing them.
            with use_stream(computing), disable_torch_function(), torch.no_grad():
                engine.masters.about_to_write()
                engine.transfers.down.wait()
                for optimizer in {
                    id(o): o for e in flat.entries if (o := self._owner(e)) is not None
                }.values():
                    mine = [e for e in flat.entries if self._owner(e) is optimizer]
                    step_flat(optimizer, engine, flat, mine)
                drop_stepped_gradients(engine, flat, flat.entries)
        except Exception as error:
            engine.progress.failure = engine.progress.failure or error
            engine.transfers.broken = HALF

    def join(self) -> None:
        """Everything that has landed is stepped when this returns."""
        while self._flying:
            self._flying.popleft().result()
        engine, stepped, self._stepped = self._engine(), self._stepped, []
        if engine is not None and stepped:
            # Not earlier: this very pass was right to compute with what they were
            engine.write_counters.all_of(stepped)

    def close(self) -> None:
        """End the thread."""
        self.join()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.copy(value) if not isinstance(value, torch.Tensor) else value.clone()
        for name, value in group.items()
        if name != "params"
    }


def _equal(a: Any, b: Any) -> bool:
    return (
        bool(torch.equal(a, b))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else bool(a == b)
    )
