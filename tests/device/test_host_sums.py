"""Sums in host memory that grow by sums on the device: the bits of an addition on the host, and the
host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import virtual
from onefold.device import CopyStream, HostBuffers, HostSums, chunk_for


def sums_of(chunk: int, taken: Any = None) -> tuple[CopyStream, HostSums, HostBuffers]:
    device = torch.device("virtual:0")
    down = CopyStream(device, window=4096)
    return down, HostSums(down, taken=taken, chunk=chunk), HostBuffers(device)


def drawn(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**seed


@virtual.alone
@pytest.mark.parametrize("chunk", [512, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_adds_to_host_sums_what_the_host_would(dtype: torch.dtype, chunk: int) -> None:
    for seed in range(8):
        virtual.reset(seed)
        down, sums, pinned = sums_of(chunk)
        low, expected = pinned.empty(3000, torch.float32), torch.zeros(3000)
        low.zero_()
        steps = []
        with virtual.no_synchronization():
            for i in range(4):  # each finds what the one before has sent to the same memory
                steps.append(pinned.empty(3000, dtype).copy_(drawn(3000, i)))
                expected += steps[-1]
                whole = torch.empty(3000, dtype=dtype, device="virtual")
                whole.copy_(steps[-1], non_blocking=True)
                parts = [(low[:1000], whole[:1000]), (low[1024:], whole[1024:])]
                sums.add(parts, whole)
                del whole, parts
        down.wait()
        sums.release()
        virtual.host_access(low, write=False)
        expected[1000:1024] = 0
        assert torch.equal(low, expected), (seed, (low - expected).abs().max())


@virtual.alone
def test_a_whole_that_was_added_to_holds_the_new_sum() -> None:
    for seed in range(5):
        virtual.reset(seed)
        down, sums, pinned = sums_of(512)
        low = pinned.empty(1000, torch.float32)
        low.copy_(drawn(1000, 0))
        whole = torch.full((1000,), 0.3, device="virtual")
        out = torch.empty((), device="virtual")
        expected = (drawn(1000, 0) + 0.3).square().sum()
        sums.add([(low, whole)], whole, then=lambda out=out, t=whole: out.copy_(t.square().sum()))
        down.wait()
        assert float(out) == float(expected)


class HeldUp(HostSums):
    """Sums whose first chunk is added to when a test says so. `came`: the buffers of chunks."""

    def __init__(self, down: CopyStream, chunk: int) -> None:
        super().__init__(down, chunk=chunk)
        self.came: list[Tensor] = []
        self.go_on = False

    def _bring(self, buffer: Tensor, low: Tensor, free: Any) -> None:
        super()._bring(buffer, low, free)
        if not self.came:
            virtual.enqueue(self._down.stream, lambda: None, ready=lambda: self.go_on)
        self.came.append(buffer)


@virtual.alone
def test_a_chunk_comes_up_while_the_one_before_is_added_to() -> None:
    for seed in range(5):
        virtual.start(seed, timeout=10)
        down, _, pinned = sums_of(512)
        sums = HeldUp(down, 512)
        low = pinned.empty(256, torch.float32)
        low.copy_(torch.arange(256.0))
        whole = torch.ones(256, device="virtual")
        sums.add([(low, whole)], whole)
        sums._up.synchronize()
        assert virtual.cpu_alias(sums.came[1].view(torch.float32)).equal(torch.arange(128.0, 256.0))
        sums.go_on = True
        down.wait()
        virtual.host_access(low, write=False)
        assert low.equal(torch.arange(256.0) + 1)


@virtual.alone
def test_sums_of_16_bits_are_cast_on_the_device() -> None:
    for seed in range(5):
        virtual.reset(seed)
        down, sums, pinned = sums_of(2048)
        lows = []
        with virtual.no_synchronization():
            for i in range(3):
                source = torch.full((5000,), i + 0.1, dtype=torch.bfloat16, device="virtual")
                lows.append(pinned.empty(5000, torch.float32))
                sums.cast(lows[-1], source)
                del source
        down.wait()
        for i, low in enumerate(lows):
            virtual.host_access(low, write=False)
            assert low.eq(torch.tensor(i + 0.1, dtype=torch.bfloat16).float()).all(), (seed, i)


@virtual.alone
def test_two_chunks_are_held_while_sums_are_on_their_way() -> None:
    taken: list[int] = []
    down, sums, pinned = sums_of(2048, taken.append)
    low = pinned.empty(5000, torch.float32)
    low.zero_()
    for _ in range(3):
        whole = torch.ones(5000, device="virtual")
        sums.add([(low, whole)], whole)
    assert taken == [2 * 2048]
    down.wait()
    sums.release()
    sums.release()
    assert taken == [2 * 2048, -2 * 2048]


def test_a_chunk_is_no_larger_than_the_largest_sum() -> None:
    assert chunk_for(4 << 30) == 32 << 20
    assert chunk_for(1000) == 1024
    assert chunk_for(0) == 0
