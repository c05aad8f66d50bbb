"""Shards whose masters and states are in files on NVMe, stepped chunk by chunk (offload/step.py).

Between steps the optimizer's parameters are storageless: they have a shape and a dtype, but no
memory (runtime/parameters/values.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from onefold.layout import overlap
from onefold.memory import (
    GRADIENTS,
    MASTERS,
    MOMENTS,
    PARAMETERS,
    STAGING,
    TierError,
    empty,
    nbytes_of,
)
from onefold.offload.nvme import Region, Transfer, refuse_unless_fits, substitute
from onefold.offload.storage import HostStorage, OffloadStorage, grain_of_kind, state_kind
from onefold.recipe import Tier
from onefold.recipe.moments import FORMATS, grain_of, items_of
from onefold.recipe.options import SECTOR
from onefold.runtime.agree import agree_on_failure
from onefold.runtime.parameters.values import state_place, storageless
from onefold.runtime.storage import state_shape

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat

_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


class NvmeStorage(OffloadStorage):
    """Masters and states in regions of the rank's files. Elements are counted from the first that
    this rank owns.

    Attributes:
        regions: the regions on NVMe by kind: "master", "parameter", "gradient", and the names that
            `state_kind` gives.
        written: (kind, first element) of the chunks that were written.
        scale: the factor for gradients on NVMe, applied when they are read; None is 1.
        norms: 2-norms of the gradients on NVMe that this rank accounts for, by the index of the
            entry, computed while the gradients were in memory.
    """

    in_place = False
    on_disk = True

    def __init__(self, flat: Flat, engine: Engine) -> None:
        super().__init__(flat, engine)
        self.regions: dict[str, Region] = {}
        self.written: set[tuple[str, int]] = set()
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
            return torch.empty(0, dtype=value.dtype)
        return self.part(*self._place(entry, key, value, x, y))

    def write(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int, new: torch.Tensor
    ) -> None:
        if key and not value.is_meta:
            super().write(entry, key, value, x, y, new)
        elif x < y:
            self.write_part(*self._place(entry, key, value, x, y)[:2], new)

    def _place(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int
    ) -> tuple[str, int, int]:
        """Return the region in which elements of `entry` are, and which of its items they are."""
        first = entry.slot.start - self.flat.owned[0]
        start, stop = items_of(first + x, first + y, grain_of(key))
        return state_kind(key, value.dtype) if key else "master", start, stop

    def new_state(
        self, entry: Entry, key: str, dtype: torch.dtype, in_memory: bool
    ) -> torch.Tensor:
        if in_memory:
            return super().new_state(entry, key, dtype, in_memory)
        self.region(state_kind(key, dtype), dtype)
        return state_place(state_shape(entry, key), dtype)

    # -- masters -----------------------------------------------------------------------------------

    def store(self, values: torch.Tensor) -> None:
        if not self.numel:
            return
        for a, b in self.chunks():
            whole, data = self._buffer(b - a, self.flat.dtypes.master)
            data.copy_(values[a:b])
            # `stepped` may start a copy up from `data`. It holds the buffer, so the pool does not
            # reuse it before the copy is done.
            self.stepped(a, b, data)
            self._write("master", a, data, whole)
        self.transfers.flush()

    def stepped(self, start: int, stop: int, master: torch.Tensor) -> None:
        super().stepped(start, stop, master)
        if "parameter" in self.regions:
            whole, low = self._buffer(stop - start, self.flat.dtypes.compute)
            low.copy_(master)
            self._write("parameter", start, low, whole)

    def renew(self) -> None:
        for a, b in self.chunks():
            self.stepped(a, b, self.part("master", a, b))
        self.transfers.flush()

    def part(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """Read elements (or items) [start, stop) of the region `kind` into new host memory."""
        region = self.regions[kind]
        if start == stop:
            return torch.empty(0, dtype=region.dtype, device="cpu")
        first, last = self._sectors(kind, start, stop)
        out = empty(last - first, region.dtype, torch.device("cpu"), paged=True)
        self._read(kind, first, out)
        return out[start - first : stop - first]

    def write_part(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements (or items) of the region `kind` from `start` on."""
        stop, region, grain = start + values.numel(), self.regions[kind], grain_of_kind(kind)
        if start == stop:
            return
        self.written |= {
            (kind, a) for a, b in self.chunks() if a < stop * grain and start * grain < b
        }
        first, last = self._sectors(kind, start, stop)
        whole, data = self._buffer(last - first, region.dtype)
        if first < start or stop < last:
            self.transfers.wait(region.read(first, data))
        data[start - first : stop - first].copy_(values)
        self._write(kind, first, data, whole)

    def _sectors(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        """Return the whole sectors in which elements [start, stop) lie."""
        last = min(self.regions[kind].numel, -(-stop // SECTOR) * SECTOR)
        return start // SECTOR * SECTOR, last

    def _read(self, kind: str, start: int, into: torch.Tensor) -> None:
        self.transfers.wait(self.regions[kind].read(start, into))
        self.transfers.entered("read", self.flat.unit_name, nbytes_of(into))

    def _buffer(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transfers.buffer(numel, dtype, self.flat.unit_name)

    def _write(self, kind: str, start: int, data: torch.Tensor, whole: torch.Tensor) -> None:
        self.transfers.write(self.regions[kind], start, data, whole, self.flat.unit_name)

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
        whole = None
        if not direct:
            pool, unit = self.transfers.pool, self.flat.unit_name
            whole = pool.take(self.numel, region.dtype, STAGING, unit)
        self._fetching = whole, region.read(0, mine if whole is None else whole)
        self.transfers.entered("read", self.flat.unit_name, region.nbytes)

    def put_read(self, mine: torch.Tensor) -> None:
        self.fetch()
        assert self._fetching is not None
        (whole, transfer), self._fetching = self._fetching, None
        self.transfers.wait(transfer)
        if whole is not None:
            self.transfers.rise(mine, whole)

    def forget(self) -> None:
        if self._fetching is not None:
            (whole, transfer), self._fetching = self._fetching, None
            with contextlib.suppress(TierError):  # the data is no longer needed
                self.transfers.wait(transfer)
            if whole is not None:
                self.transfers.pool.give(whole)

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def _on_cpu(self) -> bool:
        return not self.transfers.down.asynchronous

    def take_gradient(self, total: torch.Tensor, wanted: list[Entry]) -> bool:
        """Write the gradients of the entries `wanted` to NVMe, or add to those that are there.

        `total`: host sums, [owned]. `.grad` of the entries becomes storageless.
        """
        if not self.gradients_on_disk:
            return False
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
            whole, data = self._buffer(b - a, dtype)
            if any(e.param.grad is not None for e, _, _ in inside(self.flat.entries, a, b)):
                self._read("gradient", a, data)
            else:
                data.zero_()
            for entry, x, y in met:
                into, new = data[x - a : y - a], total[x:y]
                into.copy_(new) if entry.param.grad is None else into.add_(new)
            self._write("gradient", a, data, whole)
        for entry in wanted:
            self.norms.pop(entry.index, None)
            if entry.param.grad is None:
                part = total[entry.counted]
                # Clipping will ask for the norm. Now the gradient is still in memory.
                if (norm := self.norm_before_it_left(entry, total)) is not None:
                    self.norms[entry.index] = norm
                elif self._on_cpu and part.numel() and part.dtype == dtype:
                    self.norms[entry.index] = torch._foreach_norm([part], 2.0)[0]
                entry.param.grad = storageless(entry.param, f"the gradient of {entry.slot.name!r}")
        return True

    def gradient_norm(self, entry: Entry, p: float) -> torch.Tensor:
        """See `Storage`. Reads the gradient again unless `norms` has the answer."""
        if not self.gradients_on_disk:
            return super().gradient_norm(entry, p)
        if p != 2 or self.scale is not None or entry.index not in self.norms:
            part = self._scaled(entry.counted)
            norm = (
                torch._foreach_norm([part], p)[0] if self._on_cpu else self.norm_on_device(part, p)
            )
            if p != 2 or self.scale is not None:
                return norm
            self.norms[entry.index] = norm
        return self.norms[entry.index]

    def read_gradient(self, entry: Entry) -> torch.Tensor:
        return self._scaled(entry.here)

    def _scaled(self, where: slice) -> torch.Tensor:
        part = self.part("gradient", where.start, where.stop)
        return part if self.scale is None else part.mul_(self.scale)

    def write_gradient(self, entry: Entry, values: torch.Tensor) -> None:
        values = values.to("cpu", self.regions["gradient"].dtype)
        values = values if self.scale is None else values / self.scale
        self.write_part("gradient", entry.here.start, values)
        self.norms.pop(entry.index, None)

    def gradients_finite(self) -> bool:
        """Return whether all gradients on NVMe are finite numbers."""
        used = (e for e in self.flat.entries if e.param.grad is not None)
        return all(bool(torch.isfinite(self.read_gradient(e)).all()) for e in used)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply all gradients on NVMe by `factor` when they are next read."""
        factor = factor.detach().to("cpu", torch.float32).reshape(())
        self.scale = factor.clone() if self.scale is None else self.scale * factor


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
        assert isinstance(flat.storage, OffloadStorage)
        tiers, d, n = flat.storage.tiers, flat.dtypes, flat.storage.numel
        trained = any(e.param.requires_grad for e in flat.entries)
        if tiers.optimizer.on_disk:
            moment = (
                FORMATS[engine.recipe.moments].nbytes(n)
                if engine.recipe.moments is not None
                else n * d.master.itemsize
            )
            total += n * d.master.itemsize + (MOMENTS_EXPECTED * moment if trained else 0)
        if tiers.gradients.on_disk and trained:
            total += n * d.master.itemsize
        if tiers.parameters.on_disk and d.compute != d.master:
            total += n * d.compute.itemsize
    return total


def preflight(engine: Engine) -> None:
    """Refuse a run that has no room on the disks. Collective.

    Raises:
        TierError: on every rank, if a folder of one rank is missing or has no room.
    """
    if not engine.on_disk or substitute() is not None:
        return
    ranks = min(engine.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size)))
    mine, error = needed(engine), None
    try:
        what = f"the state of {ranks} rank{'s' if ranks > 1 else ''} on NVMe"
        refuse_unless_fits(engine.recipe.nvme, mine * ranks, what)
    except TierError as failure:
        error = failure
    agree_on_failure(engine, error, "before the run")
