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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.memory import GRADIENTS, TierError
from onefold.offload.storage import NvmeStorage, Window, inside, state_kind
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.values import Elsewhere, count_writes
from onefold.runtime.reduce import unique_bytes
from onefold.runtime.stepper import groups_of, only, raw_step

#: AHEAD: chunks being read beyond the chunk that is stepped. BEHIND: chunks that may still be
#: written while the next one is stepped.
AHEAD, BEHIND = 2, 1
#: The message if some of the state is stepped and some is not.
HALF = (
    "a step failed half way, so that some of the state is of two steps. Start again from the last"
    " checkpoint."
)


def step_apart(optimizer: Optimizer, engine: Engine, entries: Sequence[Entry]) -> None:
    """Step `entries`, all of offloaded flat buffers. Collective if any flat buffer is on NVMe.

    Raises:
        TierError: on every rank, if a disk failed on one.
    """
    ready = {id(entry) for entry in entries if entry.param.grad is not None}
    if engine.on_disk:
        _flush(engine)
        agree_on_failure(engine, engine.failure, "before the step: nothing has been stepped")
    error: BaseException | None = None
    groups = groups_of(optimizer)
    try:
        with engine.transfers.host_threads():
            for flat in engine.flats:
                if not flat.storage.on_disk:
                    mine = [e for e in flat.entries if id(e) in ready]
                    step_flat(optimizer, engine, flat, mine, groups)
                    if flat.storage.offloaded and engine.recipe.step_in_backward:
                        # As in all later steps. The moments just created need the memory.
                        count_writes(engine, mine)
                        drop_stepped_gradients(engine, flat, mine)
            if engine.on_disk:
                disk = [flat for flat in engine.offloaded_flats if flat.storage.on_disk]
                _Stepping(optimizer, engine, ready).run(disk)
    except (OSError, TierError) as failure:
        error = failure
    if engine.on_disk:
        try:
            agree_on_failure(
                engine,
                error,
                "in the middle of the step: start again from the last checkpoint",
            )
        except TierError:
            engine.transfers.broken = HALF
            raise
        finally:
            engine.transfers.pool.drain()
            # The error's traceback refers to this frame. Without `del` this reference cycle would
            # keep the model alive until the garbage collector runs.
            del error


def _flush(engine: Engine) -> None:
    """Wait until gradients are on the disk, and record a failure in `engine.failure`."""
    try:
        engine.transfers.flush()
    except TierError as error:
        engine.failure = engine.failure or error


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
    if flat.storage.on_disk:
        _Stepping(optimizer, engine, {id(entry) for entry in entries}).run([flat])
        return
    ready = [entry for entry in entries if entry.param.grad is not None]
    if ready:
        groups = groups if groups is not None else groups_of(optimizer)
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

    def __init__(self, optimizer: Optimizer, engine: Engine, mine: set[int]) -> None:
        self.optimizer, self.groups, self.engine, self.mine = (
            optimizer,
            groups_of(optimizer),
            engine,
            mine,
        )
        self.transfers = engine.transfers
        # By the entry's number: the new `optimizer.state`, set when all pieces are stepped
        self.scalars: dict[int, tuple[Entry, dict[str, Any]]] = {}
        self.hows: dict[int, moments.MomentPolicy | None] = {}  # by the flat buffer's index
        # By the entry's number: moments of small parameters, in memory
        self.small: dict[int, dict[str, torch.Tensor]] = {}

    def run(self, flats: Sequence[Flat]) -> None:
        todo = deque(self._windows(flats))
        if any(self.hows.values()) and moments.skipped(self.optimizer):
            todo.clear()
        reading: deque[Window] = deque()
        writing: deque[Window] = deque()
        try:
            while todo or reading:
                while todo and len(reading) <= AHEAD:
                    reading.append(todo.popleft())
                    self._read(reading[-1])
                window = reading.popleft()
                writing.append(window)
                window.settle()
                self._step(window)
                self._write(window)
                while len(writing) > BEHIND:
                    writing.popleft().close()
            while writing:
                writing.popleft().close()
        finally:
            for entry, scalars in self.scalars.values():
                self.optimizer.state[entry.param] = scalars
        self.transfers.flush()

    def _windows(self, flats: Sequence[Flat]) -> Iterator[Window]:
        for flat in flats:
            storage = flat.storage
            assert isinstance(storage, NvmeStorage)
            ready = [e for e in flat.entries if id(e) in self.mine and e.param.grad is not None]
            self.hows[flat.index] = (
                moments.moment_policy(self.optimizer, self.engine.recipe, flat) if ready else None
            )
            for entry in ready:
                self._adopt(storage, entry)
            for a, b in storage.chunks() if ready else ():
                if pieces := inside(ready, a, b):
                    yield Window(storage, a, b, pieces)

    def _adopt(self, storage: NvmeStorage, entry: Entry) -> None:
        """Move states that are in memory (after load_state_dict) to NVMe."""
        state, how = self.optimizer.state.get(entry.param, {}), self.hows[entry.flat.index]
        if how is not None:
            there = [key for key, v in state.items() if moments.is_stored(how, key, v, entry.param)]
            if there and all(state[key].is_meta for key in there):
                return
            if there or how.small(entry):
                group = self.optimizer.param_groups[self.groups[id(entry.param)]]
                parts = moments.adopted(self.optimizer, how, entry, group)
                if how.small(entry):
                    self.small[entry.number] = parts
                    return
                for key in there:
                    del state[key]
                state |= parts
        for key, value in state.items():
            if moments.is_stored(how, key, value, entry.param) and not value.is_meta:
                state[key] = storage.new_state(entry, key, value.dtype, in_memory=False)
                storage.write(entry, key, state[key], *entry.owned(), value.reshape(-1))

    # -- one window --------------------------------------------------------------------------------

    def _read(self, window: Window) -> None:
        kinds = {"master": None}
        for entry, _, _ in window.pieces:
            if isinstance(entry.param.grad, Elsewhere):
                kinds["gradient"] = None
            for key, value in self.optimizer.state.get(entry.param, {}).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    kinds[state_kind(key, value.dtype)] = None
        for kind in kinds:
            window.open(kind, window.storage.regions[kind].dtype)
            window.move("read", kind)

    def _step(self, window: Window) -> None:
        storage, grads = window.storage, window.rows.get("gradient")
        if storage.scale is not None and grads is not None:
            grads.mul_(storage.scale)
        how = self.hows[storage.flat.index]
        pieces = [self._piece(window, how, *piece) for piece in window.pieces]
        device = self.engine.device if how is None else None
        moments.step_pieces(self.optimizer, self.groups, how, pieces, device)
        for piece in pieces:
            entry, kept = piece.entry, self.small.get(piece.entry.number)
            after: dict[str, torch.Tensor] = {
                key: storage.new_state(entry, key, part.dtype, in_memory=False)
                for key, part in (piece.stored if kept is None else {}).items()
            }
            for key, part in (kept or {}).items():
                after[key] = part.view(entry.param.shape)
            self.scalars[entry.number] = entry, piece.numbers | after

    def _piece(
        self, window: Window, how: moments.MomentPolicy | None, entry: Entry, x: int, y: int
    ) -> moments.Piece:
        """Return elements [x, y) of the owned interval."""
        param, begin = entry.param, entry.here.start
        state, small = self.optimizer.state.get(param, {}), self.small.get(entry.number)
        numbers = {k: v for k, v in state.items() if not moments.is_stored(how, k, v, param)}

        def row(key: str, dtype: torch.dtype) -> torch.Tensor:
            kind = state_kind(key, dtype)
            if kind not in window.rows:
                window.make(kind, dtype)
            return window.part(kind, x, y)

        if small is not None:
            stored = moments.cut(small, x - begin, y - begin)
        else:
            kinds = {key: value.dtype for key, value in state.items() if key not in numbers}
            if how is not None:
                kinds = how.parts(entry, self.optimizer.param_groups[self.groups[id(param)]])
            stored = {key: row(key, dtype) for key, dtype in kinds.items()}
            for key in stored.keys() - state.keys():
                stored[key].view(torch.uint8).zero_()
        if "gradient" in window.rows:
            grad = window.part("gradient", x, y)
        else:
            assert param.grad is not None
            grad = param.grad.reshape(-1)[x - begin : y - begin]
        first = entry.owned()[0] + x - begin
        return moments.Piece(
            entry, first, window.part("master", x, y), grad, stored, numbers, not state, row
        )

    def _write(self, window: Window) -> None:
        for kind in window.rows:
            if kind != "gradient":
                window.move("written", kind)
                window.storage.written.add((kind, window.a))
        window.storage.stepped(window.a, window.b, window.rows["master"])
