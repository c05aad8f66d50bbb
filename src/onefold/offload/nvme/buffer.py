"""Host memory that the disk reads and writes directly.

[Note: buffers and fork] A child that is forked (a data loader that starts its workers) shares its
parent's private memory until one of the two writes: each page of the parent's buffers would then
exist twice as long as the child lives, huge pages would fall apart, and open(2) asks that no direct
transfer is under way meanwhile. The system is therefore told to give children empty pages in place of buffers (MADV_WIPEONFORK, Linux
4.14), so that the parent keeps its own; where it cannot, the mapping is a shared one, which a fork
leaves alone too. The former can have huge pages, which take less than half the processor time in a
transfer.
"""

from __future__ import annotations

import mmap

import torch

#: What offsets, addresses and lengths of direct transfers are multiples of, in bytes.
PAGE = 4096
_HUGE_PAGE = 2 << 20
_WIPE_ON_FORK = 18  # of <linux/mman.h>; Python has no name for it


def rounded(nbytes: int) -> int:
    """`nbytes` up to the next multiple of PAGE."""
    return -(-nbytes // PAGE) * PAGE


def page_buffer(nbytes: int) -> torch.Tensor:
    """Bytes (uint8, one dimension, `nbytes` rounded up to PAGE) that begin on a page. Zeros at
    first; freed with the last tensor on them.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError: the host has no such room.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes:,} bytes was asked for; give 0 or more.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    size = rounded(nbytes)
    huge = size // _HUGE_PAGE * _HUGE_PAGE
    try:
        # The kernel aligns mappings of whole huge pages only. What is behind `size` is never
        # touched.
        mapping = mmap.mmap(
            -1,
            -(-size // _HUGE_PAGE) * _HUGE_PAGE if huge else size,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        if not _advise(mapping, _WIPE_ON_FORK, size):
            mapping = mmap.mmap(-1, size)  # shared: [Note: buffers and fork]
    except OSError as error:
        raise MemoryError(
            f"the host has no room for a buffer of {nbytes:,} bytes: {error.strerror}."
        ) from None
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(mapping, mmap.MADV_HUGEPAGE, huge)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size)  # owns the mapping


def _advise(mapping: mmap.mmap, advice: int, nbytes: int) -> bool:
    """Whether the system takes the advice about the first `nbytes`."""
    try:
        mapping.madvise(advice, 0, nbytes)
    except OSError:
        return False
    return True


def bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> memoryview:
    """Bytes [offset, offset + nbytes) of host memory, for system calls. The memory lives as long as
    the view.
    """
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,), (1,))
    return memoryview(whole.numpy())  # type: ignore[arg-type]  # Python 3.11's typing does not know arrays for buffers
