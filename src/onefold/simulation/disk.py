"""NVMe without a disk: regions of the real store whose bytes are nowhere.

Their rules are those of a region (offload/nvme.py). Reads and writes take time on a clock; a
simulation without one has them done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.offload.nvme import PAGE, Region, Transfer
from onefold.simulation.timeline import READ, WRITTEN

if TYPE_CHECKING:
    from onefold.simulation.clock import Clock


class Disk:
    """The store of the simulated rank. Made in place of `Nvme`, inside `stores_from`."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock

    def region(self, name: str, numel: int, dtype: torch.dtype) -> Region:
        return _Region(self, name, numel, dtype)

    def close(self) -> None:
        pass

    # -- what a region asks for --------------------------------------------------------------------

    def allocate(self, name: str, nbytes: int) -> tuple[None, int]:
        return None, 0

    def start(self, op: str, region: str, file: None, nbytes: int, offset: int) -> Transfer:
        """Start to read or write `nbytes`."""
        if self._clock is None:
            return Transfer()
        # A region's name is its unit's, the number of the flat buffer, and the kind
        unit = region.rsplit(".", 2)[0] or "(root)"
        until, span = self._clock.transfer(READ if op == "read" else WRITTEN, unit, nbytes)
        return _Moving(self._clock, until, span)


class _Region(Region):
    """A region whose tensors have no memory, and so no addresses."""

    def fits(self, tensor: torch.Tensor) -> bool:
        return False

    def _memory(self, op: str, start: int, tensor: torch.Tensor) -> int:
        return -(-tensor.nbytes // PAGE) * PAGE


class _Moving(Transfer):
    """A read or write that ends at `until`, with span `span`."""

    def __init__(self, clock: Clock, until: float, span: int) -> None:
        super().__init__()
        self._clock, self._until, self._span = clock, until, span

    def done(self) -> bool:
        return self._until <= self._clock.host

    def wait(self) -> None:
        self._clock.host_waits(self._until, self._span)

    def settle(self) -> None:
        self.wait()
