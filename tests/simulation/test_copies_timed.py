"""Gradients on their way to the host, on the simulated clock: what they add to the backward passes.
The schedule is that of the real copy streams; the seconds are bytes ÷ rates.

`python tests/simulation/test_copies_timed.py` prints the table of docs/measured.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.device import CopyStream, HostSums, clocked, copies
from onefold.simulation.clock import Clock

#: Bytes a second: between host and device in one direction, and of the device's memory.
LINK, MEMORY = 50e9, 3e12
#: Elements a second that one thread of the host adds.
HOST_ADDS = 0.9e9
#: FLOPs a second of matrix products.
PRODUCTS = 4.5e14
TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """A model whose blocks have `numel` parameters each, with its gradients on the host."""

    name: str
    blocks: int
    numel: int
    ranks: int
    micro_batches: int = 1

    @property
    def block(self) -> float:
        """Seconds of a block's backward pass."""
        return 4 * self.numel * TOKENS / PRODUCTS

    @property
    def own(self) -> int:
        return self.numel // self.ranks


class _Priced(TorchDispatchMode):
    """Times copies between host and device, and additions on the device."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("copy_", "add_"):
            return func(*args, **(kwargs or {}))
        into, source = args[:2]
        nbytes = into.numel() * into.element_size()
        apart = into.device != source.device
        self.clock._run("engine", name, nbytes / LINK if apart else 3 * nbytes / MEMORY)
        return into  # nothing is computed


def exposed(case: Case, on_host: bool = False) -> float:
    """Seconds that a step's backward passes take longer because gradients go to the host.

    `on_host`: the host waits for the gradients of later micro-batches, and adds them.
    """
    prices: Any = SimpleNamespace(software=SimpleNamespace(launch_seconds=0.0))
    clock = Clock(prices)
    device = torch.device("meta")  # stands for a device with streams
    with clocked(clock), _Priced(clock):
        down = CopyStream(device, name="copies down")
        sums = HostSums(down)
        for micro in range(case.micro_batches):
            for _ in range(case.blocks):
                clock._run("model", "block", case.block)
                total = torch.empty(case.own, device=device)
                low = torch.empty(case.own)
                if micro and not on_host:
                    sums.add([(low, total)], total)
                    continue
                down.copy(low, total)
                if micro:
                    down.wait()
                    clock.host += case.own / HOST_ADDS
            down.wait()
    return max(clock.host, clock._computing.free) - case.micro_batches * case.blocks * case.block


def waited_for() -> Any:
    """The rule that waits for the newest copy too, if it is larger than the window."""
    return patch.object(copies, "within", lambda window, held, sizes: held <= window)


LARGE = [
    Case("Llama 3 8B on 4 ranks", 32, 218_112_000, 4),
    Case("Llama 3 8B on one", 32, 218_112_000, 1),
    Case("Llama 3 70B on 8 ranks", 80, 855_654_400, 8),
]
OFTEN = [
    Case("Llama 3 8B on 8 ranks, 4 micro-batches", 32, 218_112_000, 8, 4),
    Case("Llama 3 70B on 8 ranks, 4 micro-batches", 80, 855_654_400, 8, 4),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_a_copy_that_is_larger_than_the_window_hides_behind_the_next_block(case: Case) -> None:
    copy = 4 * case.own / LINK
    with waited_for():
        before = exposed(case)
    assert before == pytest.approx(case.blocks * copy)
    # What is left is the last block's, behind which nothing runs
    assert exposed(case) == pytest.approx(copy + max(0.0, copy - case.block) * (case.blocks - 1))


@pytest.mark.parametrize("case", OFTEN, ids=lambda case: case.name)
def test_later_micro_batches_hide_behind_the_backward_pass(case: Case) -> None:
    copy, adds = 4 * case.own / LINK, case.own / HOST_ADDS
    before = exposed(case, on_host=True)
    assert before > (case.micro_batches - 1) * case.blocks * (copy + adds)
    # The last block of each pass: up and down, overlapping chunk by chunk
    assert exposed(case) < case.micro_batches * 2.1 * copy < before / 10


if __name__ == "__main__":
    for case in LARGE:
        with waited_for():
            before = exposed(case)
        print(f"| {case.name} | {1e3 * before:.0f} ms | {1e3 * exposed(case):.1f} ms |")
    for case in OFTEN:
        before = exposed(case, on_host=True)
        print(f"| {case.name} | {before:.2f} s | {1e3 * exposed(case):.0f} ms |")
