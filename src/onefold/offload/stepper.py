"""The `Stepper` for shards on the host and on NVMe, and for moments in a format of their own: see
runtime/stepper.py.

With `step_in_backward=True` it steps offloaded units during the backward pass.
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

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from onefold.device import current_stream, use_stream
from onefold.offload.step import HALF, drop_stepped_gradients, step_apart, step_flat
from onefold.quant.moments import moment_policy
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parameters.values import count_writes
from onefold.runtime.stepper import GroupVerdict, Stepper, own_numbers, refuse_cut

#: If so many units are queued or being stepped, the backward pass waits. See [Note: gradients held
#: at once].
WAITING = 2


class ApartStepper(Stepper):
    """Steps with the optimizer's own step, or by the rule of moments in fewer bits; in the backward
    pass in a thread of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collective = bool(engine.offloaded_flats)  # the ranks agree on failures of the disk
        self.in_backward = engine.recipe.step_in_backward
        # By the entry's number: the optimizer that has stepped it
        self._owners: dict[int, weakref.ref[Optimizer]] = {}
        self._flying: deque[Future[None]] = deque()
        self._stepped: list[Entry] = []
        # By the flat buffer's index: the last backward pass in which it was stepped
        self._stepped_in: dict[int, int] = {}
        self._thread: ThreadPoolExecutor | None = None
        # Optimizers that stepped in a backward pass and whose step() was not called yet: the number
        # of that pass, and the groups' options in it.
        self._owed: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[dict[str, Any]]]] = (
            weakref.WeakKeyDictionary()
        )

    # -- at optimizer.step() -----------------------------------------------------------------------

    def accepts(
        self, optimizer: Optimizer, flat: Flat, verdict: Callable[[], GroupVerdict]
    ) -> bool:
        how = moment_policy(optimizer, self.engine.recipe, flat)  # refuses formats that disagree
        if how is None and not flat.storage.offloaded:
            return False
        refuse_cut(optimizer, flat, verdict)
        return True

    def wants_unsharded(self, optimizer: Optimizer) -> bool:
        recipe = self.engine.recipe
        return recipe.moments is not None or recipe.stochastic_rounding

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """See `Stepper`.

        Raises:
            ValueError: an option of a group has changed since the backward pass, which stepped with
                the old value.
        """
        _, before = self._owed.pop(optimizer, (0, []))
        for was, group in zip(before, optimizer.param_groups, strict=False):
            for name, value in was.items():
                if not bool(value == group.get(name)):
                    raise ValueError(
                        f"{name!r} of a parameter group was {value!r} in the backward pass, where"
                        f" step_in_backward=True has stepped, and is {group.get(name)!r} at"
                        f" {type(optimizer).__name__}.step(): change it before backward(), or leave"
                        " step_in_backward out."
                    )
        if self.in_backward:
            known = weakref.ref(optimizer)
            self._owners |= {e.number: known for e in entries if e.flat.storage.offloaded}
        step_apart(optimizer, self.engine, entries)

    # -- in the backward pass ----------------------------------------------------------------------

    def takes(self, flat: Flat, which: list[Entry]) -> bool:
        """See `Stepper`. `which` must be all gradients of the flat buffer, and in memory. The answer is
        False if a parameter that was frozen meanwhile gets its gradient of earlier micro-batches now:
        this pass may still read its weights.
        """
        active, storage = [e for e in flat.entries if e.active], flat.storage
        if not (self._owners and storage.offloaded and self.engine.sync) or flat.lingering:
            return False
        if storage.gradients_on_disk and any(e.param.grad is not None for e in flat.entries):
            return False
        return all(e in which and self._owner(e) is not None for e in active)

    def _owner(self, entry: Entry) -> Optimizer | None:
        known = self._owners.get(entry.number)
        return known() if known is not None else None

    def _owners_of(self, flat: Flat) -> Iterable[Optimizer]:
        return dict.fromkeys(o for e in flat.entries if (o := self._owner(e)) is not None)

    def has_stepped(self, unit: Unit) -> bool:
        return any(self._stepped_in.get(f.index) == self.engine.step_count for f in unit.flats)

    def landed(self, flat: Flat) -> None:
        """See `Stepper`.

        Raises:
            RuntimeError: this is a second backward pass in which an optimizer would step, and its
                step() was not called in between.
        """
        engine, now = self.engine, self.engine.step_count
        for optimizer in self._owners_of(flat):
            if optimizer not in self._owed:
                self._owed[optimizer] = now, [own_numbers(g) for g in optimizer.param_groups]
            elif self._owed[optimizer][0] != now:
                raise RuntimeError(
                    f"a second backward pass came without {type(optimizer).__name__}.step() in between,"
                    " and step_in_backward=True has stepped in the first already: accumulate under"
                    " onefold.no_sync(model), step every optimizer after each backward pass, or"
                    " leave step_in_backward out."
                )
        self._stepped_in[flat.index] = now
        while len(self._flying) >= WAITING:
            self._flying.popleft().result()
        self._stepped += flat.entries
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="onefold step")
        here, arrived = current_stream(engine.device), engine.transfers.down.mark()
        self._flying.append(self._thread.submit(partial(self._step, flat, here, arrived)))

    def _step(self, flat: Flat, computing: Any, arrived: Any) -> None:
        """Step `flat`. Runs in the thread.

        Args:
            computing: the stream of the backward pass. Device memory is read and written in its
                order.
            arrived: the gradients are in host memory. Those of later units may be on their way.
        """
        engine = self.engine
        if engine.failure is not None:
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
                for optimizer in self._owners_of(flat):
                    mine = [e for e in flat.entries if self._owner(e) is optimizer]
                    step_flat(optimizer, engine, flat, mine)
                drop_stepped_gradients(engine, flat, flat.entries)
        except Exception as error:
            engine.failure = engine.failure or error
            engine.transfers.broken = HALF

    def join(self) -> None:
        while self._flying:
            self._flying.popleft().result()
        stepped, self._stepped = self._stepped, []
        # Count the writes only now: this backward pass still needed the old values
        if stepped:
            count_writes(self.engine, stepped)

    def close(self) -> None:
        """Wait for the units that were handed over, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
