"""Host memory that the disk reads and writes directly.

[Note: buffers and fork] A forked child (a worker of a data loader) shares its parent's private
memory until one of the two writes. Without precautions this has three effects: each page of the
parent's buffers exists twice while the child lives, huge pages are split, and open(2) forbids a
fork while a direct transfer is under way. The system is therefore told to give children empty pages
in place of the buffers (MADV_WIPEONFORK, Linux 4.14). Where it cannot, the buffer is a shared
mapping, which a fork leaves alone too. A private mapping can have huge pages, with which a transfer
takes less than half the processor time.
"""

from __future__ import annotations

import mmap

import torch

#: Bytes. Offsets, addresses and lengths of direct transfers are multiples of it.
PAGE = 4096
_HUGE_PAGE = 2 << 20
_WIPE_ON_FORK = 18  # of <linux/mman.h>; Python has no name for it


def rounded(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of PAGE."""
    return -(-nbytes // PAGE) * PAGE


def page_buffer(nbytes: int) -> torch.Tensor:
    """Return a page-aligned uint8 tensor, [`nbytes` rounded up to PAGE].

    It holds zeros at first. The memory is freed with the last tensor on it.

    Raises:
        ValueError: `nbytes` is negative.
        MemoryError: the host has not enough memory.
    """
    if nbytes < 0:
        raise ValueError(f"a buffer of {nbytes:,} bytes was asked for; give 0 or more.")
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    size = rounded(nbytes)
    huge = size // _HUGE_PAGE * _HUGE_PAGE
    try:
        # The kernel aligns only mappings of whole huge pages. Bytes behind `size` are never
        # touched, so they take no memory.
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
    """Give advice about the first `nbytes` bytes; return whether the system accepts it."""
    try:
        mapping.madvise(advice, 0, nbytes)
    except OSError:
        return False
    return True


def bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> memoryview:
    """Return bytes [offset, offset + nbytes) of a host storage, for system calls. The view keeps
    the memory alive.
    """
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, offset, (nbytes,), (1,))
    return memoryview(whole.numpy())  # type: ignore[arg-type]  # Python 3.11's typing does not know arrays for buffers
