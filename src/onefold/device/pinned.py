"""Host memory that a device copies from and to by itself.

torch's own cache of pinned memory rounds every buffer up to a power of two and keeps it for ever.
Here memory is mapped in whole pages and pinned where it lies, so that what is taken from the system
is what is counted.
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
    """Host memory in whole pages of its own, as uint8, [nbytes]; the mapping goes with the last
    tensor of it.

    Args:
        huge: ask the system for huge pages.
        device: pin the pages for this device.
        paged: the storage reaches to the end of the last page, which a direct transfer moves whole.

    Raises:
        RuntimeError: the pages could not be pinned.
        OSError: the system has no memory.
    """
    huge = huge and hasattr(mmap, "MADV_HUGEPAGE")
    # The kernel aligns mappings of whole huge pages only
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
    """Pin whole pages where they lie; they are set free when `owner`, which holds them, goes.

    Raises:
        RuntimeError: the driver would not.
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
    # Before the memory goes. Not at the interpreter's exit: the driver may be gone by then, and its
    # mappings with it.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False


def can_pin_in_place(device: torch.device) -> bool:
    """Whether memory that is there can be pinned for `device`."""
    return _runtime(device) is not None


def _runtime(device: torch.device) -> Any:
    """What pins memory in place: the CUDA runtime, or ROCm's under the same names."""
    if device.type == "cuda":
        return torch.cuda.cudart()
    module = torch.get_device_module(device) if has_streams(device) else None
    return module.cudart() if module is not None and hasattr(module, "cudart") else None


def host_empty(
    numel: int, dtype: torch.dtype, device: torch.device, paged: bool = False
) -> torch.Tensor:
    """A fresh one-dimensional host buffer with undefined contents for copies to and from `device`:
    pinned, if it has streams.

    `paged`: it begins on a page, and its last page is its own, as direct reads from a disk want
    them.
    """
    nbytes = numel * dtype.itemsize
    if not has_streams(device):
        return torch.empty(numel, dtype=dtype)
    if nbytes >= SMALL and can_pin_in_place(device):
        return host_pages(nbytes, nbytes >= HUGE_PAGE, device, paged).view(dtype)
    if not paged or not nbytes:
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    # torch's allocator hands out whole pages as a rule, but does not promise it.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=True)
    skipped = -buffer.data_ptr() % mmap.PAGESIZE
    return buffer[skipped : skipped + nbytes].view(dtype)


class HostBuffers:
    """Buffers for copies to and from one device, used again as soon as nobody holds them: pinning
    anew takes longer than copying.

    A copy under way holds both of its ends (see CopyStream), so what nobody holds is not being
    copied either.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes
        # Steps in the backward pass take some in a thread of their own
        self._lock = threading.Lock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional buffer with undefined contents; plain memory where the device has no
        streams.
        """
        if not has_streams(self.device) or not numel:
            return torch.empty(numel, dtype=dtype)
        nbytes = numel * dtype.itemsize
        with self._lock:
            for known in self._known[nbytes]:
                if _owners(known) == 1:
                    return known[:].view(dtype)
            fresh = host_empty(nbytes, torch.uint8, self.device)
            self._known[nbytes].append(fresh)
            return fresh[:].view(dtype)

    def close(self) -> None:
        """Keep nothing for the next time."""
        self._known.clear()


def _owners(t: torch.Tensor) -> int:
    """Tensors that share t's memory, t included; 2 where torch does not say."""
    storage = t.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)
    return int(count(storage._cdata)) - 1 if count is not None else 2
