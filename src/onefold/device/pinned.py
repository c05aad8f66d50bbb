"""Pinned host memory, from and to which a device copies without the host.

torch's cache of pinned memory rounds every buffer up to a power of two and never frees it. Here
memory is mapped in whole pages and pinned in place, so the process takes no more memory than it
counts.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch

from onefold.device.streams import has_streams

HUGE_PAGE = 2 << 20
#: Bytes below which torch's own pinned memory is good enough.
SMALL = 1 << 20


def host_pages(
    nbytes: int, huge: bool, device: torch.device | None = None, paged: bool = False
) -> torch.Tensor:
    """Return host memory in whole pages of its own, as uint8, [nbytes]. The mapping is freed with
    the last tensor over it.

    Args:
        huge: ask the system for huge pages.
        device: pin the pages for this device.
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
    mapping = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    if device is not None:
        pin(torch.frombuffer(mapping, dtype=torch.uint8), device, mapping)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=whole if paged else nbytes)[:nbytes]


def pin(pages: torch.Tensor, device: torch.device, owner: object) -> None:
    """Pin whole pages in place. They are unpinned when `owner`, which holds them, is freed.

    Raises:
        RuntimeError: torch or the driver cannot pin them.
    """
    runtime = _runtime(device)
    if runtime is None:
        raise RuntimeError(f"torch cannot pin memory in place for {device.type!r} devices.")
    address, nbytes = pages.data_ptr(), pages.numel()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code:
        raise RuntimeError(
            f"the driver pinned no {nbytes:,} bytes of host memory: cudaHostRegister ended with"
            f" error {code}"
        )
    # Unpin before the memory is freed, but not at the interpreter's exit: the driver may be gone by
    # then, and its mappings with it.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False


def can_pin_in_place(device: torch.device) -> bool:
    """Whether existing memory can be pinned for `device`."""
    return _runtime(device) is not None


def _runtime(device: torch.device) -> Any:
    """Return the library that pins memory in place: the CUDA runtime, or ROCm's with the same
    names.
    """
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
    if nbytes >= SMALL and can_pin_in_place(device):
        return host_pages(nbytes, nbytes >= HUGE_PAGE, device, paged).view(dtype)
    if not paged or not nbytes:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    # torch's allocator usually returns whole pages, but does not promise it: align within a larger
    # buffer.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
    skipped = -buffer.data_ptr() % mmap.PAGESIZE
    return buffer[skipped : skipped + nbytes].view(dtype)


class HostBuffers:
    """Buffers for copies to and from one device. They are reused, because pinning takes longer than
    copying.

    A buffer is free when no tensor refers to it. A copy in flight holds both of its tensors (see
    CopyStream), so a free buffer is not being copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes
        # Optimizer steps in the backward pass take buffers in a thread of their own
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a one-dimensional buffer with undefined contents; plain memory if the device has
        no streams.
        """
        if not has_streams(self.device) or not numel:
            return torch.empty(numel, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        with self._lock:
            for known in self._known[nbytes]:
                if owners_of(known) == 1:
                    return known[:].view(dtype)
            fresh = host_empty(nbytes, torch.uint8, self.device)
            self._known[nbytes].append(fresh)
            return fresh[:].view(dtype)

    def close(self) -> None:
        """Forget all buffers: free ones are freed now, the others with their last tensor."""
        self._known.clear()


def owners_of(t: torch.Tensor) -> int:
    """Return the number of tensors that share t's storage, t included. If torch has no counter of
    them, return 2: the memory is then never reused.
    """
    storage = t.untyped_storage()  # this handle is an owner too
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) - 1 if count is not None else 2
