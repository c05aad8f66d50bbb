"""Pinned host memory, from and to which a device copies without the host.

torch's cache of pinned memory rounds every buffer up to a power of two and never frees it. Here
memory is mapped in whole pages and pinned in place, so the process takes no more memory than it
counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onefold.device.streams import guard, has_streams

HUGE_PAGE = 2 << 20
#: Bytes below which torch's own pinned memory is good enough.
SMALL = 1 << 20


class _Pages(mmap.mmap):
    """Anonymous memory in whole pages, which may be pinned.

    [Note: unpinned, then unmapped] An mmap frees its pages before the callbacks of weak references
    to it run. The driver would then unpin a range that is gone, or that another mapping has taken.
    `__del__` of a subclass runs before.

    [Note: pinned pages stay out of forks] A fork would copy all pinned pages into the child. On
    older kernels the parent's next write would move a page away from the device, whose copies then
    read old values. So the child does not get these pages. Its objects live as long as it does: to
    free one would unmap whatever the child has put into that range.

    [Note: pinned for the rank's device] The runtime pins in a context of the calling thread's
    current device, and makes one where there is none. Where nobody has set a device, or in a new
    thread, that is the first device: each rank would take some 500 MB of it.
    """

    _unpin: Callable[[], object] | None = None

    def pin(self, address: int, device: torch.device) -> None:
        """Pin the pages, which begin at `address`.

        Raises:
            RuntimeError: torch or the driver cannot pin them.
        """
        runtime = _runtime(device)
        if runtime is None:
            raise RuntimeError(f"torch cannot pin memory in place for {device.type!r} devices.")
        _pinned.add(self)
        if hasattr(mmap, "MADV_DONTFORK"):
            with contextlib.suppress(OSError):
                self.madvise(mmap.MADV_DONTFORK)
        with guard(device):
            code = int(runtime.cudaHostRegister(address, len(self), 0))
        if code:
            raise RuntimeError(
                f"the driver pinned no {len(self):,} bytes of host memory: cudaHostRegister ended"
                f" with error {code}"
            )
        self._unpin = partial(_unregister, runtime, address, device)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's exit the driver may be gone, and its mappings with it
        if self._unpin is not None and not exiting():
            self._unpin()


def _unregister(runtime: Any, address: int, device: torch.device) -> None:
    with guard(device):
        runtime.cudaHostUnregister(address)


_pinned: weakref.WeakSet[_Pages] = weakref.WeakSet()
_of_parent: list[_Pages] = []


def _keep_in_child() -> None:
    """See [Note: pinned pages stay out of forks]."""
    _of_parent.extend(_pinned)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)


def host_pages(
    nbytes: int, huge: bool, device: torch.device | None = None, paged: bool = False
) -> torch.Tensor:
    """Return host memory in whole pages of its own, as uint8, [nbytes]. The mapping is freed with
    the last tensor over it.

    Args:
        huge: ask the system for huge pages.
        device: pin the pages for this device. A process that is forked later does not have them.
        paged: the storage extends to the end of the last page, as a direct transfer moves whole
            pages.

    Raises:
        RuntimeError: the pages could not be pinned.
        OSError: the system has no memory.
    """
    huge = huge and hasattr(mmap, "MADV_HUGEPAGE")
    # The kernel aligns a mapping for huge pages only if its length is a multiple of them
    page = HUGE_PAGE if huge else mmap.PAGESIZE
    whole = -(-nbytes // page) * page
    mapping = _Pages(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    if device is not None:
        mapping.pin(torch.frombuffer(mapping, dtype=torch.uint8).data_ptr(), device)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=whole if paged else nbytes)[:nbytes]


def _runtime(device: torch.device) -> Any:
    """Return the library that pins memory in place: the CUDA runtime, or ROCm's."""
    if device.type == "cuda":
        return torch.cuda.cudart()
    module = torch.get_device_module(device) if has_streams(device) else None
    return module.cudart() if module is not None and hasattr(module, "cudart") else None


def host_empty(
    numel: int, dtype: torch.dtype, device: torch.device, paged: bool = False
) -> torch.Tensor:
    """Return a new one-dimensional host buffer with undefined contents for copies to and from
    `device`. It is pinned if the device has streams.

    `paged`: the buffer begins on a page and shares its last page with nothing, as direct reads from
    a disk need.
    """
    nbytes = numel * dtype.itemsize
    if not has_streams(device):
        return torch.empty(numel, dtype=dtype, device="cpu")
    if nbytes >= SMALL and _runtime(device) is not None:
        return host_pages(nbytes, nbytes >= HUGE_PAGE, device, paged).view(dtype)
    if not paged or not nbytes:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    # torch's allocator usually returns whole pages, but does not promise it: align within a larger
    # buffer.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
    skipped = -buffer.data_ptr() % mmap.PAGESIZE
    return buffer[skipped : skipped + nbytes].view(dtype)


def owners_of(t: torch.Tensor) -> int:
    """Return the number of tensors that share t's storage, t included. If torch has no counter of
    them, return 2: the memory is then never reused.
    """
    storage = t.untyped_storage()  # this handle is an owner too
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) - 1 if count is not None else 2
