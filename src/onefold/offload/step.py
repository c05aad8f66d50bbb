"""Step offloaded shards with the user's optimizer.

    host    unit by unit: the optimizer's own step over host tensors and host states ─► copy up during the next unit's step
    NVMe    chunk by chunk, reads ahead and writes behind:

            disk     read 1   read 2   read 3 | write 1   read 4 | write 2   ...
            step              chunk 1           chunk 2             chunk 3

For each unit or chunk the optimizer sees only the parameters to step (runtime/stepper.py). On
NVMe they are slices of staging buffers with slices of gradients and states. Between steps
`optimizer.state` of the real parameter holds scalars as they are. Each element-wise state, and each
part of a packed moment (quant/moments.py), is represented by a tensor on the meta device. If
moments are packed, parameters too small for packing keep theirs in host memory, some KiB each.

[Note: a step is whole or refused] Ranks agree on failures before and after a step. A failure before
the step (a gradient that could not be written) leaves the state of every rank unchanged. A failure
during the step (the disk fails) leaves some state stepped and some not, and nothing can undo that.
The model then refuses to train on and to be saved.

[Note: in the backward pass] With `step_in_backward=True` it steps offloaded units during the backward pass.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.device import current_stream, use_stream
from onefold.memory import GRADIENTS, TierError
from onefold.offload.storage import NvmeStorage, Window, inside, state_kind
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat, Unit
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parameters.values import Elsewhere, count_writes
from onefold.runtime.reduce import unique_bytes
from onefold.runtime.stepper import (
    GroupVerdict,
    Stepper,
    groups_of,
    only,
    own_numbers,
    raw_step,
)

#: Chunks being read beyond the chunk that is stepped.
AHEAD = 2
#: The message if some of the state is stepped and some is not.
HALF = (
    "a step failed half way, so that some of the state is of two steps. Start again from the last"
    " checkpoint."
)


def step_apart(optimizer: Optimizer, engine: Engine, entries: Sequence[Entry]) -> None:
    """Step `entries`, all of offloaded flat buffers. Collective if any flat buffer is on NVMe.

    Raises:
        TierError: on every rank, if a flat buffer is on NVMe and one rank's step failed.
    """
    ready = {entry for entry in entries if entry.param.grad is not None}
    by_flat = {flat: [e for e in flat.entries if e in ready] for flat in engine.flats}
    if engine.on_disk:
        try:
            engine.transfers.flush()  # gradients
        except TierError as failure:
            engine.failure = engine.failure or failure
        agree_on_failure(engine, engine.failure, "before the step: nothing has been stepped")
    error: BaseException | None = None
    groups = groups_of(optimizer)
    try:
        with engine.transfers.host_threads():
            for flat, mine in by_flat.items():
                if not flat.storage.on_disk:
                    step_flat(optimizer, engine, flat, mine, groups)
                    if flat.storage.offloaded and engine.recipe.step_in_backward:
                        # As in all later steps. The moments just created need the memory.
                        count_writes(engine, mine)
                        drop_stepped_gradients(engine, flat, mine)
            on_disk = {flat: mine for flat, mine in by_flat.items() if flat.storage.on_disk}
            _Stepping(optimizer, engine, groups).run(on_disk)
    except Exception as failure:
        error = failure
    engine.transfers.pool.drain()
    try:
        if engine.on_disk:
            when = "in the middle of the step: start again from the last checkpoint"
            agree_on_failure(engine, error, when)
        elif error is not None:
            raise error
    except TierError:
        engine.transfers.broken = HALF
        raise
    finally:
        # The error's traceback refers to this frame. Without `del` this reference cycle would keep
        # the model alive until the garbage collector runs.
        del error


def step_flat(
    optimizer: Optimizer,
    engine: Engine,
    flat: Flat,
    entries: Sequence[Entry],
    groups: dict[int, int] | None = None,
) -> None:
    """Step the parameters of `entries`, all of one flat buffer, that have a gradient. Local.

    `groups`: the result of `groups_of(optimizer)`, if the caller has it.

    Raises:
        TierError: the disk failed.
    """
    ready = [entry for entry in entries if entry.param.grad is not None]
    if ready:
        groups = groups if groups is not None else groups_of(optimizer)
        if flat.storage.on_disk:
            _Stepping(optimizer, engine, groups).run({flat: ready})
            return
        if (how := moments.moment_policy(optimizer, engine.recipe, flat)) is not None:
            moments.step_in_memory(optimizer, groups, how, ready)
        else:
            with only(optimizer, groups, [entry.param for entry in ready], engine.device):
                raw_step(optimizer)
        flat.storage.renew()


def drop_stepped_gradients(engine: Engine, flat: Flat, entries: Iterable[Entry]) -> None:
    """Drop the gradients of those `entries` of `flat` that have been stepped."""
    before = sum(unique_bytes(e.param.grad for e in flat.entries))
    for entry in entries:
        if entry.graded_elsewhere:
            engine.stepped_early.add(entry)
        entry.param.grad, entry.graded_elsewhere = None, False
    # Gradients for another optimizer may share the memory, so count what is left
    after = sum(unique_bytes(e.param.grad for e in flat.entries))
    engine.transfers.host.add(GRADIENTS, after - before)


class _Stepping:
    """One step of one optimizer over its entries on NVMe."""

    def __init__(self, optimizer: Optimizer, engine: Engine, groups: dict[int, int]) -> None:
        self.optimizer, self.engine, self.groups = optimizer, engine, groups
        # The new `optimizer.state`, set when all pieces are stepped
        self.states: dict[Entry, dict[str, Any]] = {}
        self.hows: dict[Flat, moments.MomentPolicy | None] = {}

    def run(self, ready: Mapping[Flat, list[Entry]]) -> None:
        """Step the entries `ready`, by their flat buffer, which have gradients."""
        recipe, flats = self.engine.recipe, [flat for flat, entries in ready.items() if entries]
        self.hows = {flat: moments.moment_policy(self.optimizer, recipe, flat) for flat in flats}
        if any(self.hows.values()) and moments.skipped(self.optimizer):
            return
        todo = deque(self._windows(ready))
        reading: deque[Window] = deque()
        try:
            while todo or reading:
                while todo and len(reading) <= AHEAD:
                    reading.append(todo.popleft())
                    self._read(reading[-1])
                window = reading.popleft()
                window.settle()
                self._step(window)
                window.storage.stepped(window.a, window.b, window.rows["master"])
                window.close(*(kind for kind in window.rows if kind != "gradient"))
        finally:
            for entry, state in self.states.items():
                self.optimizer.state[entry.param] = state
        self.engine.transfers.flush()

    def _windows(self, ready: Mapping[Flat, list[Entry]]) -> Iterator[Window]:
        for flat, how in self.hows.items():
            storage, entries = flat.storage, ready[flat]
            assert isinstance(storage, NvmeStorage)
            for entry in entries:
                group = self.optimizer.param_groups[self.groups[id(entry.param)]]
                moments.adopt(self.optimizer, how, entry, group)
            for a, b in storage.chunks():
                if pieces := inside(entries, a, b):
                    yield Window(storage, a, b, pieces)

    # -- one window --------------------------------------------------------------------------------

    def _read(self, window: Window) -> None:
        dtype = window.storage.flat.dtypes.master
        kinds = {"master": dtype}
        for entry, _, _ in window.pieces:
            if isinstance(entry.param.grad, Elsewhere):
                kinds["gradient"] = dtype
            for key, value in self.optimizer.state.get(entry.param, {}).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    kinds[state_kind(key, value.dtype)] = value.dtype
        for kind, dtype in kinds.items():
            window.open(kind, dtype)

    def _step(self, window: Window) -> None:
        storage, grads = window.storage, window.rows.get("gradient")
        if storage.scale is not None and grads is not None:
            grads.mul_(storage.scale)
        how = self.hows[storage.flat]
        pieces = [self._piece(window, how, *piece) for piece in window.pieces]
        device = self.engine.device if how is None else None
        moments.step_pieces(self.optimizer, self.groups, how, pieces, device)
        for piece in pieces:
            entry, state = piece.entry, self.optimizer.state[piece.entry.param]
            after = {
                key: state[key]
                if key in state
                else storage.new_state(entry, key, part.dtype, in_memory=False)
                for key, part in piece.stored.items()
            }
            self.states[entry] = piece.numbers | after

    def _piece(
        self, window: Window, how: moments.MomentPolicy | None, entry: Entry, x: int, y: int
    ) -> moments.Piece:
        """Return elements [x, y) of the owned interval."""
        param, begin = entry.param, entry.here.start
        state = self.optimizer.state[param]
        there, numbers = moments.stored_apart(how, state, param)

        def row(key: str, dtype: torch.dtype) -> torch.Tensor:
            kind = state_kind(key, dtype)
            if kind not in window.rows:  # a first step makes this state
                window.open(kind, dtype)
                window.settle()
            return window.part(kind, x, y)

        small = {key: value.view(-1) for key, value in there.items() if not value.is_meta}
        stored = moments.cut(small, x - begin, y - begin)
        stored |= {key: row(key, v.dtype) for key, v in there.items() if v.is_meta}
        fresh = not (state if how is None else numbers)
        if "gradient" in window.rows:
            grad = window.part("gradient", x, y)
        else:
            assert param.grad is not None
            grad = param.grad.reshape(-1)[x - begin : y - begin]
        first = entry.owned()[0] + x - begin
        return moments.Piece(
            entry, first, window.part("master", x, y), grad, stored, numbers, fresh, row
        )


# -- who steps, and when --------------------------------------------------------------------------

#: If so many units are queued or being stepped, the backward pass waits. See [Note: gradients held
#: at once].
WAITING = 2


class ApartStepper(Stepper):
    """Steps with the optimizer's own step; in the backward pass in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.collective = bool(engine.offloaded_flats)  # the ranks agree on failures of the disk
        self.in_backward = engine.recipe.step_in_backward
        # By the entry's number: the optimizer that has stepped it
        self._owners: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._flying: deque[Future[None]] = deque()
        self._stepped: list[Entry] = []
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
        # It refuses formats that disagree
        how = moments.moment_policy(optimizer, self.engine.recipe, flat)
        return how is not None or flat.storage.offloaded

    def step(self, optimizer: Optimizer, entries: Sequence[Entry]) -> None:
        """See `Stepper`.

        Raises:
            ValueError: an option of a group has changed since the backward pass, which stepped with
                the old value.
            RuntimeError: the backward pass stepped with another optimizer.
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
        for other in {self._owners.get(entry.number) for entry in entries} - {None, optimizer}:
            if other in self._owed:
                raise RuntimeError(
                    f"step_in_backward=True has stepped parameters of this {type(optimizer).__name__}"
                    f" in the backward pass, with the {type(other).__name__} that stepped them"
                    " before: drop every reference to that one before the backward pass."
                )
        if self.in_backward:
            self._owners |= {e.number: optimizer for e in entries if e.flat.storage.offloaded}
        step_apart(optimizer, self.engine, entries)

    # -- in the backward pass ----------------------------------------------------------------------

    def takes(self, flat: Flat, which: list[Entry]) -> bool:
        """Whether `flat` is stepped as soon as the gradients of the entries `which` are there. These
        must be all gradients of the flat buffer, and in memory. The answer is False if a parameter
        that was frozen meanwhile gets its gradient of earlier micro-batches now: this pass may still
        read its weights.
        """
        storage = flat.storage
        if not (self._owners and storage.offloaded and self.engine.sync):
            return False
        if storage.gradients_on_disk and any(e.param.grad is not None for e in flat.entries):
            return False
        return all(
            e.active and e in which and e.number in self._owners
            for e in flat.entries
            if e in flat.awaited
        )

    def _owners_of(self, flat: Flat) -> Iterable[Optimizer]:
        found = (self._owners.get(entry.number) for entry in flat.entries)
        return dict.fromkeys(optimizer for optimizer in found if optimizer is not None)

    def has_stepped(self, unit: Unit) -> bool:
        """Whether part of the unit was stepped in the backward pass under way."""
        return any(e in self._stepped for flat in unit.flats for e in flat.entries)

    def landed(self, flat: Flat) -> None:
        """Called for a flat buffer that `takes` accepts, once its gradients are `.grad` of its
        parameters.

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
                    mine = [e for e in flat.entries if self._owners.get(e.number) is optimizer]
                    step_flat(optimizer, engine, flat, mine)
                drop_stepped_gradients(engine, flat, flat.entries)
        except Exception as error:
            engine.failure = engine.failure or error
            engine.transfers.broken = HALF

    def join(self) -> None:
        """Wait for the steps in the backward pass that are under way."""
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
