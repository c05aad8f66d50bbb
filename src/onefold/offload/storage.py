"""Offloaded shards: the masters, and the interval in the compute dtype that gathers read.

    parameters   optimizer   `rest`: the interval that gathers read                masters
    device       host        a device tensor (a slice of the whole if resident)    a host tensor, [owned]
    device       NVMe        the same                                              a region
    host         host        the masters, or a host copy in the compute dtype      a host tensor
    host         NVMe        a host copy                                           a region
    NVMe         NVMe        the masters' region, or one in the compute dtype      a region

`HostStorage` is here, `NvmeStorage` in nvme_storage.py.

[Note: the device adds] The sum of a later micro-batch is added to the gradient on the host by the
device: chunks of the host's sum go up into a small buffer, are added, and come down to the same
place (device/copies.py). The host would have to wait for each copy, and would add more slowly.
The bits are those of an addition on the host.

[Note: norms on the device] A device with streams measures gradients before they leave it, if the
last clipping asked for 2-norms. Otherwise, or if `.grad` may have been written to since, clipping
brings the gradients up again to measure them. So norms have the same bits as without offloading,
at any number of the host's threads. On a CPU nothing leaves: clipping measures gradients itself.

One step of an offloaded unit, by the calls that move its bytes:

    Reducer._hand_over  ► accept ─────────────────── on transfers.down ──► .grad on the host
                          gradients_are_down: the host waits at the end of the backward pass
    optimizer.step()    ► offload/step.py step_apart ► step_flat ► new masters on the host
                          ► renew ► copy_up ───────── on transfers.up ────► the interval that is sent
                          (NVMe: each chunk ► stepped ► copy_up)
    the next gather     ► put: `renew` again if code has written to the masters since; the copy
                          into the gather's buffer
                          Gatherer.wait ► CopyStream.order: the computing stream waits for both

[Note: who moves what]
- Down: the reducer copies a unit's summed gradient down as soon as it has it. The device adds those
  of later micro-batches: see [Note: the device adds].
- Step: offload/step.py steps masters on the host in place and masters on NVMe chunk by chunk. It
  then passes the new masters to `stepped`.
- Up: `put` fills this rank's part of a gather buffer. If the data is on a disk, `fetch` starts the
  read ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from onefold.device import host_empty
from onefold.memory import LEAVING, nbytes_of, storage_of
from onefold.recipe import Tier
from onefold.recipe.moments import grain_of
from onefold.runtime.storage import Storage

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat


def state_kind(key: str, dtype: torch.dtype) -> str:
    """Return the kind (name) of the region for an optimizer's element-wise state `key`."""
    return f"state {key} {str(dtype).removeprefix('torch.')}"


def grain_of_kind(kind: str) -> int:
    """Return the elements per item of a region: 1, but more for parts of packed moments."""
    what, _, rest = kind.partition(" ")
    return grain_of(rest.rpartition(" ")[0]) if what == "state" else 1


class OffloadStorage(Storage):
    """Base of the shards on the host and in files. Elements are counted from the first that this
    rank owns.

    Attributes:
        tiers: of parameters, gradients and states.
        rest: this rank's interval in the compute dtype, [owned], on the device or the host; None if
            it is on NVMe.
    """

    offloaded = True
    gradient_tier = Tier.HOST

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat)
        assert flat.spec.tiers is not None
        self.tiers = tiers = flat.spec.tiers
        self.transfers, self.device = engine.transfers, engine.device
        self.gradients_on_disk = tiers.gradients.on_disk
        self.rest: torch.Tensor | None = None
        self.measures_gradients = self.gradients_on_disk or self.transfers.down.asynchronous
        # 2-norms by the index of the entry, and which values in host memory they are of
        self._measured: dict[int, tuple[torch.Tensor, tuple[int, int]]] = {}

    # -- building ----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> torch.Tensor:
        d, whole, tier = self.flat.dtypes, self.flat.full, self.tiers.parameters
        master = (
            torch.empty(self.numel, dtype=d.master, device="cpu")
            if self.on_disk
            else host_empty(self.numel, d.master, self.device)
        )
        if tier is Tier.DEVICE:
            self.rest = (
                whole[slice(*self.flat.owned)]
                if whole is not None
                else torch.empty(self.numel, dtype=d.compute, device=device)
            )
        elif tier is Tier.HOST:
            shared = d.compute == d.master and not self.on_disk
            self.rest = master if shared else host_empty(self.numel, d.compute, self.device)
        return master

    # -- masters -----------------------------------------------------------------------------------

    def stepped(self, start: int, stop: int, master: torch.Tensor) -> None:
        """Update what gathers read: masters [start, stop) have the new values `master`."""
        if self.rest is not None and storage_of(self.rest) != storage_of(master):
            self.copy_up(self.rest[start:stop], master)

    def copy_up(self, into: torch.Tensor, master: torch.Tensor) -> None:
        """Copy new masters into the interval that gathers read."""
        if self.tiers.parameters is Tier.DEVICE:
            self.transfers.entered("up", self.flat.unit_name, nbytes_of(into))
        # Cast on the host: half the bytes go up
        if self.transfers.up.asynchronous and not into.is_cpu and into.dtype != master.dtype:
            low = self.transfers.pinned.empty(master.numel(), into.dtype)
            low.copy_(master)
            master = low
        # Host to host. Earlier copies up may still read `into`.
        if into.is_cpu and self.transfers.up.asynchronous:
            self.transfers.up.wait()
            into.copy_(master)
        else:
            self.transfers.up.copy(into, master)

    # -- gathers -----------------------------------------------------------------------------------

    def put(self, full: torch.Tensor) -> None:
        if not self.numel:
            return
        mine = full[slice(*self.flat.owned)]
        if self.rest is None:
            self.put_read(mine)
            return
        # Otherwise `rest` is already this interval of the whole
        if storage_of(self.rest) != storage_of(mine):
            if self.tiers.parameters is Tier.HOST:
                self.transfers.entered("up", self.flat.unit_name, nbytes_of(mine))
            self.transfers.up.copy(mine, self.rest)

    def put_read(self, mine: torch.Tensor) -> None:
        """Read this rank's interval from a disk into `mine`."""
        raise AssertionError("the host holds what gathers read")

    # -- gradients ---------------------------------------------------------------------------------

    def accept(
        self,
        total: torch.Tensor,
        pairs: list[tuple[torch.Tensor | None, torch.Tensor]],
        complete: list[Entry],
    ) -> torch.Tensor | None:
        measured: dict[int, torch.Tensor] = {}  # by the index of the entry
        # 16-bit sums are measured as gradients in the masters' dtype
        wanted = self.measures_gradients and self.transfers.measures
        for entry in complete if wanted and total.dtype == self.flat.dtypes.master else ():
            if (part := total[entry.counted]).numel():
                measured[entry.index] = part
        if self._added(total, pairs, measured):
            return None
        low = self._brought_down(total, measured)
        if self.gradients_on_disk or any(e.param.grad is not None for e in self.flat.entries):
            self.transfers.down.wait()  # the host is about to read it
        return low

    def _added(
        self,
        total: torch.Tensor,
        pairs: list[tuple[torch.Tensor | None, torch.Tensor]],
        measured: dict[int, torch.Tensor],
    ) -> bool:
        """Let the device add `total` to the gradients on the host, without the host. Returns False
        if it cannot.
        """
        if self.gradients_on_disk or not self.transfers.down.asynchronous:
            return False
        dtype, holds = self.flat.dtypes.master, self.transfers.pinned.holds
        there = [
            (low, part)
            for low, part in pairs
            if low is not None
            and low.dtype == dtype
            and low.is_contiguous()
            and (holds(low) or not low.numel())
        ]
        if not there or len(there) < len(pairs):
            return False
        parts = joined(there, total)
        nbytes = total.numel() * dtype.itemsize
        self.transfers.entered("up", self.flat.unit_name, nbytes)
        self.transfers.entered("down", self.flat.unit_name, nbytes)
        norms = torch.empty(len(measured), dtype=total.dtype, device=total.device)

        def measure() -> None:
            norms.copy_(torch.stack(torch._foreach_norm([*measured.values()], 2.0)))

        then = measure if measured else None
        self.transfers.sums.add(parts, total, then, done=self._leaving(total))
        for low, _ in parts[:1]:
            self._note(measured, norms.unbind(), low)
        return True

    def _leaving(self, total: torch.Tensor) -> Callable[[], None]:
        """Count `total` as gradients on their way; returns what counts it no longer."""
        device, nbytes = self.transfers.device, nbytes_of(total)
        device.add(LEAVING, nbytes)
        return partial(device.add, LEAVING, -nbytes)

    def _brought_down(self, total: torch.Tensor, measured: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a summed gradient in host memory: `total` itself if the device is the CPU, else in
        the masters' dtype.
        """
        if total.is_cpu:
            self.transfers.entered("down", self.flat.unit_name, nbytes_of(total))
            return total
        norms = torch._foreach_norm([*measured.values()], 2.0) if measured else ()
        low = self.transfers.pinned.empty(total.numel(), self.flat.dtypes.master)
        self.transfers.entered("down", self.flat.unit_name, nbytes_of(low))
        copy = self.transfers.down.copy if low.dtype == total.dtype else self.transfers.sums.cast
        copy(low, total, done=self._leaving(total))
        self._note(measured, norms, low)
        return low

    def _note(
        self, measured: Iterable[int], norms: Iterable[torch.Tensor], low: torch.Tensor
    ) -> None:
        """Keep the `norms` of gradients that are in the memory of `low` now."""
        self._measured |= {
            i: (norm, _identity(low)) for i, norm in zip(measured, norms, strict=True)
        }

    def norm_before_it_left(self, entry: Entry, low: torch.Tensor) -> torch.Tensor | None:
        """Return the 2-norm of the gradient of `entry`, which is in the memory of `low`, if the
        device has measured these values.
        """
        norm, of = self._measured.get(entry.index, (None, None))
        return norm if of == _identity(low) else None

    def gradient_norm(self, entry: Entry, p: float) -> torch.Tensor:
        grad = entry.param.grad
        assert grad is not None
        if p == 2 and (norm := self.norm_before_it_left(entry, grad)) is not None:
            return norm
        first, (a, b) = entry.owned()[0], entry.accounted()
        return self.norm_on_device(grad.reshape(-1)[a - first : b - first], p)

    def norm_on_device(self, part: torch.Tensor, p: float) -> torch.Tensor:
        """Return the p-norm of `part`, in host memory, as the device computes it."""
        if not self.transfers.pinned.holds(part):
            return torch._foreach_norm([part.to(self.device)], p)[0]
        up = torch.empty(part.numel(), dtype=part.dtype, device=self.device)
        self.transfers.up.order(self.transfers.up.copy(up, part))
        return torch._foreach_norm([up], p)[0]

    def gradient_seen(self, entry: Entry) -> None:
        self._measured.pop(entry.index, None)


def _identity(values: torch.Tensor) -> tuple[int, int]:
    """Return numbers that change when a tensor is written to, or lies in other memory."""
    return storage_of(values), values._version


def joined(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], total: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `pairs` as few long ones: neighbours are joined, with the padding between them, if
    they are as far apart in both memories.

    Args:
        pairs: (contiguous tensor, its elements of `total`), in the order of their addresses.
    """
    out: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = stop = shift = 0  # the last one: elements [start, stop) of `total`
    first: torch.Tensor | None = None
    for low, part in pairs:
        if not part.numel():
            continue
        a = int(part.storage_offset() - total.storage_offset())
        here = int(low.storage_offset()) - a
        if first is not None and storage_of(low) == storage_of(first) and here == shift:
            out.pop()
        else:
            first, start, shift = low, a, here
        stop = a + part.numel()
        out.append((first.as_strided((stop - start,), (1,), start + shift), total[start:stop]))
    return out


class HostStorage(OffloadStorage):
    """Masters in (pinned) host memory. The user's optimizer steps them there."""

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat, engine)
        self._versions = -1  # sum of the masters' version counters when `rest` was last updated

    def store(self, values: torch.Tensor) -> None:
        # No copy up reads the masters now: callers have waited (`Engine.about_to_write`)
        if storage_of(values) != storage_of(self.flat.master):
            self.flat.master.copy_(values)
        self.renew()

    def renew(self) -> None:
        self._versions = self.flat.written
        if self.numel:
            self.stepped(0, self.numel, self.flat.master)

    def put(self, full: torch.Tensor) -> None:
        if self._versions != self.flat.written:
            self.renew()
        super().put(full)
