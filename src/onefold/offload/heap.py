"""Make the C library return large freed blocks to the system.

glibc maps each large block by itself and returns it to the system when it is freed. But each free
of such a block raises the threshold of "large" to its size, up to 32 MiB. Later blocks below the
threshold come from the heap, which shrinks only from its end. A model that allocates and frees
tensors of such sizes leaves the heap full of holes, several times the memory in use. A threshold
that is set explicitly stays.
"""

from __future__ import annotations

import ctypes
import os
import sys

#: `M_MMAP_THRESHOLD` of <malloc.h>.
_MMAP_THRESHOLD = -3
#: Bytes from which on a block is mapped by itself. The initial threshold of glibc.
LARGE_BLOCK = 128 << 10

_set: list[bool] = []


def give_large_blocks_back(nbytes: int = LARGE_BLOCK) -> bool:
    """Have blocks of `nbytes` and more go back to the system when they are freed.

    The setting is for the whole process and is made once.

    Returns: whether it took effect. It does not with another C library, or if the environment
    already sets the threshold.
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
