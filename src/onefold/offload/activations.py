"""Activations on the host between the forward and the backward pass.

    forward   saved  a     b     c     d        backward  reads  d     c     b     a
    copies    down   [a ]  [b ]  [c ]  ·        copies    up     [b ]  [a ]
    device           a     a,b   b,c   c,d      device           d,c,b c,b,a b,a   a

What autograd saves is taken down to host memory and let go of on the device; reading it brings it
up, and with it what will be read next (which was saved before it), as far as `ahead` bytes go.
Copies run on a stream of their own. A CPU takes the same path with copies
that are done when the call returns: there it saves nothing, and proves the rest.

[Note: bytes go down, tensors come back] A copy is of a storage (or, of a small part of a large one,
of that part). A tensor and its views
share it: it goes down once, comes up once, and each is a view of it again with its sizes and
strides. It lives as long as autograd keeps one of them, however it comes to drop it. Tensors that
lie in one storage and are not views of each other for autograd (torch.lstm makes such) count their
versions apart, so each has a copy: another may have been written to since, and nothing would show
it.

[Note: nothing is freed under a copy] The allocator hands memory on in the order of the stream it
was asked on. So memory that a copy reads or writes is kept until that copy is done, or until the
computing stream has been told to wait for it: then whatever gets the memory next comes after the
copy. The host never waits. On the way down at most `window` bytes are kept like this.

What autograd keeps instead of a tensor stands in saved.py, the host's memory in arena.py; the
copies are the room device's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.device import CopyStream, Ticket, capturing, with_index
from onefold.memory.pool import MemoryLedger, empty
from onefold.offload.arena import Arena
from onefold.offload.saved import Copy, Kept, Key, Moved, as_view, extent_of

ACTIVATIONS_ON_HOST, ACTIVATIONS_MOVING = "activations", "activations on their way"
SMALLEST = 1 << 20  # bytes: below, a copy costs more than its memory is worth
# Bytes kept on the device of what goes down, and of what comes up: some milliseconds of the link
NEAR = 128 << 20
_LINE = 64  # bytes: parts keep the alignment that they had in their storage
# A storage goes down whole if it is at most this many times as large as what is saved of it
_FEW = 4


class ActivationStore:
    """Tensors saved for backward, on the host. See the notes of this module.

    Attributes:
        down, up: bytes copied so far. refused: bytes that stayed on the device since the budget had
            no room.
        held: bytes on the host now, without what aligns them.
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
            device: whose tensors go down.
            budget: bytes of host memory, never exceeded. What does not fit stays on the device.
            skip: whether a tensor is to stay, for instance since it lies in memory that is there
                anyway.
            ledger, host: count bytes on the device that the store keeps for copies, and all of its
                bytes on the host.
            moved: told each copy: "up" or "down", and bytes.
            smallest: bytes of a storage below which it stays.
            window, ahead: bytes kept on the device of what goes down, and brought up before they
                are read (above 0: one copy at least). None: 128 MiB, less with a small budget.
        """
        near = min(NEAR, budget // 8)
        self.device = with_index(device)  # as tensors say it
        self.skip, self.moved, self.smallest = skip, moved, smallest
        self.window, self.ahead = (
            near if window is None else window,
            (near if ahead is None else ahead),
        )
        self.ledger = MemoryLedger() if ledger is None else ledger
        self.side = CopyStream(self.device, name="activations")
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
        # Saved tensors are dropped by any thread and in the middle of anything, the collector's
        # runs included.
        self._lock = threading.Lock()
        self._dropped: deque[tuple[Copy, int]] = deque()

    # -- for whoever runs the passes ---------------------------------------------------------------

    def begin_forward(self) -> None:
        """A forward pass begins."""
        with self._lock:
            self._turn += 1
            self._expected, self._offered = self._offered, 0
        self._bury()

    def end_backward(self) -> None:
        """A backward pass is over: what came up for it and was not read goes."""
        with self._lock:
            for copy in list(self._risen):
                self._let_go(copy)
        self._bury()

    def hooks(self) -> saved_tensors_hooks | None:
        """Hooks for a forward pass: what does not go down is handed on to hooks that are in place
        already.

        None inside a checkpoint, which counts what is saved, and keeps nothing of it.
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
        """Take nothing more. Host memory goes back to the system, as soon as no graph keeps
        anything in it.
        """
        with self._lock:
            self.skip = self.moved = None
            self.arena.close()
        self._bury()

    # -- hooks -------------------------------------------------------------------------------------

    def pack(self, t: torch.Tensor) -> Kept | Moved:
        """What autograd is to keep of `t`."""
        moved = self._take_down(t)
        if moved is not None:
            return moved
        with torch._C.DisableTorchFunctionSubclass():
            return Kept(t)

    def unpack(self, saved: Kept | Moved) -> torch.Tensor:
        """The tensor that was packed: the same bits, sizes and strides.

        Raises:
            RuntimeError: it was written to since.
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
            return False  # parameters, and what other libraries make of tensors
        if t.is_conj() or t.is_neg() or t.is_quantized or isinstance(t._base, torch.nn.Parameter):
            return False
        # A graph that is made in a backward pass, as by a recomputation, is read right away.
        if (
            _task() != -1
            or torch._C._functorch.is_functorch_wrapped_tensor(t)
            or capturing(self.device)
        ):
            return False
        return self.skip is None or not self.skip(t)

    def _copy_of(self, t: torch.Tensor) -> Copy | None:
        """The copy that `t` is part of: one that there is, or a new one; None if it stays."""
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
        # What lies between its elements would go down for nothing
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
        self._send(copy, _bytes_of(storage, copy))
        return copy

    def _is_read_first(self, nbytes: int) -> bool:
        """Whether the last pass suggests that this belongs to what the backward pass reads first:
        it would come up again at once.

        Only where copies run behind, and an eighth of all at most. A pass longer than the last goes
        on taking things down after that.
        """
        self._offered += nbytes
        last = min(self.window, self._expected // 8) if self.side.asynchronous else 0
        return last > 0 and self._expected - last < self._offered <= self._expected

    def _send(self, copy: Copy, source: torch.Tensor) -> None:
        ticket = self.side.start(copy.block.bytes, source)
        self.down += copy.nbytes
        if self.moved is not None:
            self.moved("down", copy.nbytes)
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
                and self._in_window <= self.window
                and not (first.ticket is None or first.ticket.query())
            ):
                break
            self._descending.popleft()
            if first.descending:
                self._let_go(first)

    def _watch(self, t: torch.Tensor) -> torch.Tensor:
        """See [Note: versions] in saved.py."""
        if t.dtype not in self._nothing:
            self._nothing[t.dtype] = torch.empty(0, dtype=t.dtype, device=self.device)
        watch = t.detach()
        watch.data = self._nothing[t.dtype]
        return watch

    # -- up ----------------------------------------------------------------------------------------

    def _bytes(self, copy: Copy) -> torch.Tensor:
        """The bytes of a copy where the current stream may read them: uint8, [nbytes]."""
        if copy.here is None:
            original = copy.revived()
            if original is not None:
                return _bytes_of(original, copy)
            self._bring(copy)
        assert copy.here is not None
        return copy.here if copy.descending else self._readable(copy.here, copy.ticket, copy.stream)

    def _bring(self, copy: Copy) -> None:
        into = empty(copy.nbytes, torch.uint8, self.device)
        self._keep(copy, into, self.side.start(into, copy.block.bytes))
        self._risen[copy] = None
        self.up += copy.nbytes
        if self.moved is not None:
            self.moved("up", copy.nbytes)
        copy.comings += 1
        copy.unread = copy.handles

    def _was_read(self, saved: Moved) -> None:
        copy = saved.copy
        if saved.read_in != copy.comings:
            saved.read_in = copy.comings
            copy.unread -= 1
        if not copy.unread:
            copy.read_by = _task()
            self._let_go(copy)  # whoever reads it holds it now

    def _look_ahead(self, copy: Copy) -> None:
        """Bring up what was saved before `copy` in the same pass, the nearest first."""
        room, task, before = self.ahead, _task(), copy.before
        while before is not None and before.turn == copy.turn and room > 0:
            if before.here is None and before.read_by != task and before.original.expired():
                try:
                    self._bring(before)
                except torch.OutOfMemoryError:
                    return  # it can wait
            room -= before.nbytes
            before = before.before

    def _readable(self, t: torch.Tensor, ticket: Ticket | None, stream: Any) -> torch.Tensor:
        """`t` for the current stream, which comes after the copy; a clone if its memory belongs to
        another one.
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
        """Let go of what is on the device. See [Note: nothing is freed under a copy]."""
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
        # Whoever holds the lock comes by here after it
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
    """The backward pass that runs in this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def _bytes_of(storage: torch.UntypedStorage, copy: Copy) -> torch.Tensor:
    return as_view(storage, torch.uint8, copy.start, (copy.nbytes,), (1,))
