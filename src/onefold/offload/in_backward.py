"""Step offloaded units during the backward pass (`step_in_backward=True`).

With this option the user states that no code reads gradients between backward and step.

    backward   unit 3     unit 2     unit 1     unit 0    end
    down           grad 3     grad 2     grad 1    grad 0
    this thread        step 3 ...  step 2 ...  step 1 ...  |  joined at the end of the pass

The first step of an optimizer is an ordinary one. It tells the engine which optimizer steps which
parameters. In later backward passes a unit's gradients are dropped as soon as the unit is stepped.
So these parameters have no gradient at `optimizer.step()`, which skips them.

[Note: gradients held at once] A unit's gradients are in host memory from the copy down until the
unit is stepped. If a unit's gradients arrive while WAITING other units are being stepped, the
backward pass waits. So at most WAITING + 1 consecutive units are held. The first step creates the
moments on the host, unit by unit, and drops each unit's gradients afterwards. It ends with masters,
moments and at most one unit's gradients. (Before the first step all gradients are held. With Adam
they are half as large as the moments that replace them.)
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
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parameters.values import count_writes

#: If so many units are queued or being stepped, the backward pass waits. See [Note: gradients held
#: at once].
WAITING = 2


class InBackwardStepper:
    """Steps the units of one engine in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._owners: dict[int, weakref.ref[Optimizer]] = {}
        self._flying: deque[Future[None]] = deque()
        self._stepped: list[Entry] = []
        # By the flat buffer's index: the last backward pass in which it was stepped
        self._stepped_in: dict[int, int] = {}
        self._thread: Any = None
        # Optimizers that stepped in a backward pass and whose step() was not called yet: the number
        # of that pass, and the groups' options in it.
        self._owed: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[dict[str, Any]]]] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, optimizer: Optimizer, entries: Iterable[Entry]) -> None:
        """Record that `optimizer` steps `entries` from now on."""
        known = weakref.ref(optimizer)
        self._owners |= {entry.number: known for entry in entries if entry.flat.storage.offloaded}

    def comes(self, optimizer: Optimizer) -> None:
        """Take note of a call of `optimizer.step()`.

        Raises:
            ValueError: an option of a group has changed since the backward pass, which stepped with
                the old value.
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

    def takes(self, flat: Flat, which: list[Entry]) -> bool:
        """Return whether to step `flat` as soon as the gradients of the entries `which` are there.

        These must be all gradients of the flat buffer, and in memory. The answer is False if a
        parameter that was frozen meanwhile gets its gradient of earlier micro-batches now: this
        pass may still read its weights.
        """
        engine, storage = self._engine(), flat.storage
        if (
            not storage.offloaded
            or flat.lingering
            or not all(e in which for e in flat.entries if e.active)
        ):
            return False
        if storage.gradients_on_disk and any(e.param.grad is not None for e in flat.entries):
            return False
        return (
            engine is not None
            and engine.sync
            and all(self._owner(e) is not None for e in flat.entries if e.active)
        )

    def _owner(self, entry: Entry) -> Optimizer | None:
        known = self._owners.get(entry.number)
        return known() if known is not None else None

    def has_stepped(self, unit: Unit) -> bool:
        """Return whether part of the unit was stepped in the current backward pass."""
        engine = self._engine()
        return engine is not None and any(
            self._stepped_in.get(flat.index) == engine.step_count for flat in unit.flats
        )

    def landed(self, flat: Flat) -> None:
        """Step `flat`. All its gradients are in host memory, as `.grad` of its parameters.

        Raises:
            RuntimeError: this is a second backward pass in which an optimizer would step, and its
                step() was not called in between.
        """
        self._owe(flat)
        engine = self._engine()
        self._stepped_in[flat.index] = engine.step_count if engine is not None else 0
        while len(self._flying) >= WAITING:
            self._flying.popleft().result()
        self._stepped += flat.entries
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="onefold step")
        here = current_stream(engine.device) if engine is not None else None
        arrived = engine.transfers.down.mark() if engine is not None else None
        self._flying.append(self._thread.submit(partial(self._step, flat, here, arrived)))

    def _owe(self, flat: Flat) -> None:
        engine = self._engine()
        now = engine.step_count if engine is not None else 0
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

    def _step(self, flat: Flat, computing: Any, arrived: Any) -> None:
        """Step `flat`. Runs in the thread.

        Args:
            computing: the stream of the backward pass. Device memory is read and written in its
                order.
            arrived: the gradients are in host memory. Those of later units may be on their way.
        """
        engine = self._engine()
        if engine is None or engine.failure is not None:
            return
        try:
            # Torch function is disabled in this thread only. The main thread still sees parameters
            # with whole shapes.
            with (
                use_stream(computing),
                disable_torch_function(),
                torch.no_grad(),
                engine.transfers.host_threads(beside=True),
            ):
                engine.about_to_write()
                if arrived is not None:
                    arrived.synchronize()
                for optimizer in {
                    id(o): o for e in flat.entries if (o := self._owner(e)) is not None
                }.values():
                    mine = [e for e in flat.entries if self._owner(e) is optimizer]
                    step_flat(optimizer, engine, flat, mine)
                drop_stepped_gradients(engine, flat, flat.entries)
        except Exception as error:
            engine.failure = engine.failure or error
            engine.transfers.broken = HALF

    def join(self) -> None:
        """Wait until all units handed over by `landed` are stepped."""
        while self._flying:
            self._flying.popleft().result()
        engine, stepped, self._stepped = self._engine(), self._stepped, []
        if engine is not None and stepped:
            # Count the writes only now: this backward pass still needed the old values
            count_writes(engine, stepped)

    def close(self) -> None:
        """Wait for the units that were handed over, and end the thread."""
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
