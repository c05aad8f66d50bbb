"""Where a shard is stored, and the copies between tiers."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from onefold.comm import TrafficEvent, TrafficLedger
from onefold.device import (
    CopyStream,
    HostBuffers,
    HostSums,
    Ticket,
    host_threads,
    using_threads,
)
from onefold.memory import (
    LEAVING,
    STAGING,
    MemoryLedger,
    Pool,
    TierError,
    storage_of,
)
from onefold.recipe import Recipe, Tier
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.resources import Region, Store, Transfer

if TYPE_CHECKING:
    from onefold.offload.nvme_storage import NvmeStorage
    from onefold.runtime.flat import Entry, Flat


# -- copies between tiers --------------------------------------------------------------------------
#
# What an engine has off the device: copy streams, host buffers, files, and the ledgers of
# all three.


#: The number of writes of one rank that may be under way. A further one waits for the first.
BEHIND = 3


class Transfers:
    """The transfers of one rank between the device, the host and a disk.

    Attributes:
        ledgers: the ledgers of memory by tier. device: that of the device. host: that of host
            memory, for what is offloaded or under way. disk: that of the recipe's disk.
        moved: bytes "up" to the device and "down" to the host, "read" from and "written" to a disk,
            with the seconds waited for them.
        down, up: the copy streams to the host and to the device, which work at the same time.
        sums: adds gradients to those on the host, on the device.
        pinned: host buffers for gradients and casts. pool: host buffers of whole pages, reused.
            chunk: elements moved at a time, and the size of the pool's buffers.
        measures: measure gradients before they leave the device: the last clipping asked for what
            can be measured there.
        threads: how many of the host's threads work on what is stored there; None before the first
            such work.
        broken: why nothing may go on, if the disk failed in the middle of a step; else None.
    """

    def __init__(
        self,
        recipe: Recipe,
        rank: int,
        device: torch.device,
        memory: MemoryLedger,
        make: Callable[[Recipe, int, bool], Store],
        world_size: int = 1,
    ) -> None:
        self._make, self._world_size = make, world_size
        self.recipe, self.rank, self.device = recipe, rank, memory
        self.ledgers = {tier: MemoryLedger() for tier in Tier} | {Tier.DEVICE: memory}
        self.host = self.ledgers[Tier.HOST]
        self.disk = self.ledgers[Tier.NVME]
        self.moved = TrafficLedger()
        self.down, self.up = (
            CopyStream(device),
            # Casts of masters run there, and gathers begin with them
            CopyStream(device, urgent=True),
        )
        self.sums = HostSums(self.down, taken=partial(memory.add, LEAVING))
        self.pinned = HostBuffers(device)
        self.pool = Pool(
            torch.device("cpu"),
            self.host,
            paged=True,
            pinned=device if self.up.asynchronous else None,
        )
        self.chunk = recipe.chunk
        self.measures = False
        self.threads: int | None = None
        self.broken: str | None = None
        self._writing: deque[tuple[torch.Tensor, Transfer]] = deque()
        self._rising: deque[tuple[Ticket | None, torch.Tensor]] = deque()
        # For steps in the backward pass, which write from a thread of their own
        self._lock = threading.RLock()
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The files of this rank on a disk. They are made at the first access.

        Raises:
            TierError: a folder does not exist, or cannot be written to.
        """
        if self._store is None:
            self._store = self._make(self.recipe, self.rank, self.up.asynchronous)
        return self._store

    def check(self) -> None:
        """Raise TierError if an earlier failure may have left wrong state."""
        if self.broken is not None:
            raise TierError(self.broken)

    def entered(self, move: str, unit: str, nbytes: int) -> None:
        """Record bytes that start to move: "up", "down", "read" or "written"."""
        self.moved.record(TrafficEvent(move, unit, nbytes))

    def wait(self, transfer: Transfer) -> None:
        """Wait for the disk; the seconds count as exposed.

        Raises:
            TierError: the transfer failed.
        """
        if transfer.done():
            transfer.wait()
            return
        begun = time.perf_counter()
        try:
            transfer.wait()
        finally:
            self.moved.waited(None, begun)

    def rise(self, into: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy a buffer of the pool to the device, on the stream `up`. The buffer goes back to the
        pool when the copy is done. The host does not wait.
        """
        ticket = self.up.copy(into, whole)
        with self._lock:
            self._rising.append((ticket, whole))
        self.risen()

    def risen(self, all_of_them: bool = False) -> None:
        """Give back the buffers whose copies are done; or wait for all copies and give back all."""
        if all_of_them:
            self.up.wait()
        with self._lock:
            while self._rising and (
                all_of_them or (ticket := self._rising[0][0]) is None or ticket.query()
            ):
                self.pool.give(self._rising.popleft()[1])

    def host_threads(self, beside: bool = False) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's operators on the host use this rank's share of
        the cores (onefold/cores.py). On a CPU it changes nothing: the model computes there too.

        `beside`: leave a core to the thread that launches kernels meanwhile.
        """
        if not self.up.asynchronous:
            return contextlib.nullcontext()
        if self.threads is None:
            self.threads = host_threads(self._world_size)
        return using_threads(max(1, self.threads - 1) if beside else self.threads)

    def gradients_are_down(self) -> None:
        """Wait until the gradients that the user finds on the host are complete."""
        self.down.wait()
        self.sums.release()

    def buffer(
        self, numel: int, dtype: torch.dtype, unit: str, grain: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (a host buffer to be given back to the pool, its first `numel` items). All buffers
        have the same size, unless `numel` needs a larger one.

        `grain`: elements that an item stands for.
        """
        self.risen()
        whole = self.pool.take(max(numel, -(-self.chunk // grain)), dtype, STAGING, unit)
        return whole, whole[:numel]

    def write(
        self, region: Region, start: int, data: torch.Tensor, whole: torch.Tensor, unit: str
    ) -> None:
        """Start writing `data` to `region` from element `start` on. Its buffer `whole` goes back to
        the pool when the write is done.

        Raises:
            TierError: an earlier write failed.
        """
        with self._lock:
            self._writing.append((whole, region.write(start, data)))
            self.entered("written", unit, data.numel() * data.element_size())
            self.flush(BEHIND)

    def flush(self, behind: int = 0) -> None:
        """Wait until no more than `behind` writes are under way.

        Raises:
            TierError: a write failed.
        """
        with self._lock:
            while self._writing and (len(self._writing) > behind or self._writing[0][1].done()):
                whole, transfer = self._writing.popleft()
                try:
                    self.wait(transfer)
                finally:
                    self.pool.give(whole)

    def forget_writes(self) -> None:
        """Wait for the writes under way and ignore their errors: a failure was already reported."""
        while self._writing:
            with contextlib.suppress(TierError):
                self.flush()

    def close(self) -> None:
        """Let go of buffers and files."""
        self.risen(all_of_them=True)
        self.gradients_are_down()
        self.pinned.close()
        self.forget_writes()
        self.pool.close()
        if self._store is not None:
            self._store.close()


# -- storage ---------------------------------------------------------------------------------------
#
# Where this rank's shard of a flat buffer is stored between steps. `shard()` chooses one `Storage`
# for each flat buffer; the engine and its parts call the same methods on all of them.
#
# | class            | file                     | masters are stored                      | readable in place |
# |------------------|--------------------------|-----------------------------------------|-------------------|
# | `DeviceStorage`  | here                     | on the device, or where they were       | yes               |
# | `HostStorage`    | offload/storage.py       | in host memory                          | yes               |
# | `NvmeStorage`    | offload/nvme_storage.py  | in files on a disk                      | no                |
# | `EncodedStorage` | quant/encoded_storage.py | on the device, encoded (frozen weights) | no                |
#
#     build ─► store ─► ( put ─► gather ... backward ─► accept ─► take_gradient ─► step ─► renew )*
#
# Elements are counted from the first that this rank owns. "[owned]" is the shape of a tensor of all
# the elements that it owns.


class Storage(ABC):
    """What the engine asks of the place where a shard is stored. The methods that are implemented
    here do what masters on the device need, which is often nothing.

    Attributes:
        flat: the flat buffer. numel: the number of elements that this rank owns.
        offloaded: an optimizer step is done on the host, unit by unit (offload/step.py).
        in_place: masters are tensors that can be read and written where they are stored.
        on_disk: masters and states are in files. gradients_on_disk: gradients too.
        encoded: frozen weights are stored as a codec writes them.
        gradient_tier: of the reduced gradients that are in memory.
        reads_ahead: a gather begins with a read from disk, which is to be started early.
        measures_gradients: norms of gradients come from `gradient_norm`.
    """

    offloaded: bool = False
    in_place: bool = True
    on_disk: bool = False
    gradients_on_disk: bool = False
    encoded: bool = False
    reads_ahead: bool = False
    measures_gradients: bool = False
    gradient_tier: Tier = Tier.DEVICE

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.numel = flat.owned[1] - flat.owned[0]

    # -- building ----------------------------------------------------------------------------------

    @abstractmethod
    def build(self, device: torch.device) -> torch.Tensor:
        """Take memory. Returns the tensor [owned] whose views the optimizer's parameters become. If
        masters are not `in_place`, that has no memory once they are.
        """

    # -- masters -----------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> torch.Tensor:
        """Return all masters, [owned], for reading: themselves, or a copy if they are not
        `in_place`.
        """

    def landing(self, device: torch.device) -> torch.Tensor:
        """Return a tensor [owned] on `device` to put new masters into before `store`: the masters
        themselves if they are there.
        """
        master = self.flat.master
        there = self.in_place and master.device.type == device.type
        return master if there else torch.empty_like(master, device=device)

    @abstractmethod
    def store(self, values: torch.Tensor) -> None:
        """Store new values for all masters, [owned], which may be the masters themselves."""

    def renew(self) -> None:
        """Bring what gathers read up to date: masters were written to in their place."""

    def refuse_training(self, entry: Entry) -> None:
        """Raise ValueError if `entry`, frozen until now, cannot be trained from here on."""

    def keep_written(self, own: torch.Tensor, written: list[Entry]) -> None:
        """Make `own`, [owned] in the compute dtype, the masters' values: a module has `written` to
        its parameters in a forward pass.

        Raises:
            RuntimeError: masters cannot follow.
        """
        refuse_written(written)

    # -- elements of masters and states ------------------------------------------------------------

    def elements(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int
    ) -> torch.Tensor | OnDisk:
        """Return elements [x, y) of `entry`, counted from its first, or the items of a state that
        stand for them. This rank must hold them.

        Args:
            key: of the optimizer's state; "" for the masters.
            value: the optimizer's parameter, or its state. If it is in memory, a view of it is
                returned.
        """
        return value.detach().reshape(-1)[_items(entry, key, x, y)]

    def overwrite(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int, new: torch.Tensor
    ) -> None:
        """Overwrite elements [x, y) by `new`, [y - x] or one for each item that stands for them.
        See `elements`.
        """
        place = self.elements(entry, key, value, x, y)
        if isinstance(place, OnDisk):
            place.write(0, new)
        else:
            put_row(value, _items(entry, key, x, y), new)

    def new_state(
        self, entry: Entry, key: str, dtype: torch.dtype, in_memory: bool
    ) -> torch.Tensor:
        """Return a state of zeros for the elements of `entry` that this rank holds. `in_memory`: in
        memory even if other states are stored on disk.
        """
        return torch.zeros(state_shape(entry, key), dtype=dtype, device=entry.param.device)

    # -- gathers -----------------------------------------------------------------------------------

    @abstractmethod
    def put(self, full: torch.Tensor) -> None:
        """Copy this rank's masters into their place in the whole, in the compute dtype, on the
        current stream.

        Raises:
            TierError: they could not be read.
        """

    def fetch(self) -> None:
        """Start to read what `put` will copy, if that is on a disk and not under way yet."""

    def forget(self) -> None:
        """Drop what `fetch` has read if no gather will use it."""

    # -- gradients ---------------------------------------------------------------------------------

    def accept(
        self,
        total: torch.Tensor,
        pairs: list[tuple[torch.Tensor | None, torch.Tensor]],
        complete: list[Entry],
    ) -> torch.Tensor | None:
        """Take sums, [owned], from the device to `gradient_tier`, if that is another. Returns them
        there: `total` itself, or a copy that is under way unless the host is about to read it. None
        if the device has added them to the gradients that are there.

        Args:
            pairs: (`.grad` of an entry, its elements of `total`) of all entries with sums, in the
                order of their addresses; empty if not all have come.
            complete: the entries whose gradients are complete, to be measured before they leave.
        """
        return total

    def take_gradient(self, total: torch.Tensor, wanted: list[Entry]) -> bool:
        """Add sums, [owned], to the gradients on disk, for the entries `wanted`.

        Returns False if gradients are stored in memory: then they are put into `.grad`.

        Raises:
            TierError: they could not be written.
        """
        return False

    def gradient_norm(self, entry: Entry, p: float) -> torch.Tensor:
        """Return the p-norm, a 0-dim tensor, of the part of the gradient of `entry` that this rank
        accounts for. Only for storage that `measures_gradients`.
        """
        raise AssertionError("gradients are stored where their parameters are")

    def gradient_seen(self, entry: Entry) -> None:
        """Note that the user has looked at `.grad`, and may write to it."""

    def gradients_finite(self) -> bool:
        """Whether all gradients on disk are finite numbers."""
        return True

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply all gradients on disk by `factor` when they are next read."""

    def read_gradient(self, entry: Entry) -> torch.Tensor:
        """Return this rank's elements of a gradient on disk, [held], in new host memory."""
        raise NotImplementedError  # only a storage with `gradients_on_disk` has one

    def write_gradient(self, entry: Entry, values: torch.Tensor) -> None:
        """Overwrite this rank's elements of a gradient on disk by `values`, [held]."""
        raise NotImplementedError


class DeviceStorage(Storage):
    """Masters on the device: a buffer of their own, or an interval of the resident whole if that
    has their dtype; in no buffer at all where one rank has nothing to divide or cast.
    """

    def build(self, device: torch.device) -> torch.Tensor:
        flat = self.flat
        if flat.full is not None and flat.spec.shares_memory:
            return flat.full[slice(*flat.owned)]
        return torch.empty(self.numel, dtype=flat.dtypes.master, device=device)

    def load(self) -> torch.Tensor:
        return self.flat.master

    def store(self, values: torch.Tensor) -> None:
        assert values is self.flat.master  # `landing` has given them

    def refuse_training(self, entry: Entry) -> None:
        if self.flat.frozen_low:
            raise ValueError(
                f"parameter {entry.slot.name!r} was frozen when the model was sharded, so it is stored"
                f" in {self.flat.dtypes.master} without fp32 master weights, and cannot be trained"
                " now. Set it free between onefold.unshard(model) and a new shard(). Or leave"
                " requires_grad=True while calling shard() and freeze it afterwards, or use"
                " precision='fp32'."
            )

    def keep_written(self, own: torch.Tensor, written: list[Entry]) -> None:
        master = self.flat.master
        if storage_of(own) == storage_of(master):
            return  # the masters are a view of the whole
        # Elements that nobody wrote to keep the bits that the compute dtype cannot hold
        same = own == master.to(own.dtype)
        master.copy_(torch.where(same, master, own.to(master.dtype)))

    def put(self, full: torch.Tensor) -> None:
        # Otherwise the masters are a view of the whole
        if storage_of(self.flat.master) != storage_of(full):
            full[slice(*self.flat.owned)].copy_(self.flat.master)


def _items(entry: Entry, key: str, x: int, y: int) -> slice:
    """Return where elements [x, y) are in what this rank holds of a master or a state."""
    first, _ = entry.owned()
    return slice(*items_of(x - first, y - first, grain_of(key)))


def in_memory(place: torch.Tensor | OnDisk) -> torch.Tensor:
    """Return the elements of `place`: the tensor itself, or what is on disk in new host memory."""
    return place.read() if isinstance(place, OnDisk) else place


def put(place: torch.Tensor | OnDisk, values: torch.Tensor) -> None:
    """Overwrite all elements of `place`."""
    if isinstance(place, OnDisk):
        place.write(0, values)
    else:
        place.copy_(values)


def put_row(value: torch.Tensor, at: slice, new: torch.Tensor) -> None:
    """Overwrite elements `at` of `value`, counted in one row, by `new`."""
    row = value.detach().reshape(-1)
    row[at].copy_(new)
    if not value.is_contiguous():  # `row` is a copy
        value.detach().copy_(row.view(value.shape))


def state_shape(entry: Entry, key: str) -> tuple[int, ...]:
    """Return the shape of what this rank holds of the state `key`."""
    shape: tuple[int, ...] = tuple(entry.param.shape)
    return shape if packed(key) is None else (-(-entry.param.numel() // grain_of(key)),)


def refuse_written(written: list[Entry]) -> None:
    """Raise RuntimeError if any parameter was written to in a forward pass: the change would be
    lost.
    """
    if written:
        raise RuntimeError(
            f"parameter {written[0].slot.name!r} was written to in the forward pass, and it is stored"
            " off the device or travels encoded, so that the change would be lost. Write to it after"
            " optimizer.step(), under torch.no_grad()."
        )


# -- tensors in files ------------------------------------------------------------------------------
#
# Elements that are stored in files: read and written in pieces, never whole in memory.


#: Elements moved to or from the disk at a time.
CHUNK = 4 << 20


@dataclass(frozen=True)
class OnDisk:
    """Stands for a one-dimensional tensor: elements [start, stop) of the region `kind` of
    `storage`, or items that stand for some elements each. Elements are counted from the first that
    this rank owns.
    """

    storage: NvmeStorage
    kind: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.regions[self.kind].dtype

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the elements in order, in host tensors."""
        for a in range(self.start, self.stop, CHUNK):
            yield self.storage.part(self.kind, a, min(self.stop, a + CHUNK))

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read elements [start, stop), counted from the first of these, into new host memory."""
        end = self.stop if stop is None else self.start + stop
        return self.storage.part(self.kind, self.start + start, end)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the elements from `start` on, counted from the first of these."""
        self.storage.write_part(self.kind, self.start + start, values.to("cpu", self.dtype))
