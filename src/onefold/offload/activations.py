"""Store activations on the host between the forward and the backward pass.

    forward   saved  a     b     c     d        backward  reads  d     c     b     a
    copies    down   [a ]  [b ]  [c ]  ·        copies    up     [b ]  [a ]
    device           a     a,b   b,c   c,d      device           d,c,b c,b,a b,a   a

"Down" is a copy from the device to the host, "up" is the way back. A tensor that autograd saves is
copied down and released on the device. When the backward pass reads it, it is copied up. The
tensors that were saved just before it will be read next, so up to `ahead` bytes of them are
prefetched. Copies run on a stream of their own. On a CPU the same code runs with synchronous
copies: this saves no memory, but tests everything else.

[Note: bytes go down, tensors come back] The store copies storages, not tensors (if only a small
part of a large storage was saved, it copies that part). A tensor and its views share one copy: the
bytes go down once and come up once, and each tensor becomes a view of them with its old sizes and
strides. The copy lives until autograd has dropped the last of these tensors. Tensors that share a
storage without being views of each other for autograd (torch.lstm makes such) have separate version
counters. Each of them has a copy of its own, since a write to one does not show in the counter of
another.

[Note: nothing is freed under a copy] The caching allocator reuses memory in the order of the stream
that allocated it. So the store holds memory that a copy reads or writes until the copy is done, or
until the computing stream has been told to wait for the copy. Either way the next user of the
memory comes after the copy, and the host never waits. At most `window` bytes are held for copies
down, or twice the largest of them ([Note: two of the largest] in device/copies.py).

saved.py holds what autograd keeps in place of a tensor. arena.py manages the host memory. The copy
stream is part of the room device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.device import CopyStream, Ticket, capturing, with_index, within
from onefold.memory import MemoryLedger, empty
from onefold.offload.arena import Arena
from onefold.offload.saved import Copy, Kept, Key, Moved, as_view, extent_of
from onefold.runtime.differentiate import keep_from_compiler, keep_hooks_from_compiler

ACTIVATIONS_ON_HOST, ACTIVATIONS_MOVING = "activations", "activations on their way"
SMALLEST = 1 << 20  # bytes: below this a copy costs more than the memory is worth
# Default of `window` and of `ahead`, in bytes: some milliseconds of the link
NEAR = 128 << 20
_LINE = 64  # bytes: a part of a storage keeps the alignment that it had there
# A storage goes down whole if it is at most this many times as large as the saved part
_FEW = 4


class ActivationStore:
    """Tensors saved for backward, on the host. See the notes of this module.

    Attributes:
        down, up: bytes copied so far.
        refused: bytes that stayed on the device because the budget had no room.
        held: bytes on the host now, without alignment.
    """

    def __init__(
        self,
        device: torch.device,
        budget: int,
        *,
        skip: Callable[[torch.Tensor], bool] | None = None,
        ledger: MemoryLedger | None = None,
        host: MemoryLedger | None = None,
        moved: Callable[[str, int], None] | None = None,
        smallest: int = SMALLEST,
        window: int | None = None,
        ahead: int | None = None,
    ) -> None:
        """
        Args:
            device: the device whose tensors go down.
            budget: bytes of host memory, never exceeded. Tensors that do not fit stay on the
                device.
            skip: returns True for a tensor that must stay on the device, for instance because its
                memory is resident anyway.
            ledger: counts the device bytes that the store holds for copies.
            host: counts all bytes of the store on the host.
            moved: called for each copy with "up" or "down" and its bytes.
            smallest: storages of fewer bytes stay on the device.
            window: bytes on the device that copies down may hold; 0 holds nothing.
            ahead: bytes to prefetch before they are read (above 0: one copy at least).
                `window` and `ahead` default to 128 MiB, or an eighth of a small budget.
        """
        near = min(NEAR, budget // 8)
        self.device = with_index(device)  # as tensors say it
        self.skip, self.moved, self.smallest = skip, moved, smallest
        self.window, self.ahead = (
            near if window is None else window,
            (near if ahead is None else ahead),
        )
        self.ledger = MemoryLedger() if ledger is None else ledger
        self.side = CopyStream(self.device)
        host = MemoryLedger() if host is None else host
        self.arena = Arena(
            budget,
            ACTIVATIONS_ON_HOST,
            host,
            pinned=self.device if self.side.asynchronous else None,
            settle=self.side.wait,
        )
        self.down = self.up = self.refused = self.held = 0
        self._found: dict[Key, Copy] = {}
        self._last: Copy | None = None
        self._descending: deque[Copy] = deque()
        self._in_window = 0
        self._risen: dict[Copy, None] = {}
        self._turn = self._offered = self._expected = 0
        self._nothing: dict[torch.dtype, torch.Tensor] = {}
        # Any thread may drop a saved tensor at any moment, also the garbage collector while this
        # thread holds the lock. So a drop is queued here, and processed when the lock is free.
        self._lock = threading.Lock()
        self._dropped: deque[tuple[Copy, int]] = deque()

    # -- around the passes -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass begins."""
        with self._lock:
            self._turn += 1
            self._expected, self._offered = self._offered, 0
        self._bury()

    def end_backward(self) -> None:
        """A backward pass is over: release copies that came up for it and were not read."""
        with self._lock:
            for copy in list(self._risen):
                self._let_go(copy)
        self._bury()

    def hooks(self) -> saved_tensors_hooks | None:
        """Return the hooks for a forward pass.

        Tensors that do not go down are passed on to the hooks that are already installed. Inside an
        activation checkpoint the result is None: the checkpoint counts saved tensors and keeps none
        of them.
        """
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
        if not top:
            return saved_tensors_hooks(self.pack, self.unpack)
        outer_pack, outer_unpack = top
        if getattr(outer_pack, "__module__", "") == "torch.utils.checkpoint":
            return None

        def pack(t: torch.Tensor) -> Any:
            moved = self._take_down(t)
            return outer_pack(t) if moved is None else moved

        def unpack(saved: Any) -> torch.Tensor:
            mine = type(saved) is Moved and saved.store is self
            unpacked: torch.Tensor = self.unpack(saved) if mine else outer_unpack(saved)
            return unpacked

        return saved_tensors_hooks(pack, unpack)

    def close(self) -> None:
        """Take no more tensors. Host memory goes back to the system once no graph keeps a tensor in
        it.
        """
        with self._lock:
            self.skip = self.moved = None
            self.arena.close()
        self._bury()

    # -- hooks -------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> Kept | Moved:
        """Return what autograd keeps in place of `t`."""
        moved = self._take_down(t)
        if moved is not None:
            return moved
        with torch._C.DisableTorchFunctionSubclass():
            return Kept(t)

    def unpack(self, saved: Kept | Moved) -> torch.Tensor:
        """Return the tensor that was packed, with the same bits, sizes and strides.

        Raises:
            RuntimeError: the tensor was written to after it was saved.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(saved, Kept):
                return saved.read()
            saved.check()
            with self._lock:
                t = saved.view_of(self._bytes(saved.copy))
                self._was_read(saved)
                if _task() != -1:
                    self._look_ahead(saved.copy)
        self._bury()
        return t

    # -- down --------------------------------------------------------------------------------------

    def _take_down(self, t: torch.Tensor) -> Moved | None:
        with torch._C.DisableTorchFunctionSubclass():
            if not self._may_go(t):
                return None
            with self._lock:
                copy = self._copy_of(t)
                moved = None if copy is None else Moved(self, copy, t, self._watch(t))
        self._bury()
        return moved

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
            _task() != -1
            or torch._C._functorch.is_functorch_wrapped_tensor(t)
            or capturing(self.device)
        ):
            return False
        return self.skip is None or not self.skip(t)

    def _copy_of(self, t: torch.Tensor) -> Copy | None:
        """Return the copy that holds `t`, an existing or a new one; None if `t` stays."""
        storage, version = t.untyped_storage(), t._version
        whole = storage.nbytes()
        start, stop = extent_of(t)
        if _FEW * (stop - start) >= whole:
            start, stop = 0, whole
        start -= start % _LINE
        base = t._base
        root = t if base is None else base
        key = (storage._cdata, start, stop, id(root))
        for known in ((storage._cdata, 0, whole, id(root)), key):
            copy = self._found.get(known)
            if copy is not None and copy.version == version and copy.root() is root:
                return copy
        nbytes = stop - start
        # A sparse layout: the bytes between its elements would be copied for nothing
        apart = base is None and 2 * t.numel() * t.itemsize < nbytes
        if apart or nbytes < self.smallest or self._is_read_first(nbytes):
            return None
        block = self.arena.take(nbytes)
        if block is None:
            self.refused += nbytes
            return None
        copy = self._found[key] = Copy(key, version, root, block, self._turn)
        copy.line_up(behind=self._last)
        self._last = copy
        self.held += nbytes
        self._send(copy, self._bytes_of(storage, copy))
        return copy

    def _is_read_first(self, nbytes: int) -> bool:
        """Return whether these bytes stay because the backward pass reads them first.

        The end of a forward pass would come up again at once. The last pass tells where the end is:
        the last `window` bytes, at most an eighth of the pass. If this pass turns out longer, later
        tensors go down again. With synchronous copies nothing stays.
        """
        self._offered += nbytes
        last = min(self.window, self._expected // 8) if self.side.asynchronous else 0
        return last > 0 and self._expected - last < self._offered <= self._expected

    def _send(self, copy: Copy, source: torch.Tensor) -> None:
        self.down += copy.nbytes
        if self.moved is not None:
            self.moved("down", copy.nbytes)
        ticket = self.side.start(copy.block.bytes, source)
        if ticket is None:
            return
        self._keep(copy, source, ticket)
        copy.descending = True
        self._descending.append(copy)
        self._in_window += copy.nbytes
        while self._descending:
            first = self._descending[0]
            if (
                first.descending
                and not (first.ticket is None or first.ticket.query())
                and within(self.window, self._in_window, self._sizes())
            ):
                break
            self._descending.popleft()
            if first.descending:
                self._let_go(first)

    def _sizes(self) -> Iterator[int]:
        return (copy.nbytes for copy in self._descending if copy.descending)

    def _watch(self, t: torch.Tensor) -> torch.Tensor:
        """See [Note: versions] in saved.py."""
        if t.dtype not in self._nothing:
            self._nothing[t.dtype] = torch.empty(0, dtype=t.dtype, device=self.device)
        watch = t.detach()
        watch.data = self._nothing[t.dtype]
        return watch

    # -- up ----------------------------------------------------------------------------------------

    def _bytes(self, copy: Copy) -> torch.Tensor:
        """Return the bytes of a copy, readable on the current stream: uint8, [nbytes]."""
        if copy.here is None:
            original = copy.revived()
            if original is not None:
                return self._bytes_of(original, copy)
            self._bring(copy)
        assert copy.here is not None
        return copy.here if copy.descending else self._readable(copy.here, copy.ticket, copy.stream)

    def _bytes_of(self, storage: torch.UntypedStorage, copy: Copy) -> torch.Tensor:
        return as_view(storage, self.device, torch.uint8, copy.start, (copy.nbytes,), (1,))

    def _bring(self, copy: Copy) -> None:
        into = empty(copy.nbytes, torch.uint8, self.device)
        self.up += copy.nbytes
        if self.moved is not None:
            self.moved("up", copy.nbytes)
        self._keep(copy, into, self.side.start(into, copy.block.bytes))
        self._risen[copy] = None
        copy.comings += 1
        copy.unread = copy.handles

    def _was_read(self, saved: Moved) -> None:
        copy = saved.copy
        if saved.read_in != copy.comings:
            saved.read_in = copy.comings
            copy.unread -= 1
        if not copy.unread:
            copy.read_by = _task()
            self._let_go(copy)  # the reader holds the memory now

    def _look_ahead(self, copy: Copy) -> None:
        """Prefetch the copies saved before `copy` in the same pass, the nearest first."""
        room, task, before = self.ahead, _task(), copy.before
        while before is not None and before.turn == copy.turn and room > 0:
            if before.here is None and before.read_by != task and before.original.expired():
                try:
                    self._bring(before)
                except torch.OutOfMemoryError:
                    return  # a prefetch is optional
            room -= before.nbytes
            before = before.before

    def _readable(self, t: torch.Tensor, ticket: Ticket | None, stream: Any) -> torch.Tensor:
        """Return `t` for use on the current stream, which is made to wait for the copy. If the
        memory was allocated on another stream, return a clone.
        """
        here = self.side.current()
        self.side.order(ticket, here)
        if here == stream:
            return t
        clone = t.clone()
        stream.wait_stream(here)
        return clone

    # -- lifetimes ---------------------------------------------------------------------------------

    def _keep(self, copy: Copy, here: torch.Tensor, ticket: Ticket | None) -> None:
        copy.here, copy.ticket, copy.stream = here, ticket, self.side.current()
        self.ledger.add(ACTIVATIONS_MOVING, copy.nbytes)

    def _let_go(self, copy: Copy) -> None:
        """Release the copy's device memory. See [Note: nothing is freed under a copy]."""
        if copy.here is None:
            return
        self.side.order(copy.ticket, copy.stream)
        copy.here = copy.ticket = copy.stream = None
        self.ledger.add(ACTIVATIONS_MOVING, -copy.nbytes)
        self._risen.pop(copy, None)
        if copy.descending:
            copy.descending = False
            self._in_window -= copy.nbytes

    def dropped(self, copy: Copy, read_in: int) -> None:
        """Autograd has dropped a tensor of `copy`."""
        self._dropped.append((copy, read_in))
        self._bury()

    def _bury(self) -> None:
        # If another thread holds the lock, it calls this when it is done
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    copy, read_in = self._dropped.popleft()
                    copy.handles -= 1
                    copy.unread -= read_in != copy.comings
                    if not copy.handles:
                        self._forget(copy)
                    elif not copy.unread:
                        self._let_go(copy)
            finally:
                self._lock.release()

    def _forget(self, copy: Copy) -> None:
        self._let_go(copy)
        self.arena.give(copy.block)
        self.held -= copy.nbytes
        if self._found.get(copy.key) is copy:
            del self._found[copy.key]
        if self._last is copy:
            self._last = copy.before
        copy.step_out()


def _task() -> int:
    """Return the id of the backward pass that runs in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


keep_hooks_from_compiler(ActivationStore.hooks)
for _hook in (ActivationStore.pack, ActivationStore.unpack):
    keep_from_compiler(_hook)
