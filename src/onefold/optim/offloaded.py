"""Stepping what rests off the device, with the optimizer that the user brought.

    host    unit by unit: the optimizer's own step over host tensors and host states ─► copy up behind the next unit's step
    NVMe    chunk by chunk, reads ahead and writes behind:

            disk     read 1   read 2   read 3 | write 1   read 4 | write 2   ...
            step              chunk 1           chunk 2             chunk 3

A torch optimizer steps what is in its `param_groups` and keeps what it knows in `state`. For the time of one step the groups are copies
that hold only the parameters whose turn it is. For NVMe these are stand-ins: slices of staging buffers with slices of gradients and
states. Between steps `optimizer.state` of the real parameter holds scalars as they are, and a tensor on the meta device in place of
each state that has an element for each element of the parameter.

[Note: a step is whole or refused] Ranks tell each other before and after: what goes wrong before (a gradient that could not be
written) leaves every rank's state as it was; what goes wrong in the middle (the disk fails) leaves some of it stepped, which nothing
can undo, so that the model refuses to go on and to be saved.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from onefold.layout import overlap
from onefold.memory import GRADIENTS
from onefold.memory.nvme import TierError, Transfer
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.hollow import is_hollow
from onefold.runtime.home import Home, state_kind
from onefold.runtime.kept import unique_bytes

#: Chunks whose reads are under way beyond the one that is stepped, and chunks whose writes may be.
AHEAD, BEHIND = 2, 1
#: What is said of state that nobody can vouch for.
HALF = "a step failed half way, so that some of the state is of two steps. Start again from the last checkpoint."


def step_offloaded(optimizer: Optimizer, engine: Engine, entries: Sequence[Entry]) -> None:
    """Step the parameters of `entries` whose state rests off the device. Collective where any rests on NVMe.

    Raises:
        TierError: on every rank, if a disk failed on one.
    """
    ready = {id(entry) for entry in entries if entry.param.grad is not None}
    if engine.on_disk:
        _flush(engine)
        agree_on_failure(engine, engine.failure, "before the step: nothing has been stepped")
    error: BaseException | None = None
    try:
        for flat in engine.at_home:
            if flat.home is not None and not flat.home.on_disk:
                mine = [e for e in flat.entries if id(e) in ready]
                step_flat(optimizer, engine, flat, mine)
                if engine.recipe.step_in_backward:  # as it will be in the steps to come, and the moments just made need the room
                    engine.moves.all_of(mine)
                    let_go(engine, flat, mine)
        disk = [flat for flat in engine.at_home if flat.home is not None and flat.home.on_disk]
        _Stepping(optimizer, engine, ready).run(disk)
    except (OSError, TierError) as failure:
        error = failure
    if engine.on_disk:
        try:
            agree_on_failure(engine, error, "in the middle of the step: start again from the last checkpoint")
        except TierError:
            engine.beyond.broken = HALF
            raise
        finally:
            engine.beyond.pool.drain()
            del error  # its traceback holds this frame: the model must not wait for the collector to go


def _flush(engine: Engine) -> None:
    """Gradients are on the disk, or that they are not is known."""
    try:
        engine.beyond.flush()
    except TierError as error:
        engine.failure = engine.failure or error


def step_flat(optimizer: Optimizer, engine: Engine, flat: Flat, entries: Sequence[Entry]) -> None:
    """Step those parameters of one flat buffer off the device that `entries` are of and that have a gradient. Local.

    Raises:
        TierError: the disk failed.
    """
    assert flat.home is not None
    if flat.home.on_disk:
        _Stepping(optimizer, engine, {id(entry) for entry in entries}).run([flat])
        return
    ready = [entry.param for entry in entries if entry.param.grad is not None]
    if ready:
        with _only(optimizer, _groups(optimizer), ready, ready):
            raw_step(optimizer)
        flat.home.touched()
    flat.home.follow()


def let_go(engine: Engine, flat: Flat, entries: Iterable[Entry]) -> None:
    """Drop the gradients in memory of those `entries` of `flat` that have been stepped."""
    before = sum(unique_bytes(e.param.grad for e in flat.entries))
    for entry in entries:
        entry.param.grad = None
    after = sum(unique_bytes(e.param.grad for e in flat.entries))  # another optimizer's lie in the same memory
    engine.beyond.host.add(GRADIENTS, after - before)


def _groups(optimizer: Optimizer) -> dict[int, int]:
    """The index of each parameter's group, by the parameter's id."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def raw_step(optimizer: Optimizer) -> None:
    """The optimizer's own update without the hooks around it."""
    function: Any = type(optimizer).step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    function(optimizer)


@contextlib.contextmanager
def _only(optimizer: Optimizer, groups: dict[int, int], real: Sequence[torch.Tensor], stand_ins: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the optimizer knows only `stand_ins`, each in the group of its `real` parameter.

    Groups are copies, and counters of the optimizer's own are put back: a step in pieces counts as one, which the outer step() makes.
    """
    wanted: dict[int, list[torch.Tensor]] = {}
    for param, stand_in in zip(real, stand_ins, strict=True):
        wanted.setdefault(groups[id(param)], []).append(stand_in)
    before, counters = optimizer.param_groups, {k: v for k, v in optimizer.__dict__.items() if isinstance(v, (int, float))}
    optimizer.param_groups = [{**before[i], "params": params} for i, params in sorted(wanted.items())]
    try:
        yield
    finally:
        optimizer.param_groups = before
        optimizer.__dict__.update(counters)


@dataclass
class _Chunk:
    """Elements [a, b) of one flat buffer on their way: buffers by kind of what is on NVMe, each [b - a]."""

    flat: Flat
    home: Home
    a: int
    b: int
    pieces: list[tuple[Entry, int, int]]  # an entry's elements in the chunk, counted from the first that this rank owns
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: list[torch.Tensor] = field(default_factory=list)  # what the buffers are views of
    moving: list[Transfer] = field(default_factory=list)


class _Stepping:
    """One step of everything on NVMe of one optimizer."""

    def __init__(self, optimizer: Optimizer, engine: Engine, mine: set[int]) -> None:
        self.optimizer, self.groups, self.engine, self.mine = optimizer, _groups(optimizer), engine, mine
        self.beyond = engine.beyond
        self.scalars: dict[int, tuple[Entry, dict[str, Any]]] = {}  # what the states of an entry will be, once all its pieces are stepped

    def run(self, flats: Sequence[Flat]) -> None:
        todo = deque(self._chunks(flats))
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
            for chunk in (*reading, *writing):  # only if something went wrong
                for transfer in chunk.moving:
                    with contextlib.suppress(Exception):
                        transfer.wait()
            for entry, scalars in self.scalars.values():
                self.optimizer.state[entry.param] = scalars
        self.beyond.flush()

    def _chunks(self, flats: Sequence[Flat]) -> Iterator[_Chunk]:
        for flat in flats:
            home = flat.home
            assert home is not None
            ready = [e for e in flat.entries if id(e) in self.mine and e.param.grad is not None]
            for entry in ready:
                self._adopt(home, entry)
            for a, b in home.chunks() if ready else ():
                pieces = []
                for entry in ready:
                    x, y = overlap(_owned(entry), (a, b))
                    if x < y:
                        pieces.append((entry, x, y))
                if pieces:
                    yield _Chunk(flat, home, a, b, pieces)

    def _adopt(self, home: Home, entry: Entry) -> None:
        """States that somebody has put in memory (load_state_dict) go to NVMe."""
        state = self.optimizer.state.get(entry.param, {})
        for key, value in state.items():
            if _elementwise(value, entry.param) and value.device.type != "meta":
                kind = state_kind(key, value.dtype)
                home.region(kind, value.dtype)
                home.write_part(kind, _owned(entry)[0], value.reshape(-1))
                state[key] = torch.empty(entry.param.shape, dtype=value.dtype, device="meta")

    # -- one chunk -------------------------------------------------------------------------------------------------------------

    def _buffer(self, chunk: _Chunk, kind: str, dtype: torch.dtype) -> torch.Tensor:
        whole, chunk.buffers[kind] = self.beyond.buffer(chunk.b - chunk.a, dtype, chunk.flat.unit_name)
        chunk.whole.append(whole)
        return chunk.buffers[kind]

    def _read(self, chunk: _Chunk) -> None:
        home = chunk.home
        kinds = ["master", *(["gradient"] if any(e.param.grad is not None and is_hollow(e.param.grad) for e, _, _ in chunk.pieces) else [])]
        for entry, _, _ in chunk.pieces:
            for key, value in self.optimizer.state.get(entry.param, {}).items():
                if _elementwise(value, entry.param) and (kind := state_kind(key, value.dtype)) not in kinds:
                    kinds.append(kind)
        for kind in kinds:
            region = home.regions[kind]
            data = self._buffer(chunk, kind, region.dtype)
            chunk.moving.append(region.read(chunk.a, data))
            self.beyond.entered("read", chunk.flat.unit_name, data.numel() * data.element_size())

    def _land(self, chunk: _Chunk) -> None:
        while chunk.moving:
            self.beyond.wait(chunk.moving.pop())
        scale = chunk.home.scale
        if scale is not None and "gradient" in chunk.buffers:
            chunk.buffers["gradient"].mul_(scale)

    def _step(self, chunk: _Chunk) -> None:
        stand_ins = [self._stand_in(chunk, *piece) for piece in chunk.pieces]
        with _only(self.optimizer, self.groups, [e.param for e, _, _ in chunk.pieces], stand_ins):
            try:
                raw_step(self.optimizer)
            finally:
                states = [self.optimizer.state.pop(p, {}) for p in stand_ins]
        for (entry, x, y), stand_in, state in zip(chunk.pieces, stand_ins, states, strict=True):
            self._keep(chunk, entry, x, y, stand_in, state)

    def _stand_in(self, chunk: _Chunk, entry: Entry, x: int, y: int) -> nn.Parameter:
        """Elements [x, y) of the owned interval as a parameter of their own."""
        here = slice(x - chunk.a, y - chunk.a)
        stand_in = nn.Parameter(chunk.buffers["master"][here])
        if "gradient" in chunk.buffers:
            stand_in.grad = chunk.buffers["gradient"][here]
        else:
            first = _owned(entry)[0]
            assert entry.param.grad is not None
            stand_in.grad = entry.param.grad.reshape(-1)[x - first : y - first]
        state: dict[str, Any] = {}
        for key, value in self.optimizer.state.get(entry.param, {}).items():
            if _elementwise(value, entry.param):
                state[key] = chunk.buffers[state_kind(key, value.dtype)][here]
            else:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        if state:
            self.optimizer.state[stand_in] = state
        return stand_in

    def _keep(self, chunk: _Chunk, entry: Entry, x: int, y: int, stand_in: nn.Parameter, state: dict[str, Any]) -> None:
        """What the optimizer left in a stand-in's state: into the chunk's buffers, scalars aside."""
        after: dict[str, Any] = {}
        for key, value in state.items():
            if not _elementwise(value, stand_in):
                after[key] = value
                continue
            kind = state_kind(key, value.dtype)
            if kind not in chunk.buffers:  # the first step has made it
                chunk.home.region(kind, value.dtype)
                self._buffer(chunk, kind, value.dtype).zero_()
            into = chunk.buffers[kind][x - chunk.a : y - chunk.a]
            if into.data_ptr() != value.data_ptr():
                into.copy_(value)
            after[key] = torch.empty(entry.param.shape, dtype=value.dtype, device="meta")
        self.scalars[entry.number] = entry, after

    def _write(self, chunk: _Chunk) -> None:
        home = chunk.home
        for kind, data in chunk.buffers.items():
            if kind != "gradient":
                chunk.moving.append(home.regions[kind].write(chunk.a, data))
                self.beyond.entered("written", chunk.flat.unit_name, data.numel() * data.element_size())
        home.stepped(chunk.a, chunk.b, chunk.buffers["master"])

    def _finish(self, chunk: _Chunk) -> None:
        while chunk.moving:
            self.beyond.wait(chunk.moving.pop())
        self.beyond.lane.wait()  # copies up may still read the masters
        chunk.buffers.clear()
        while chunk.whole:
            self.beyond.pool.give(chunk.whole.pop())


def _owned(entry: Entry) -> tuple[int, int]:
    """The elements of `entry` that this rank owns, counted from the first of its flat buffer that it owns."""
    a, b = entry.flat.local(entry)
    return a - entry.flat.owned[0], b - entry.flat.owned[0]


def _elementwise(value: Any, param: torch.Tensor) -> bool:
    """Whether a state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape

