"""Host memory that the disk reads and writes directly.

[Note: buffers and fork] A disk that works on memory directly (O_DIRECT) works on the pages that were there when it began. Were the mapping
private, a fork in the meantime (a data loader that starts its workers) would have parent and child part ways on the next write: on older
kernels what was read can end up in the child's copy, and on every kernel the parent's buffers are held twice as long as the child lives.
Buffers are therefore shared mappings, which a fork leaves alone. Children never touch them, so they cost them nothing.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

#: What offsets, addresses and lengths of direct transfers are multiples of, in bytes.
PAGE = 4096
_HUGE_PAGE = 2 << 20


def rounded(nbytes: int) -> int:
    """`nbytes` up to the next multiple of PAGE."""
    return -(-nbytes // PAGE) * PAGE


def page_buffer(nbytes: int) -> torch.Tensor:
    """Bytes (uint8, one dimension, `nbytes` rounded up to PAGE) that begin on a page. Zeros at first; freed with the last tensor on them.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError: the host has no such room.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes:,} bytes was asked for; give 0 or more.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        mapping = mmap.mmap(-1, rounded(nbytes))  # shared: [Note: buffers and fork]
    except OSError as error:
        raise MemoryError(f"the host has no room for a buffer of {nbytes:,} bytes: {error.strerror}.") from None
    if nbytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # owns the mapping


def bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> memoryview:
    """Bytes [offset, offset + nbytes) of host memory, for system calls. The memory lives as long as the view."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,), (1,))
    return memoryview(whole.numpy())  # type: ignore[arg-type]  # Python 3.11's typing does not know arrays for buffers
