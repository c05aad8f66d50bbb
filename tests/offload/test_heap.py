"""Large blocks go back to the system when they are freed, whatever was freed before."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOLES = """
import sys
import torch
from onefold.offload.heap import give_large_blocks_back

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

changed = "back" in sys.argv and give_large_blocks_back()
torch.empty(31 << 20, dtype=torch.uint8).fill_(1)  # freed at once: from now on glibc takes blocks of this size from its heap
before = resident()
blocks, small = [], []
for size in [16 << 20] * 16 + [1 << 20] * 128:
    blocks.append(torch.ones(size, dtype=torch.uint8))
    small.append(bytearray(50_000))  # lies behind the block, and stays
del blocks
print(changed, resident() - before)
"""


def holes(*arguments: str, **environment: str) -> tuple[bool, int]:
    """Whether the threshold was set, and bytes that stay resident of 384 MiB that were freed."""
    out = subprocess.run(
        [sys.executable, "-c", HOLES, *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    changed, nbytes = out.split()
    return changed == "True", int(nbytes)


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_large_blocks_go_back_to_the_system(every: bool) -> None:
    import onefold

    environment = {"PYTHONPATH": str(next(iter(onefold.__path__)) + "/.."), "PATH": ""}
    changed, left = holes("back", **environment)
    if not changed:
        pytest.skip("another C library than glibc")
    assert left < 32 << 20 < holes(**environment)[1]
    # Whoever has set it knows why
    assert not every or holes("back", MALLOC_MMAP_THRESHOLD_="65536", **environment)[0] is False
