"""Objects that autograd keeps in place of saved tensors, whose bytes may be on the host.

[Note: versions] Autograd does not check the version of tensors that a hook has packed, so this
module does. For each saved tensor it keeps a watch: a tensor without memory that shares the version
counter. Reading a saved tensor that was written to in the meantime raises, as without hooks.
(Writes through `.data` do not count, as without hooks.)
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.device import Ticket
from onefold.offload.arena import Block


class Kept:
    """Autograd keeps this in place of a tensor that stays on the device."""

    __slots__ = ("tensor", "version")

    def __init__(self, t: torch.Tensor) -> None:
        # A node may save its own output. Without detach() the node and the tensor would form a
        # reference cycle.
        self.tensor = t if t.grad_fn is None else t.detach()
        self.version = t._version

    def read(self) -> torch.Tensor:
        refuse_other_version(self.tensor, self.version, self.tensor.size())
        return self.tensor


Key = tuple[int, int, int, int]  # storage, start, stop, root


class Copy:
    """Bytes [start, start + nbytes) of a storage at one version, on the host.

    Attributes:
        root: the tensor with that version. Every saved tensor of this copy is `root` or a view of
            it.
        original: weak reference to the storage, which lives on if somebody else holds it.
        here: the same bytes on the device while they go down or are up; uint8, [nbytes].
        ticket: the last copy that reads or writes `here`.
        stream: the stream on which `here` was allocated.
        descending: whether `here` is the original storage, still being copied down.
        comings: how often the bytes have come up.
        handles: number of saved tensors of this copy that autograd holds.
        unread: how many of these were not read since the bytes last came up.
        read_by: the backward pass in which `unread` last became 0.
        before, after: neighbours in the order of saving.
        turn: number of the forward pass.
    """

    __slots__ = (
        "after", "before", "block", "comings", "descending", "handles", "here", "key", "nbytes", "original", "read_by", "root", "start",
        "stream", "ticket", "turn", "unread", "version",
    )  # fmt: skip

    def __init__(self, key: Key, version: int, root: torch.Tensor, block: Block, turn: int) -> None:
        self.key, self.version, self.block, self.turn = key, version, block, turn
        self.root, self.original = weakref.ref(root), StorageWeakRef(root.untyped_storage())
        self.start, self.nbytes = key[1], block.nbytes
        self.here: torch.Tensor | None = None
        self.ticket: Ticket | None = None
        self.stream: Any = None
        self.descending = False
        self.comings = self.handles = self.unread = 0
        self.read_by = -1
        self.before: Copy | None = None
        self.after: Copy | None = None

    def line_up(self, behind: Copy | None) -> None:
        self.before = behind
        if behind is not None:
            behind.after = self

    def step_out(self) -> None:
        if self.before is not None:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before
        self.before = self.after = None

    def revived(self) -> torch.UntypedStorage | None:
        """Return the original storage if it is still alive."""
        return torch.UntypedStorage._new_with_weak_ptr(self.original.cdata)


class Store(Protocol):
    def dropped(self, copy: Copy, read_in: int) -> None: ...


class Moved:
    """Autograd keeps this in place of a tensor that went down: its place in a copy.

    `read_in`: the value of `copy.comings` when the tensor was last read.
    """

    __slots__ = (
        "copy",
        "dtype",
        "offset",
        "read_in",
        "size",
        "store",
        "stride",
        "version",
        "watch",
    )

    def __init__(self, store: Store, copy: Copy, t: torch.Tensor, watch: torch.Tensor) -> None:
        self.store, self.copy, self.watch, self.version = store, copy, watch, t._version
        self.dtype, self.size, self.stride = t.dtype, t.size(), t.stride()
        self.offset = int(t.storage_offset()) - copy.start // t.itemsize
        self.read_in = -1
        copy.handles += 1
        copy.unread += 1

    def __del__(self) -> None:
        self.store.dropped(self.copy, self.read_in)

    def check(self) -> None:
        refuse_other_version(self.watch, self.version, self.size)

    def view_of(self, source: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of `source`, the bytes of its copy: uint8, [nbytes]."""
        first = int(source.storage_offset()) // self.dtype.itemsize
        return as_view(
            source.untyped_storage(),
            source.device,
            self.dtype,
            first + self.offset,
            self.size,
            self.stride,
        )


def extent_of(t: torch.Tensor) -> tuple[int, int]:
    """Return the byte interval of a non-empty tensor in its storage."""
    start = int(t.storage_offset())
    span = sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True)) + 1
    return start * t.itemsize, (start + span) * t.itemsize


def as_view(
    storage: torch.UntypedStorage,
    device: torch.device,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor over `storage`, which is on `device`; `offset` in elements."""
    # The storage of a fake tensor does not say its device
    empty: Any = torch.empty(0, dtype=dtype, device=device)
    view: torch.Tensor = empty.set_(storage, offset, size, stride)
    return view


def refuse_other_version(watch: torch.Tensor, version: int, size: torch.Size) -> None:
    """Raise RuntimeError if the version counter of `watch` has left `version`."""
    if watch._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(size)}, {watch.dtype}, that a gradient is computed from has"
            " been modified by an inplace operation since it was saved: it is at version"
            f" {watch._version}, the gradient needs version {version}. Write `x = x + 1` instead of"
            " `x += 1`, or change a clone(); torch.autograd.set_detect_anomaly(True) shows which"
            " operation saved it."
        )
