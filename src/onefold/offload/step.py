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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import onefold.quant.moments as moments
from onefold.memory import GRADIENTS, TierError
from onefold.offload.nvme import Transfer
from onefold.offload.nvme_storage import NvmeStorage, inside
from onefold.offload.storage import grain_of_kind, state_kind
from onefold.recipe.moments import grain_of
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.values import Elsewhere, count_writes, state_place
from onefold.runtime.reduce import unique_bytes
from onefold.runtime.stepper import groups_of, only, raw_step
from onefold.runtime.storage import state_shape

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


@dataclass
class _Chunk:
    """Elements [a, b) of one flat buffer while they are stepped.

    `buffers`: host buffers by kind of region; each holds the items for these elements ([b - a] if
    an item is an element).
    """

    flat: Flat
    storage: NvmeStorage
    a: int
    b: int
    # (entry, start, stop): elements in the chunk, counted from the first that this rank owns
    pieces: list[tuple[Entry, int, int]]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: list[torch.Tensor] = field(default_factory=list)  # the pool's buffers below `buffers`
    moving: list[Transfer] = field(default_factory=list)


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
        todo = deque(self._chunks(flats))
        if any(self.hows.values()) and moments.skipped(self.optimizer):
            todo.clear()
        reading: deque[_Chunk] = deque()
        writing: deque[_Chunk] = deque()
        try:
            while todo or reading:
                while todo and len(reading) <= AHEAD:
                    chunk = todo.popleft()
                    reading.append(chunk)
                    self._read(chunk)
                chunk = reading.popleft()
                writing.append(chunk)
                self._land(chunk)
                self._step(chunk)
                self._write(chunk)
                while len(writing) > BEHIND:
                    self._finish(writing.popleft())
            while writing:
                self._finish(writing.popleft())
        finally:
            for entry, scalars in self.scalars.values():
                self.optimizer.state[entry.param] = scalars
        self.transfers.flush()

    def _chunks(self, flats: Sequence[Flat]) -> Iterator[_Chunk]:
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
                    yield _Chunk(flat, storage, a, b, pieces)

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
                kind = state_kind(key, value.dtype)
                storage.region(kind, value.dtype)
                storage.write_part(kind, entry.here.start // grain_of(key), value.reshape(-1))
                state[key] = state_place(state_shape(entry, key), value.dtype)

    # -- one chunk ---------------------------------------------------------------------------------

    def _buffer(self, chunk: _Chunk, kind: str, dtype: torch.dtype) -> torch.Tensor:
        grain = grain_of_kind(kind)
        whole, chunk.buffers[kind] = self.transfers.buffer(
            -(-(chunk.b - chunk.a) // grain), dtype, chunk.flat.unit_name, grain
        )
        chunk.whole.append(whole)
        return chunk.buffers[kind]

    def _make(self, chunk: _Chunk, kind: str, dtype: torch.dtype) -> None:
        """Add a buffer for a state that a first step creates.

        The region may already hold this state of other parameters, also of another optimizer. Then
        the buffer is read from NVMe; otherwise it is zeroed.
        """
        region, data = chunk.storage.region(kind, dtype), self._buffer(chunk, kind, dtype)
        if (kind, chunk.a) not in chunk.storage.written:
            data.view(torch.uint8).zero_()
            return
        self.transfers.flush()
        self.transfers.entered("read", chunk.flat.unit_name, data.numel() * data.element_size())
        self.transfers.wait(region.read(chunk.a // grain_of_kind(kind), data))

    def _read(self, chunk: _Chunk) -> None:
        storage = chunk.storage
        kinds = [
            "master",
            *(
                ["gradient"]
                if any(isinstance(e.param.grad, Elsewhere) for e, _, _ in chunk.pieces)
                else []
            ),
        ]
        for entry, _, _ in chunk.pieces:
            for key, value in self.optimizer.state.get(entry.param, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.is_meta
                    and (kind := state_kind(key, value.dtype)) not in kinds
                ):
                    kinds.append(kind)
        for kind in kinds:
            region = storage.regions[kind]
            data = self._buffer(chunk, kind, region.dtype)
            chunk.moving.append(region.read(chunk.a // grain_of_kind(kind), data))
            self.transfers.entered("read", chunk.flat.unit_name, data.numel() * data.element_size())

    def _land(self, chunk: _Chunk) -> None:
        while chunk.moving:
            self.transfers.wait(chunk.moving.pop())
        scale = chunk.storage.scale
        if scale is not None and "gradient" in chunk.buffers:
            chunk.buffers["gradient"].mul_(scale)

    def _step(self, chunk: _Chunk) -> None:
        how = self.hows[chunk.flat.index]
        pieces = [self._piece(chunk, how, *piece) for piece in chunk.pieces]
        device = self.engine.device if how is None else None
        moments.step_pieces(self.optimizer, self.groups, how, pieces, device)
        for piece in pieces:
            entry, kept = piece.entry, self.small.get(piece.entry.number)
            after: dict[str, torch.Tensor] = {
                key: state_place(state_shape(entry, key), part.dtype)
                for key, part in piece.stored.items()
            }
            if kept is not None:
                after = {key: part.view(entry.param.shape) for key, part in kept.items()}
            self.scalars[entry.number] = entry, piece.numbers | after

    def _piece(
        self, chunk: _Chunk, how: moments.MomentPolicy | None, entry: Entry, x: int, y: int
    ) -> moments.Piece:
        """Return elements [x, y) of the owned interval."""
        param, begin = entry.param, entry.here.start
        state, small = self.optimizer.state.get(param, {}), self.small.get(entry.number)
        numbers = {k: v for k, v in state.items() if not moments.is_stored(how, k, v, param)}
        if small is not None:
            stored = moments.cut(small, x - begin, y - begin)
        else:
            kinds = {key: value.dtype for key, value in state.items() if key not in numbers}
            if how is not None:
                kinds = how.parts(entry, self.optimizer.param_groups[self.groups[id(param)]])
            stored = {key: self._view(chunk, key, dtype, x, y) for key, dtype in kinds.items()}
            for key in stored.keys() - state.keys():
                stored[key].view(torch.uint8).zero_()
        if "gradient" in chunk.buffers:
            grad = chunk.buffers["gradient"][x - chunk.a : y - chunk.a]
        else:
            assert param.grad is not None
            grad = param.grad.reshape(-1)[x - begin : y - begin]
        master, first = chunk.buffers["master"][x - chunk.a : y - chunk.a], moments.place(entry)
        return moments.Piece(
            entry, first + x - begin, master, grad, stored, numbers, not state,
            lambda key, dtype: self._view(chunk, key, dtype, x, y),
        )  # fmt: skip

    def _view(self, chunk: _Chunk, key: str, dtype: torch.dtype, x: int, y: int) -> torch.Tensor:
        """Return elements [x, y) of a state in the chunk's buffers."""
        kind, grain = state_kind(key, dtype), grain_of(key)
        if kind not in chunk.buffers:
            self._make(chunk, kind, dtype)
        return chunk.buffers[kind][(x - chunk.a) // grain : -(-(y - chunk.a) // grain)]

    def _write(self, chunk: _Chunk) -> None:
        storage = chunk.storage
        for kind, data in chunk.buffers.items():
            if kind != "gradient":
                chunk.moving.append(
                    storage.regions[kind].write(chunk.a // grain_of_kind(kind), data)
                )
                storage.written.add((kind, chunk.a))
                self.transfers.entered(
                    "written", chunk.flat.unit_name, data.numel() * data.element_size()
                )
        storage.stepped(chunk.a, chunk.b, chunk.buffers["master"])

    def _finish(self, chunk: _Chunk) -> None:
        while chunk.moving:
            self.transfers.wait(chunk.moving.pop())
        self.transfers.up.wait()  # copies up may still read the masters
        chunk.buffers.clear()
        while chunk.whole:
            self.transfers.pool.give(chunk.whole.pop())
