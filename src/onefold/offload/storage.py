"""The home of a flat buffer whose state rests off the device: masters, gradients, and this rank's
part of what is computed with.

    parameters  optimizer   `rest`: the interval that gathers read                 masters
    device      host        a device tensor (of the whole, where that is kept)     a host tensor, [owned]
    device      NVMe        the same                                               a region; the parameters are storageless
    host        host        the masters, or a host copy in the compute dtype       a host tensor
    host        NVMe        a host copy                                            a region
    NVMe        NVMe        the masters' region, or one in the compute dtype       a region

Storageless (runtime/storageless.py): of a shape and a dtype, without memory. What an optimizer's
parameter on NVMe is between steps.

[Note: who moves what] Down: the reducer brings a unit's summed gradient down as soon as it has it.
Step: offload/step.py reads masters, gradients and states chunk by chunk, steps, writes them back,
and says what is new (`stepped`). Up: `put` fills this rank's part of a buffer to gather in; `fetch`
starts that ahead of time where it comes from a disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from onefold.device import host_empty
from onefold.layout import Tiers, overlap
from onefold.memory import (
    GRADIENTS,
    LEAVING,
    MASTERS,
    MOMENTS,
    PARAMETERS,
    STAGING,
    empty,
    storage_of,
)
from onefold.memory.tier_error import TierError
from onefold.recipe import Tier
from onefold.recipe.moments import grain_of
from onefold.recipe.tiers import SECTOR
from onefold.runtime.capabilities import Region, Transfer
from onefold.runtime.parameter import written
from onefold.runtime.storageless import storageless

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine
    from onefold.runtime.flat import Entry, Flat

_CATEGORIES = {"master": MASTERS, "parameter": PARAMETERS, "gradient": GRADIENTS}


def state_kind(key: str, dtype: torch.dtype) -> str:
    """What a region of an optimizer's element-wise state `key` is called."""
    return f"state {key} {str(dtype).removeprefix('torch.')}"


def grain_of_kind(kind: str) -> int:
    """Elements that one item of a region of that kind stands for: 1 but for codes and scales of
    packed moments.
    """
    what, _, rest = kind.partition(" ")
    return grain_of(rest.rpartition(" ")[0]) if what == "state" else 1


class OffloadStorage:
    """See the table of this module. Elements are counted from the first that this rank owns.

    Attributes:
        rest: this rank's interval in the compute dtype, [owned], on the device or the host; None if
            it is on NVMe.
        shown: what the optimizer's parameters are views of, [owned]: the host masters, or a storageless
            tensor.
        regions: what lies on NVMe: "master", "parameter", "gradient", and those of `state_kind`.
        scale: what gradients on NVMe are multiplied with when they are read; None is 1.
        norms: 2-norms of the gradients on NVMe that this rank accounts for, by the index of their
            entry, taken as they passed by.
    """

    def __init__(self, flat: Flat, tiers: Tiers, engine: Engine) -> None:
        self.flat, self.tiers = flat, tiers
        self.transfers, self.device = engine.transfers, engine.device
        self.numel = flat.spec.own
        self.rest: torch.Tensor | None = None
        self.shown: torch.Tensor
        self.regions: dict[str, Region] = {}
        # (kind, first element) of the chunks that hold something
        self.written: set[tuple[str, int]] = set()
        self.scale: torch.Tensor | None = None
        self.norms: dict[int, torch.Tensor] = {}
        self.stepped_in = -1  # the last backward pass behind which it was stepped
        self._versions = -1  # what the masters' counters said when `rest` was last made of them
        self._fetching: tuple[torch.Tensor, Transfer, bool] | None = None

    @property
    def on_disk(self) -> bool:
        """Masters and states lie on NVMe."""
        return self.tiers.optimizer is Tier.NVME

    @property
    def gradients_on_disk(self) -> bool:
        return self.tiers.gradients is Tier.NVME

    # -- building ----------------------------------------------------------------------------------

    def build(self) -> torch.Tensor:
        """Take memory. Returns `shown`."""
        flat, d, p = self.flat, self.flat.dtypes, self.tiers.parameters
        same = d.compute == d.master
        self.shown = (
            torch.empty(self.numel, dtype=d.master)
            if self.on_disk
            else host_empty(self.numel, d.master, self.device)
        )
        if p is Tier.DEVICE:
            whole = flat.full
            self.rest = (
                whole[slice(*flat.owned)]
                if whole is not None
                else torch.empty(self.numel, dtype=d.compute, device=self.device)
            )
        elif p is Tier.HOST:
            self.rest = (
                self.shown
                if same and not self.on_disk
                else host_empty(self.numel, d.compute, self.device)
            )
        if self.on_disk:
            self.region("master", d.master)
        if p is Tier.NVME and not same:
            self.region("parameter", d.compute)
        return self.shown

    def bound(self) -> None:
        """The parameters are views of `shown` now."""
        if self.on_disk:
            self.shown.untyped_storage().resize_(0)

    def region(self, kind: str, dtype: torch.dtype) -> Region:
        """The place on NVMe of what is called `kind`, [owned] (or an item for some elements each);
        made when it is first asked for.

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

    # -- masters -----------------------------------------------------------------------------------

    def load(self) -> torch.Tensor:
        """All masters of this rank, [owned], on the host: themselves, or a copy of what is on
        NVMe.
        """
        if not self.on_disk:
            return self.shown
        return self.part("master", 0, self.numel)

    def store(self, master: torch.Tensor) -> None:
        """New values for all masters of this rank: `master` is [owned], anywhere."""
        if not self.numel:
            return
        if self.on_disk:
            for a, b in self.chunks():
                whole, data = self._buffer(b - a, self.flat.dtypes.master)
                data.copy_(master[a:b])
                self.stepped(a, b, data)
                self.transfers.up.wait()
                self._write("master", a, data, whole)
            self.transfers.flush()
        else:
            if storage_of(master) != storage_of(self.shown):
                self.transfers.up.wait()  # a copy up may still read them
                self.shown.copy_(master)
            self._versions = -1
            self.follow()

    def part(self, kind: str, start: int, stop: int) -> torch.Tensor:
        """Elements (or items) [start, stop) of what lies on NVMe as `kind`, in host memory of their
        own.
        """
        region = self.regions[kind]
        if start == stop:
            return torch.empty(0, dtype=region.dtype)
        first = start // SECTOR * SECTOR
        out = empty(
            min(region.numel, -(-stop // SECTOR) * SECTOR) - first,
            region.dtype,
            torch.device("cpu"),
            paged=True,
        )
        self.transfers.wait(region.read(first, out))
        self.transfers.entered("read", self.flat.unit_name, out.numel() * out.element_size())
        return out[start - first : stop - first]

    def write_part(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Overwrite elements (or items) from `start` on of what lies on NVMe as `kind`."""
        stop, region, grain = start + values.numel(), self.regions[kind], grain_of_kind(kind)
        if start == stop:
            return
        self.written |= {
            (kind, a) for a, b in self.chunks() if a < stop * grain and start * grain < b
        }
        first, last = start // SECTOR * SECTOR, min(region.numel, -(-stop // SECTOR) * SECTOR)
        whole, data = self._buffer(last - first, region.dtype)
        if first < start or stop < last:
            self.transfers.wait(region.read(first, data))
        data[start - first : stop - first].copy_(values)
        self._write(kind, first, data, whole)

    def _buffer(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transfers.buffer(numel, dtype, self.flat.unit_name)

    def _write(self, kind: str, start: int, data: torch.Tensor, whole: torch.Tensor) -> None:
        self.transfers.write(self.regions[kind], start, data, whole, self.flat.unit_name)

    # -- what is computed with ---------------------------------------------------------------------

    def stepped(self, start: int, stop: int, master: torch.Tensor) -> None:
        """Masters [start, stop) have the new values `master`: bring what gathers read up to
        date.
        """
        if self.rest is not None:
            if storage_of(self.rest) != storage_of(master):
                self._up(self.rest[start:stop], master)
        elif "parameter" in self.regions:
            whole, low = self._buffer(stop - start, self.flat.dtypes.compute)
            low.copy_(master)
            self._write("parameter", start, low, whole)

    def _up(self, into: torch.Tensor, master: torch.Tensor) -> None:
        # Cast here: half the bytes go up
        if (
            self.transfers.up.asynchronous
            and into.device.type != "cpu"
            and into.dtype != master.dtype
        ):
            low = self.transfers.pinned.empty(master.numel(), into.dtype)
            low.copy_(master)
            master = low
        # From host memory to host memory
        if into.device.type == "cpu" and self.transfers.up.asynchronous:
            self.transfers.up.wait()
            into.copy_(master)
        else:
            self.transfers.up.copy(into, master)
        if self.tiers.parameters is Tier.DEVICE:
            self.transfers.entered("up", self.flat.unit_name, into.numel() * into.element_size())

    def follow(self) -> None:
        """Anybody may write to host masters: bring what gathers read up to date if somebody did."""
        if self.on_disk or self.rest is None or not self.numel:
            return
        versions = sum(written(e.param) for e in self.flat.entries)
        if versions != self._versions:
            self._versions = versions
            self.stepped(0, self.numel, self.shown)

    def touched(self) -> None:
        """Masters have been written to in a way that no counter shows."""
        self._versions = -1

    def renew(self) -> None:
        """Make what gathers read anew of masters on NVMe."""
        for a, b in self.chunks() if self.on_disk else ():
            self.stepped(a, b, self.part("master", a, b))
        self.transfers.flush()

    def fetch(self) -> bool:
        """Start reading this rank's interval into its part of `flat.full`, if it comes from a disk
        and the read is not under way.
        """
        full = self.flat.full
        if self.rest is not None or self._fetching is not None or not self.numel or full is None:
            return False
        region = self.regions.get("parameter") or self.regions["master"]
        mine = full[slice(*self.flat.owned)]
        self.transfers.risen()
        direct = (
            mine.device.type == "cpu"
            and not mine.data_ptr() % SECTOR
            and not region.nbytes % SECTOR
        )
        data = (
            mine
            if direct
            else self.transfers.pool.take(self.numel, region.dtype, STAGING, self.flat.unit_name)
        )
        self._fetching = data, region.read(0, data), direct
        self.transfers.entered("read", self.flat.unit_name, region.nbytes)
        return True

    def put(self) -> None:
        """This rank's interval into its part of `flat.full`, on the current stream: that of the
        copies up (see Gatherer.launch).

        Raises:
            TierError: it could not be read.
        """
        full = self.flat.full
        if not self.numel or full is None:
            return
        mine = full[slice(*self.flat.owned)]
        if self.rest is not None:
            self.follow()
            if storage_of(self.rest) != storage_of(mine):
                self.transfers.up.copy(mine, self.rest)
                if self.tiers.parameters is Tier.HOST:
                    self.transfers.entered(
                        "up", self.flat.unit_name, mine.numel() * mine.element_size()
                    )
            return
        self.fetch()
        assert self._fetching is not None
        data, transfer, direct = self._fetching
        self._fetching = None
        self.transfers.wait(transfer)
        if not direct:
            self.transfers.rise(mine, data)

    def forget(self) -> None:
        """Drop what was fetched and will not be used."""
        if self._fetching is not None:
            data, transfer, direct = self._fetching
            self._fetching = None
            with contextlib.suppress(TierError):  # nobody wants it any more
                self.transfers.wait(transfer)
            if not direct:
                self.transfers.pool.give(data)

    # -- gradients ---------------------------------------------------------------------------------

    def bring_down(self, total: torch.Tensor) -> torch.Tensor:
        """A summed gradient as host memory: itself where the device is the host."""
        nbytes = total.numel() * total.element_size()
        self.transfers.entered("down", self.flat.unit_name, nbytes)
        if total.device.type == "cpu":
            return total
        low = self.transfers.pinned.empty(total.numel(), total.dtype)
        self.transfers.device.add(LEAVING, nbytes)
        self.transfers.down.copy(
            low, total, done=partial(self.transfers.device.add, LEAVING, -nbytes)
        )
        return low

    def take_gradient(
        self, total: torch.Tensor, span: tuple[int, int], wanted: list[Entry]
    ) -> None:
        """Host sums over the addresses `span`, of which the entries `wanted` are meant: to NVMe,
        added to what is there of them.

        Their `.grad` becomes storageless.
        """
        region, base = self.region("gradient", self.flat.dtypes.master), self.flat.owned[0]
        if all(e.param.grad is None for e in self.flat.entries):
            self.scale = None
        elif self.scale is not None:
            raise RuntimeError(
                f"a backward pass adds to gradients of {self.flat.unit_name!r} that were clipped or"
                " unscaled already: do that once, after the last backward pass of a step."
            )
        for a, b in self.chunks():
            here = overlap((base + a, base + b), span)
            inside = [(e, overlap((e.slot.start, e.slot.end), here)) for e in wanted]
            inside = [(e, (x, y)) for e, (x, y) in inside if x < y]
            if not inside:
                continue
            whole, data = self._buffer(b - a, region.dtype)
            if any(
                e.param.grad is not None
                for e in self.flat.entries
                if _meets(e, (base + a, base + b))
            ):
                self.transfers.wait(region.read(a, data))
                self.transfers.entered(
                    "read", self.flat.unit_name, data.numel() * data.element_size()
                )
            else:
                data.zero_()
            for entry, (x, y) in inside:
                into, new = data[x - base - a : y - base - a], total[x - span[0] : y - span[0]]
                if entry.param.grad is None:
                    into.copy_(new)
                else:
                    into.add_(new)
            self._write("gradient", a, data, whole)
        for entry in wanted:
            self.norms.pop(entry.index, None)
            if entry.param.grad is None:
                x, y = self.flat.accounted(entry)
                # The norm is asked for later, and now it is in memory
                if x < y and total.dtype == region.dtype:
                    self.norms[entry.index] = torch._foreach_norm(
                        [total[x - span[0] : y - span[0]]], 2.0
                    )[0]
                entry.param.grad = storageless(entry.param, f"the gradient of {entry.slot.name!r}")

    def norm(self, entry: Entry, addresses: tuple[int, int], p: float) -> torch.Tensor:
        """The p-norm of the gradient of `entry` over `addresses`, a 0-dim tensor; read again unless
        it was taken as it passed by.
        """
        a, b = addresses
        if p != 2 or self.scale is not None or entry.index not in self.norms:
            part = self.part("gradient", a - self.flat.owned[0], b - self.flat.owned[0])
            if self.scale is not None:
                part.mul_(self.scale)
            norm = torch._foreach_norm([part], p)[0]
            if p != 2 or self.scale is not None:
                return norm
            self.norms[entry.index] = norm
        return self.norms[entry.index]

    def finite(self) -> bool:
        """Whether all gradients on NVMe are finite numbers."""
        used = [e for e in self.flat.entries if e.param.grad is not None]
        spans = [
            (a - self.flat.owned[0], b - self.flat.owned[0]) for a, b in map(self.flat.local, used)
        ]
        return all(
            bool(torch.isfinite(self.part("gradient", a, b)).all()) for a, b in spans if a < b
        )

    def scale_by(self, factor: torch.Tensor) -> None:
        """Multiply all gradients on NVMe with `factor` when they are next read."""
        factor = factor.detach().to("cpu", torch.float32).reshape(())
        self.scale = factor.clone() if self.scale is None else self.scale * factor

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The intervals that are moved and stepped at a time."""
        return (
            (a, min(self.numel, a + self.transfers.chunk))
            for a in range(0, self.numel, self.transfers.chunk)
        )

    # -- ledger ------------------------------------------------------------------------------------

    def resting_bytes(self) -> dict[Tier, dict[str, int]]:
        """Bytes held between steps without gradients and moments, by tier and category; NVMe enters
        its regions itself.
        """
        out: dict[Tier, dict[str, int]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        full = self.flat.full if self.flat.resident else None
        if full is not None:
            out[Tier.DEVICE][PARAMETERS] = full.numel() * full.element_size()
        if not self.on_disk:
            out[Tier.HOST][MASTERS] = self.shown.numel() * self.shown.element_size()
        if (
            self.rest is not None
            and self.rest is not self.shown
            and (full is None or storage_of(full) != storage_of(self.rest))
        ):
            tier = Tier.DEVICE if self.tiers.parameters is Tier.DEVICE else Tier.HOST
            out[tier][PARAMETERS] = self.rest.numel() * self.rest.element_size()
        return out


def _meets(entry: Entry, addresses: tuple[int, int]) -> bool:
    a, b = overlap((entry.slot.start, entry.slot.end), addresses)
    return a < b
