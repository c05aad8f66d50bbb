"""Offloaded shards: the masters, and the interval in the compute dtype that gathers read.

    parameters   optimizer   `rest`: the interval that gathers read                masters
    device       host        a device tensor (a slice of the whole if resident)    a host tensor, [owned]
    device       NVMe        the same                                              a region
    host         host        the masters, or a host copy in the compute dtype      a host tensor
    host         NVMe        a host copy                                           a region
    NVMe         NVMe        the masters' region, or one in the compute dtype      a region

Between steps, optimizers' parameters on NVMe are storageless: they have a shape and a dtype, but no
memory (runtime/parameters/values.py).

[Note: the device adds] The sum of a later micro-batch is added to the gradient on the host by the
device: chunks of the host's sum go up into a small buffer, are added, and come down to the same
place (device/copies.py). The host would have to wait for each copy, and would add more slowly.
The bits are those of an addition on the host.

[Note: norms on the device] A device with streams measures gradients before they leave it, if the
last clipping asked for 2-norms. Otherwise, or if `.grad` may have been written to since, clipping
brings the gradients up again to measure them. So norms have the same bits as without offloading,
at any number of the host's threads. On a CPU nothing leaves: clipping measures gradients itself.

One step of an offloaded unit, by the calls that move its bytes:

    Reducer._bring_down ► accept ─────────────────── on transfers.down ──► .grad on the host
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

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from onefold.device import host_empty
from onefold.layout import overlap
from onefold.memory import (
    GRADIENTS,
    LEAVING,
    MASTERS,
    MOMENTS,
    PARAMETERS,
    STAGING,
    TierError,
    empty,
    nbytes_of,
    storage_of,
)
from onefold.offload.nvme import Region, Transfer, give_large_blocks_back, refuse_unless_fits
from onefold.recipe import Tier
from onefold.recipe.moments import grain_of, items_of
from onefold.recipe.options import SECTOR
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.parameters.values import elsewhere, storageless
from onefold.runtime.storage import Storage, state_shape

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat

_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


def state_kind(key: str, dtype: torch.dtype) -> str:
    """Return the kind (name) of the region for an optimizer's element-wise state `key`."""
    return f"state {key} {str(dtype).removeprefix('torch.')}"


def grain_of_kind(kind: str) -> int:
    """Return the elements per item of a region: 1, but more for parts of packed moments."""
    return grain_of(kind.removeprefix("state ").rpartition(" ")[0])


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
            self.transfers.risen()
            low = self.transfers.pool.take(master.numel(), into.dtype, STAGING, self.flat.unit_name)
            low.copy_(master)
            self.transfers.rise(into, low)
        # Host to host. Earlier copies up may still read `into`.
        elif into.is_cpu and self.transfers.up.asynchronous:
            self.transfers.up.wait()
            into.copy_(master)
        else:
            self.transfers.up.copy(into, master)

    # -- gathers -----------------------------------------------------------------------------------

    def put(self, full: torch.Tensor) -> None:
        if not self.numel:
            return
        mine = full[slice(*self.flat.owned)]
        assert self.rest is not None
        # Otherwise `rest` is already this interval of the whole
        if storage_of(self.rest) != storage_of(mine):
            if self.tiers.parameters is Tier.HOST:
                self.transfers.entered("up", self.flat.unit_name, nbytes_of(mine))
            self.transfers.up.copy(mine, self.rest)

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
        low = total
        if total.is_cpu:
            self.transfers.entered("down", self.flat.unit_name, nbytes_of(total))
        else:
            norms = torch._foreach_norm([*measured.values()], 2.0) if measured else ()
            low = self.transfers.pool.fresh(total.numel(), self.flat.dtypes.master)
            self.transfers.entered("down", self.flat.unit_name, nbytes_of(low))
            copy = (
                self.transfers.down.copy if low.dtype == total.dtype else self.transfers.sums.cast
            )
            copy(low, total, done=self._leaving(total))
            self._note(measured, norms, low)
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
        dtype = self.flat.dtypes.master
        there = [
            (low, part)
            for low, part in pairs
            if low is not None
            and low.dtype == dtype
            and low.is_contiguous()
            and (low.is_pinned() or not low.numel())
        ]
        if not there or len(there) < len(pairs):
            return False
        parts = [(low.view(-1), part) for low, part in there if part.numel()]
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
        if not part.is_pinned():
            return torch._foreach_norm([part.to(self.device)], p)[0]
        up = torch.empty(part.numel(), dtype=part.dtype, device=self.device)
        self.transfers.up.order(self.transfers.up.copy(up, part))
        return torch._foreach_norm([up], p)[0]

    def gradient_seen(self, entry: Entry) -> None:
        self._measured.pop(entry.index, None)


def _identity(values: torch.Tensor) -> tuple[int, int]:
    """Return numbers that change when a tensor is written to, or lies in other memory."""
    return storage_of(values), values._version


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


class NvmeStorage(OffloadStorage):
    """Masters and states in regions of the rank's files. Elements are counted from the first that
    this rank owns.

    Attributes:
        regions: the regions on NVMe by kind: "master", "parameter", "gradient", and the names that
            `state_kind` gives.
        scale: the factor for gradients on NVMe, applied when they are read; None is 1.
        norms: 2-norms of the gradients on NVMe that this rank accounts for, by the index of the
            entry, computed while the gradients were in memory.
    """

    in_place = False
    on_disk = True

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat, engine)
        self.regions: dict[str, Region] = {}
        self.scale: torch.Tensor | None = None
        self.norms: dict[int, torch.Tensor] = {}
        # A read ahead: the pool's buffer that it goes to, or None if it goes to the whole itself
        self._fetching: tuple[torch.Tensor | None, Transfer] | None = None

    # -- building ----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> torch.Tensor:
        shown, d = super().build(device), self.flat.dtypes
        self.region("master", d.master)
        if self.flat.spec.lies_apart:
            self.region("parameter", d.compute)
        return shown

    def region(self, kind: str, dtype: torch.dtype) -> Region:
        """Return the region of `kind`, and create it on the first call.

        It has an item for each owned element, or one for each `grain_of_kind(kind)` of them.

        Raises:
            TierError: the disk has no room.
        """
        if kind not in self.regions:
            name = f"{self.flat.unit_name}.{self.flat.index}.{kind}"
            region = self.regions[kind] = self.transfers.store.region(
                name, -(-self.numel // grain_of_kind(kind)), dtype
            )
            self.transfers.disk.add(
                _CATEGORIES.get(kind, MOMENTS), region.nbytes, self.flat.unit_name
            )
        return self.regions[kind]

    # -- elements of masters and states ------------------------------------------------------------

    def read(self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int) -> torch.Tensor:
        if key and not value.is_meta:
            return super().read(entry, key, value, x, y)
        if x == y:  # a rank that steps nothing here has no region of this state
            return torch.empty(0, dtype=value.dtype, device="cpu")
        kind, first = self._place(entry, key, value)
        return self.part(kind, first + x, first + y)

    def write(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int, new: torch.Tensor
    ) -> None:
        if key and not value.is_meta:
            super().write(entry, key, value, x, y, new)
        else:
            kind, first = self._place(entry, key, value)
            self.write_part(kind, first + x, first + y, new)

    def _place(self, entry: Entry, key: str, value: torch.Tensor) -> tuple[str, int]:
        """Return the kind of region in which elements of `entry` are, and where its first one is."""
        kind = state_kind(key, value.dtype) if key else "master"
        return kind, entry.slot.start - self.flat.owned[0]

    def new_state(
        self, entry: Entry, key: str, dtype: torch.dtype, in_memory: bool
    ) -> torch.Tensor:
        if in_memory:
            return super().new_state(entry, key, dtype, in_memory)
        self.region(state_kind(key, dtype), dtype)
        place = torch.empty(state_shape(entry, key), dtype=dtype, device="meta")
        made: torch.Tensor = elsewhere(place, "a state of the optimizer")
        return made

    # -- masters -----------------------------------------------------------------------------------

    def store(self, values: torch.Tensor) -> None:
        for a, b in self.chunks():
            window = Window(self, a, b)
            master = window.open("master", self.flat.dtypes.master, read=False)
            master.copy_(values[a:b])
            self.stepped(a, b, master)
            window.close("master")
        self.transfers.flush()

    def stepped(self, start: int, stop: int, master: torch.Tensor) -> None:
        super().stepped(start, stop, master)
        if "parameter" in self.regions:
            window = Window(self, start, stop)
            window.open("parameter", self.flat.dtypes.compute, read=False).copy_(master)
            window.close("parameter")

    def renew(self) -> None:
        if self.rest is not None or "parameter" in self.regions:  # else gathers read the masters
            for a, b in self.chunks():
                window = Window(self, a, b)
                master = window.open("master", self.flat.dtypes.master)
                window.settle()
                self.stepped(a, b, master)
                window.close()
        self.transfers.flush()

    def part(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """Read the items of a kind for elements [start, stop) into new host memory."""
        dtype = self.regions[kind].dtype
        if start == stop:
            return torch.empty(0, dtype=dtype, device="cpu")
        window = self._sectors(kind, start, stop)
        window.open(kind, dtype, pooled=False)
        window.settle()
        return window.part(kind, start, stop)

    def write_part(self, kind: str, start: int, stop: int, values: torch.Tensor) -> None:
        """Overwrite the items of a kind for elements [start, stop)."""
        if start < stop:
            window = self._sectors(kind, start, stop)
            more = window.a < start or stop < window.b
            window.open(kind, self.regions[kind].dtype, read=more)
            window.settle()
            window.part(kind, start, stop).copy_(values)
            window.close(kind)

    def _sectors(self, kind: str, start: int, stop: int) -> Window:
        """Return a window of the whole sectors in which the items for these elements lie."""
        sector = SECTOR * grain_of_kind(kind)
        last = min(self.numel, -(-stop // sector) * sector)
        return Window(self, start // sector * sector, last)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Return the intervals that are moved and stepped at a time."""
        return (
            (a, min(self.numel, a + self.transfers.chunk))
            for a in range(0, self.numel, self.transfers.chunk)
        )

    # -- gathers -----------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start to read this rank's interval into its part of `flat.full`.

        Does nothing if gathers do not read from a disk, or if the read is already under way.
        """
        full = self.flat.full
        if self.rest is not None or self._fetching is not None or not self.numel or full is None:
            return
        region = self.regions.get("parameter") or self.regions["master"]
        mine = full[slice(*self.flat.owned)]
        self.transfers.risen()
        direct = mine.is_cpu and region.fits(mine)
        whole, unit = None, self.flat.unit_name
        if not direct:
            whole = self.transfers.pool.take(self.numel, region.dtype, STAGING, unit)
        into = mine if whole is None else whole
        self._fetching = whole, self.transfers.read(region, 0, into, unit)

    def put(self, full: torch.Tensor) -> None:
        if self.rest is not None or not self.numel:
            super().put(full)
            return
        self.fetch()
        assert self._fetching is not None
        (whole, transfer), self._fetching = self._fetching, None
        self.transfers.wait(transfer)
        if whole is not None:
            self.transfers.rise(full[slice(*self.flat.owned)], whole)

    def forget(self) -> None:
        if self._fetching is not None:
            (whole, transfer), self._fetching = self._fetching, None
            with contextlib.suppress(TierError):  # the data is no longer needed
                self.transfers.wait(transfer)
            if whole is not None:
                self.transfers.pool.give(whole)

    # -- gradients ---------------------------------------------------------------------------------

    def take_gradient(self, total: torch.Tensor, wanted: list[Entry]) -> None:
        """Write the gradients of the entries `wanted` to NVMe, or add to those that are there.

        `total`: host sums, [owned]. `.grad` of the entries becomes storageless.
        """
        dtype = self.region("gradient", self.flat.dtypes.master).dtype
        if all(e.param.grad is None for e in self.flat.entries):
            self.scale = None
        elif self.scale is not None:
            raise RuntimeError(
                f"a backward pass adds to gradients of {self.flat.unit_name!r} that were clipped or"
                " unscaled already: do that once, after the last backward pass of a step."
            )
        for a, b in self.chunks():
            met = inside(wanted, a, b)
            if not met:
                continue
            window, here = Window(self, a, b), inside(self.flat.entries, a, b)
            there = any(e.param.grad is not None for e, _, _ in here)
            data = window.open("gradient", dtype, read=there)
            window.settle()
            if not there:
                data.zero_()
            for entry, x, y in met:
                into, new = window.part("gradient", x, y), total[x:y]
                into.copy_(new) if entry.param.grad is None else into.add_(new)
            window.close("gradient")
        for entry in wanted:
            self.norms.pop(entry.index, None)
            if entry.param.grad is None:
                part = total[entry.counted]
                # Clipping will ask for the norm. Now the gradient is still in memory.
                if (norm := self.norm_before_it_left(entry, total)) is not None:
                    self.norms[entry.index] = norm
                elif not self.transfers.down.asynchronous and part.dtype == dtype:
                    self.norms[entry.index] = torch._foreach_norm([part], 2.0)[0]
                entry.param.grad = storageless(entry.param, f"the gradient of {entry.slot.name!r}")

    def gradient_norm(self, entry: Entry, p: float) -> torch.Tensor:
        """See `Storage`. Reads the gradient again unless `norms` has the answer."""
        if not self.gradients_on_disk:
            return super().gradient_norm(entry, p)
        if p != 2 or self.scale is not None:
            return self.norm_on_device(self._scaled(entry.counted), p)
        if entry.index not in self.norms:
            self.norms[entry.index] = self.norm_on_device(self._scaled(entry.counted), p)
        return self.norms[entry.index]

    def read_gradient(self, entry: Entry) -> torch.Tensor:
        return self._scaled(entry.here)

    def _scaled(self, where: slice) -> torch.Tensor:
        part = self.part("gradient", where.start, where.stop)
        return part if self.scale is None else part.mul_(self.scale)

    def write_gradient(self, entry: Entry, values: torch.Tensor) -> None:
        values = values.to("cpu", self.regions["gradient"].dtype)
        values = values if self.scale is None else values / self.scale
        self.write_part("gradient", entry.here.start, entry.here.stop, values)
        self.norms.pop(entry.index, None)

    def gradients_finite(self) -> bool:
        """Return whether all gradients on NVMe are finite numbers."""
        used = (e for e in self.flat.entries if e.param.grad is not None)
        return all(bool(torch.isfinite(self.read_gradient(e)).all()) for e in used)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply all gradients on NVMe by `factor` when they are next read."""
        factor = factor.detach().to("cpu", torch.float32).reshape(())
        self.scale = factor.clone() if self.scale is None else self.scale * factor


@dataclass
class Window:
    """Elements [a, b) of a flat buffer on NVMe, in host memory. The items that stand for them fill whole
    sectors, or reach to the end of their regions.

    Attributes:
        pieces: (entry, start, stop): the elements in it to be stepped, counted from the first that this
            rank owns.
        rows: host buffers by kind of region; each holds the items for these elements.
    """

    storage: NvmeStorage
    a: int
    b: int
    pieces: list[tuple[Entry, int, int]] = field(default_factory=list)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    _whole: dict[str, torch.Tensor] = field(default_factory=dict)  # the pool's buffers below `rows`
    _reading: list[Transfer] = field(default_factory=list)

    def open(
        self, kind: str, dtype: torch.dtype, read: bool = True, pooled: bool = True
    ) -> torch.Tensor:
        """Take memory for the items of a kind, and start to read them. Those of a new region are
        zeros.

        Args:
            read: else the contents are undefined.
            pooled: the memory is a buffer of the pool, which `close` gives back.
        """
        transfers, unit = self.storage.transfers, self.storage.flat.unit_name
        region, grain = self.storage.region(kind, dtype), grain_of_kind(kind)
        first, last = items_of(self.a, self.b, grain)
        if pooled:
            transfers.risen()
            # Of one size, unless a larger one is needed
            numel = max(last - first, -(-transfers.chunk // grain))
            whole = self._whole[kind] = transfers.pool.take(numel, dtype, STAGING, unit)
        else:
            whole = empty(last - first, dtype, torch.device("cpu"), paged=True)
        data = self.rows[kind] = whole[: last - first]
        if read:
            self._reading.append(transfers.read(region, first, data, unit))
        return data

    def part(self, kind: str, x: int, y: int) -> torch.Tensor:
        """Return the items of a kind for elements [x, y), counted as `a` is."""
        return self.rows[kind][slice(*items_of(x - self.a, y - self.a, grain_of_kind(kind)))]

    def settle(self) -> None:
        """Wait for what is being read. Raises: TierError."""
        while self._reading:
            self.storage.transfers.wait(self._reading.pop())

    def close(self, *written: str) -> None:
        """Start to write the items of the kinds `written`. All buffers go back to the pool, these when
        they are on the disk. Raises: TierError.
        """
        storage, transfers = self.storage, self.storage.transfers
        if "master" in self.rows:
            transfers.up.wait()  # copies up may still read the masters
        for kind in [*self._whole]:
            data, whole = self.rows.pop(kind), self._whole.pop(kind)
            if kind in written:
                first = self.a // grain_of_kind(kind)
                region, unit = storage.regions[kind], storage.flat.unit_name
                transfers.write(region, first, data, whole, unit)
            else:
                del data  # the pool takes back what nothing refers to
                transfers.pool.give(whole)


def inside(entries: list[Entry], a: int, b: int) -> list[tuple[Entry, int, int]]:
    """Return the entries with some of the owned elements [a, b), and which these are."""
    found = [(e, *overlap((e.here.start, e.here.stop), (a, b))) for e in entries]
    return [each for each in found if each[1] < each[2]]


#: Where masters and states are stored off the device.
STORAGES: Mapping[Tier, type[OffloadStorage]] = {Tier.HOST: HostStorage, Tier.NVME: NvmeStorage}


# -- before a run ----------------------------------------------------------------------------------

#: Optimizer states with as many elements as the parameter: two, as for Adam. If an optimizer has
#: more, that shows when they are created.
MOMENTS_EXPECTED = 2


def needed(engine: Engine) -> int:
    """Return the bytes of this rank's state on disk, with two moments in the recipe's format."""
    total = 0
    for flat in engine.offloaded_flats:
        total += sum(nbytes for tier, _, nbytes in flat.spec.offloaded if tier.on_disk)
        if flat.storage.on_disk and flat.spec.trainable:
            total += sum(flat.spec.moment_bytes(s, MOMENTS_EXPECTED) for s in flat.layout.slots)
    return total


def preflight(engine: Engine) -> None:
    """Refuse a run that has no room on the disks, and prepare the host for one. Collective.

    Raises:
        TierError: on every rank, if a folder of one rank is missing or has no room.
    """
    if not engine.on_disk:
        return
    if not engine.transfers.up.asynchronous:
        give_large_blocks_back()  # on a CPU the memory that offloading frees is the C library's
    ranks = min(engine.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size)))
    mine, error = needed(engine), None
    try:
        what = f"the state of {ranks} rank{'s' if ranks > 1 else ''} on NVMe"
        refuse_unless_fits(engine.recipe.nvme, mine * ranks, what)
    except TierError as failure:
        error = failure
    agree_on_failure(engine, error, "before the run")
