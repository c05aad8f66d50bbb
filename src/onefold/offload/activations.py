"""Store activations on the host between the forward and the backward pass.

    forward   saved  a     b     c     d        backward  reads  d     c     b     a
    copies    down   [a ]  [b ]  [c ]  ·        copies    up     [b ]  [a ]
    device           a     a,b   b,c   c,d      device           d,c,b c,b,a b,a   a

"Down" is a copy from the device to the host, "up" is the way back. A tensor that autograd saves is
copied down and released on the device. When the backward pass reads it, it is copied up. The
tensors that were saved just before it will be read next, so up to `ahead` bytes of them are
prefetched. Copies run on a stream of their own. On a CPU the same code runs with synchronous
copies: this saves no memory, but tests everything else.

The hooks are installed during a forward pass over the model, below the gatherer's hooks. The
gatherer has already replaced tensors in gathered buffers by handles; the remaining tensors arrive
here. During a backward pass, recomputations included, nothing goes down. Parameters and buffers
stay on the device, where they are resident anyway.

[Note: bytes go down, tensors come back] The store copies storages, not tensors (if only a small
part of a large storage was saved, it copies that part). A tensor and its views share one copy: the
bytes go down once and come up once, and each tensor becomes a view of them with its old sizes and
strides. The copy lives until autograd has dropped the last of these tensors. Tensors that share a
storage without being views of each other for autograd (torch.lstm makes such) have separate version
counters. Each of them has a copy of its own, since a write to one does not show in the counter of
another.

[Note: versions] Autograd does not check the version of tensors that a hook has packed, so this
module does. For each saved tensor it keeps a watch: a tensor without memory that shares the version
counter. Reading a saved tensor that was written to in the meantime raises, as without hooks.
(Writes through `.data` do not count, as without hooks.)

[Note: nothing is freed under a copy] The caching allocator reuses memory in the order of the stream
that allocated it. So memory that a copy down reads is held by the copy stream (see
device/copies.py), and memory that a copy up writes is let go of only after the computing stream has
been told to wait for the copy. The next user of the memory comes after the copy, and the host never
waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.device import CopyStream, capturing, with_index
from onefold.device.pinned import HUGE_PAGE
from onefold.memory import LARGE, MemoryLedger, empty, storage_of
from onefold.runtime.differentiate import keep_hooks_from_compiler
from onefold.runtime.engine import Activations
from onefold.runtime.saved import Kept, refuse_other_version

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine

ACTIVATIONS_ON_HOST, ACTIVATIONS_MOVING = "activations", "activations on their way"
IDLE_SLABS = "idle slabs"
SMALLEST = 1 << 20  # bytes: below this a copy costs more than the memory is worth
# Bytes that copies down hold on the device, and that are prefetched: some milliseconds of the link
NEAR = 128 << 20
ALIGNMENT = 512  # bytes: where blocks begin
SLAB = 256 << 20  # bytes asked of the system at once, as far as the budget goes
_LINE = 64  # bytes: a part of a storage keeps the alignment that it had there
# A storage goes down whole if it is at most this many times as large as the saved part
_FEW = 4


# -- host memory -----------------------------------------------------------------------------------


class Block(NamedTuple):
    """Bytes [start, stop) of a slab."""

    slab: int
    start: int
    stop: int


class Arena:
    """Host memory for copies of device memory: slabs, cut into blocks, within a budget.

        slab 0   [a    ][b ][c        ][hole       ]        take: the first hole that is large enough, from the front
        slab 1   [d            ][hole              ]        give: the hole grows together with its neighbours

    Slabs stay allocated from step to step. A buffer for each tensor would be slow: sequence lengths
    change from step to step, and pinning new memory takes longer than copying it.
    """

    def __init__(self, budget: int, ledger: MemoryLedger, side: CopyStream) -> None:
        self.budget, self.ledger, self.side = budget, ledger, side
        self.slabs: dict[int, torch.Tensor] = {}
        self.holes: list[Block] = []
        self.made = 0

    def take(self, nbytes: int) -> Block | None:
        """Return a block with undefined contents, or None if the budget has no room for it.

        Raises:
            RuntimeError: the budget has room, but the system has no memory.
        """
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        while (i := self._first(room)) is None:
            if not self._grow(room):
                return None
        slab, start, stop = self.holes[i]
        self.holes[i : i + 1] = [Block(slab, start + room, stop)] if stop - start > room else []
        self._count(room)
        return Block(slab, start, start + room)

    def bytes(self, block: Block, nbytes: int) -> torch.Tensor:
        """uint8, [nbytes]"""
        return self.slabs[block.slab][block.start : block.start + nbytes]

    def give(self, block: Block) -> None:
        holes: list[Block] = []
        for hole in sorted([*self.holes, block]):
            if holes and holes[-1][::2] == hole[:2]:  # it begins where the last one stops
                hole = Block(hole.slab, holes.pop().start, hole.stop)
            holes.append(hole)
        self.holes = holes
        self._count(block.start - block.stop)
        if not self.budget:
            self.trim()

    def trim(self) -> None:
        """Give slabs without blocks back to the system."""
        idle = [hole for hole in self.holes if hole.stop - hole.start == len(self.slabs[hole.slab])]
        if idle:
            self.side.wait()  # for copies that still use the memory
        for hole in idle:
            self.holes.remove(hole)
            del self.slabs[hole.slab]
            self.ledger.add(IDLE_SLABS, -hole.stop)

    def close(self) -> None:
        """Give out no more blocks. A slab is freed when its last block has come back."""
        self.budget = 0
        self.trim()

    def _first(self, room: int) -> int | None:
        return next((i for i, h in enumerate(self.holes) if h.stop - h.start >= room), None)

    def _grow(self, room: int) -> bool:
        """Make a slab; return whether the budget had room for it."""
        left = self._left()
        if left < room:
            self.trim()  # idle slabs are each too small for this block
            left = self._left()
        if left < room:
            return False
        nbytes = min(max(room, SLAB), left)
        # Large slabs are whole huge pages. Otherwise the system would map more than is counted.
        unit = HUGE_PAGE if nbytes // HUGE_PAGE * HUGE_PAGE >= max(room, LARGE) else ALIGNMENT
        nbytes -= nbytes % unit
        pinned = self.side.device if self.side.asynchronous else None
        try:
            # A page cannot be pinned twice, so a pinned slab shares no page with other memory
            slab = empty(nbytes, torch.uint8, torch.device("cpu"), pinned is not None, pinned)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"the system gave no {nbytes:,} bytes of host memory, although the budget for"
                f" activations has room for them: {error}. Give a smaller budget, or free memory on"
                " this machine."
            ) from error
        self.made += 1
        self.slabs[self.made] = slab
        self.holes.append(Block(self.made, 0, nbytes))
        self.ledger.add(IDLE_SLABS, nbytes)
        return True

    def _left(self) -> int:
        return self.budget - sum(len(slab) for slab in self.slabs.values())

    def _count(self, nbytes: int) -> None:
        # The decrease comes first, so the sum has no false peak in between
        for name in (IDLE_SLABS, ACTIVATIONS_ON_HOST)[:: 1 if nbytes > 0 else -1]:
            self.ledger.add(name, nbytes if name == ACTIVATIONS_ON_HOST else -nbytes)


# -- what autograd keeps ---------------------------------------------------------------------------


@dataclass(eq=False)
class Copy:
    """Bytes [start, start + nbytes) of a storage at one version, on the host.

    Attributes:
        root: the tensor with that version. Every saved tensor of this copy is `root` or a view of
            it.
        position: in the order of saving.
        handles: number of saved tensors of this copy that autograd holds.
        read: how many of these were read since the bytes last came up. read_by: the backward pass
            that has read all of them.
        here: the same bytes on the device while they are up; uint8, [nbytes].
        ticket: the copy that writes `here`. stream: the stream on which `here` was allocated.
    """

    key: Any
    version: int
    root: weakref.ref[torch.Tensor]
    block: Block
    start: int
    nbytes: int
    position: int
    handles: int = 0
    read: int = 0
    read_by: int = -1
    here: torch.Tensor | None = None
    ticket: Any = None
    stream: Any = None


class Moved:
    """Autograd keeps this in place of a tensor that went down: its place in a copy."""

    __slots__ = ("copy", "dtype", "offset", "size", "store", "stride", "version", "watch")

    def __init__(self, store: ActivationStore, copy: Copy, t: torch.Tensor) -> None:
        self.store, self.copy, self.version = store, copy, t._version
        self.watch = t.detach()  # [Note: versions]
        self.watch.data = torch.empty(0, dtype=t.dtype, device=t.device)
        self.dtype, self.size, self.stride = t.dtype, t.size(), t.stride()
        self.offset = int(t.storage_offset()) - copy.start // t.itemsize
        copy.handles += 1

    def __del__(self) -> None:
        self.store.dropped.append(self.copy)
        self.store.bury()


class ActivationStore(Activations):
    """Tensors saved for backward, on the host. See the notes of this module.

    Attributes:
        ahead: bytes to prefetch before they are read (above 0: one copy at least): 128 MiB, or an
            eighth of a small budget. `side` holds as many for copies down.
        smallest: storages of fewer bytes stay on the device.
        down, up: bytes copied so far.
    """

    def __init__(self, engine: Engine) -> None:
        budget, transfers = engine.recipe.offload_activations, engine.transfers
        assert budget is not None
        self.device = with_index(engine.device)  # as tensors say it
        # Storages that hold gathered parameters at the moment stay, too
        self.units, self.gathered = engine.units, engine.gather.by_storage
        self.ledger, self.entered = engine.memory, transfers.entered
        self.smallest, self.ahead = SMALLEST, min(NEAR, budget // 8)
        self.side = CopyStream(self.device, window=self.ahead)
        self.arena = Arena(budget, transfers.host, self.side)
        self.down = self.up = 0
        self.dropped: deque[Copy] = deque()
        self._there: set[int] = set()
        self._found: dict[Any, Copy] = {}
        self._copies: list[Copy] = []  # in the order of saving; those without handles are gone
        # Any thread may drop a saved tensor at any moment, also the garbage collector while this
        # thread holds the lock. So a drop is queued, and processed when the lock is free.
        self._lock = threading.Lock()

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield tensors whose memory stays on the device anyway."""
        for flat in (flat for unit in self.units for flat in unit.flats):
            if flat.full is not None and flat.resident:
                yield flat.full
            if flat.unsharded:
                yield from (entry.param for entry in flat.entries)
        if self.units and (model := self.units[0].module()) is not None:
            yield from model.buffers()

    # -- around the passes -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        with self._lock:
            self._there = {storage_of(t) for t in self.resident() if not t.is_meta}
        self.bury()
        self.hooks = self._hooks()
        if self.hooks is not None:
            self.hooks.__enter__()

    def end_forward(self) -> None:
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def end_backward(self) -> None:
        """A backward pass is over: release copies that came up for it and were not read."""
        with self._lock:
            for copy in self._copies:
                self._let_go(copy)
            self.side.release()
        self.bury()

    def close(self) -> None:
        """Take no more tensors. Graphs that are alive keep theirs; host memory goes back to the
        system once no graph keeps a tensor in it.
        """
        with self._lock:
            self.units, self.gathered, self.entered = [], {}, lambda move, unit, nbytes: None
            self.arena.close()
        self.bury()

    def _hooks(self) -> saved_tensors_hooks | None:
        """Return the hooks for a forward pass.

        Tensors that do not go down are passed on to the hooks that are already installed. Inside an
        activation checkpoint the result is None: the checkpoint counts saved tensors and keeps none
        of them.
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        outer_pack, outer_unpack = top or (Kept, Kept.read)
        if getattr(outer_pack, "__module__", "") == "torch.utils.checkpoint":
            return None

        def pack(t: torch.Tensor) -> Any:
            moved = self.pack(t)
            return outer_pack(t) if moved is None else moved

        def unpack(saved: Any) -> torch.Tensor:
            mine = type(saved) is Moved and saved.store is self
            unpacked: torch.Tensor = self.unpack(saved) if mine else outer_unpack(saved)
            return unpacked

        return saved_tensors_hooks(pack, unpack)

    # -- hooks -------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> Moved | None:
        """Return what autograd keeps in place of `t`; None if it stays."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self._may_go(t):
                return None
            with self._lock:
                copy = self._copy_of(t)
                moved = None if copy is None else Moved(self, copy, t)
        self.bury()
        return moved

    def unpack(self, saved: Moved) -> torch.Tensor:
        """Return the tensor that was packed, with the same bits, sizes and strides.

        Raises:
            RuntimeError: the tensor was written to after it was saved.
        """
        with torch._C.DisableTorchFunctionSubclass():
            refuse_other_version(saved.watch, saved.version, saved.size)
            with self._lock:
                copy = saved.copy
                here = self._bring(copy)
                self.side.order(copy.ticket)
                first = int(here.storage_offset()) // saved.dtype.itemsize + saved.offset
                storage = here.untyped_storage()
                t = _view(storage, self.device, saved.dtype, first, saved.size, saved.stride)
                copy.read += 1
                task = torch._C._current_graph_task_id()
                if copy.read >= copy.handles:
                    copy.read_by = task
                    self._let_go(copy)  # the reader holds the memory now
                if task != -1:
                    self._look_ahead(copy, task)
        self.bury()
        return t

    # -- down --------------------------------------------------------------------------------------

    def _may_go(self, t: torch.Tensor) -> bool:
        if (
            type(t) is not torch.Tensor
            or t.device != self.device
            or t.layout is not torch.strided
            or t.numel() == 0
        ):
            return False  # parameters, and tensor subclasses of other libraries
        if t.is_conj() or t.is_neg() or t.is_quantized or isinstance(t._base, torch.nn.Parameter):
            return False
        # A graph that is built inside a backward pass (by a recomputation) is read right away.
        if (
            torch._C._current_graph_task_id() != -1
            or torch._C._functorch.is_functorch_wrapped_tensor(t)
            or capturing(self.device)
        ):
            return False
        storage = storage_of(t)
        return storage not in self.gathered and storage not in self._there

    def _copy_of(self, t: torch.Tensor) -> Copy | None:
        """Return the copy that holds `t`, an existing or a new one; None if `t` stays."""
        storage, version = t.untyped_storage(), t._version
        whole, first = storage.nbytes(), int(t.storage_offset())
        span = sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True)) + 1
        start, stop = first * t.itemsize, (first + span) * t.itemsize
        if _FEW * (stop - start) >= whole:
            start, stop = 0, whole
        start -= start % _LINE
        root = t if t._base is None else t._base
        key = (storage._cdata, start, stop, id(root))
        for known in ((storage._cdata, 0, whole, id(root)), key):
            copy = self._found.get(known)
            if copy is not None and copy.version == version and copy.root() is root:
                return copy
        nbytes = stop - start
        # A sparse layout: the bytes between its elements would be copied for nothing
        apart = root is t and 2 * t.numel() * t.itemsize < nbytes
        if apart or nbytes < self.smallest:
            return None
        block = self.arena.take(nbytes)
        if block is None:
            return None
        position = len(self._copies)
        copy = Copy(key, version, weakref.ref(root), block, start, nbytes, position)
        self._found[key] = copy
        self._copies.append(copy)
        self.down += nbytes
        self.entered("down", "activations", nbytes)
        self.ledger.add(ACTIVATIONS_MOVING, nbytes)
        source = _view(storage, self.device, torch.uint8, start, (nbytes,), (1,))
        into, ledger = self.arena.bytes(block, nbytes), self.ledger
        self.side.run(
            lambda: into.copy_(source, non_blocking=True),
            (source,),
            lambda: ledger.add(ACTIVATIONS_MOVING, -nbytes),
        )
        return copy

    # -- up ----------------------------------------------------------------------------------------

    def _bring(self, copy: Copy) -> torch.Tensor:
        """Return the bytes of a copy on the device, which a copy stream may still write."""
        stream = self.side.current()
        if copy.here is not None and copy.stream != stream:
            self._let_go(copy)  # the memory is that of another stream
        if copy.here is None:
            self.side.release()  # this copy comes behind those on their way down
            copy.here, copy.stream = empty(copy.nbytes, torch.uint8, self.device), stream
            copy.read = 0
            self.up += copy.nbytes
            self.entered("up", "activations", copy.nbytes)
            self.ledger.add(ACTIVATIONS_MOVING, copy.nbytes)
            copy.ticket = self.side.start(copy.here, self.arena.bytes(copy.block, copy.nbytes))
        return copy.here

    def _look_ahead(self, copy: Copy, task: int) -> None:
        """Prefetch the copies saved before `copy`, the nearest first."""
        room, position = self.ahead, copy.position
        while room > 0 and position > 0:
            position -= 1
            before = self._copies[position]
            if before.handles and before.read_by != task:
                try:
                    self._bring(before)
                except torch.OutOfMemoryError:
                    return  # a prefetch is optional
                room -= before.nbytes

    # -- lifetimes ---------------------------------------------------------------------------------

    def _let_go(self, copy: Copy) -> None:
        """Release the copy's device memory. See [Note: nothing is freed under a copy]."""
        if copy.here is not None:
            self.side.order(copy.ticket, copy.stream)
            copy.here = copy.ticket = copy.stream = None
            self.ledger.add(ACTIVATIONS_MOVING, -copy.nbytes)

    def bury(self) -> None:
        """Give up what autograd has dropped. If another thread holds the lock, it does so when it is
        done.
        """
        while self.dropped and self._lock.acquire(blocking=False):
            try:
                while self.dropped:
                    copy = self.dropped.popleft()
                    copy.handles -= 1
                    copy.read = max(0, copy.read - 1)  # most are dropped by the node that read them
                    if copy.handles:
                        continue
                    self._let_go(copy)
                    self.arena.give(copy.block)
                    if self._found.get(copy.key) is copy:
                        del self._found[copy.key]
                    while self._copies and not self._copies[-1].handles:
                        self._copies.pop()
            finally:
                self._lock.release()


def _view(
    storage: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor over `storage`, which is on `device`; `offset` in elements."""
    nothing: Any = torch.empty(0, dtype=dtype, device=device)
    view: torch.Tensor = nothing.set_(storage, offset, size, stride)
    return view


keep_hooks_from_compiler(ActivationStore._hooks)
