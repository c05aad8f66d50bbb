"""What the C library does with large blocks that are freed.

glibc maps large blocks one by one and gives them back at once, but raises what counts as large to
the size of what was freed, up to
32 MiB: from then on such blocks come from its heap, which shrinks only from its end. A model whose
tensors come and go in sizes below that
leaves it full of holes: several times the memory that is in use. A threshold that is set by hand
stays.
"""

from __future__ import annotations

import ctypes
import os
import sys

#: `M_MMAP_THRESHOLD` of <malloc.h>.
_MMAP_THRESHOLD = -3
#: Bytes from which on a block is mapped by itself: where glibc begins.
LARGE_BLOCK = 128 << 10

_set: list[bool] = []


def give_large_blocks_back(nbytes: int = LARGE_BLOCK) -> bool:
    """From now on blocks of `nbytes` and more go back to the system when they are freed. For the
    whole process, once.

    Returns: whether that is so now. It is not where the C library is another, and where the
    environment has settled it already.
    """
    if not _set:
        _set.append(_wanted() and _mallopt(_MMAP_THRESHOLD, nbytes))
    return _set[0]


def _wanted() -> bool:
    settled = "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    return sys.platform == "linux" and not settled


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):  # another C library
        return False
