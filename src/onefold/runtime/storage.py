"""Where this rank's shard of a flat buffer rests between steps. One `Storage` for each flat buffer,
chosen once in `shard()`; the engine and its parts call the same methods on all of them.

| class            | file                     | masters rest                            | readable in place |
|------------------|--------------------------|-----------------------------------------|-------------------|
| `DeviceStorage`  | here                     | on the device                           | yes               |
| `InPlaceStorage` | here                     | where they were: one rank, no division  | yes               |
| `HostStorage`    | offload/storage.py       | in host memory                          | yes               |
| `NvmeStorage`    | offload/nvme_storage.py  | in files on NVMe                        | no                |
| `EncodedStorage` | quant/encoded_storage.py | on the device, encoded (frozen weights) | no                |

    build ─► bound ─► ( put ─► gather ... backward ─► bring_down ─► take_gradient ─► step ─► follow )*

Elements are counted from the first that this rank owns; "[owned]" is the shape of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from onefold.memory import MASTERS, PARAMETERS, MemoryLedger, nbytes_of, storage_of
from onefold.recipe import Tier
from onefold.recipe.moments import grain_of, items_of, packed
from onefold.runtime.on_disk import OnDisk

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.flat import Flat


class Storage(ABC):
    """What the engine asks of the place where a shard rests. What a method does not say here, it
    does for masters on the device: nothing.

    Attributes:
        flat: the flat buffer. numel: the elements that this rank owns.
        offloaded: an optimizer step is done on the host, unit by unit (offload/step.py).
        in_place: masters are tensors that can be read and written where they rest.
        on_disk: masters and states lie in files. gradients_on_disk: gradients too.
        encoded: frozen weights rest as a codec writes them.
        reads_ahead: what a gather begins with comes from a disk and is to be asked for early.
    """

    offloaded: bool = False
    in_place: bool = True
    on_disk: bool = False
    gradients_on_disk: bool = False
    encoded: bool = False
    reads_ahead: bool = False

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.numel = flat.owned[1] - flat.owned[0]

    # -- building ----------------------------------------------------------------------------------

    @abstractmethod
    def build(self, device: torch.device) -> torch.Tensor:
        """Take memory. Returns what the optimizer's parameters are to be views of, [owned]."""

    def bound(self, first: torch.Tensor) -> None:
        """The parameters are views of what `build` has returned; `first`, from `landing`, holds the
        first values.
        """

    @abstractmethod
    def resting_bytes(self) -> dict[Tier, dict[str, int]]:
        """Bytes held between steps, without gradients and moments, by tier and category."""

    def forget(self) -> None:
        """Drop what `fetch` has read and no gather will use."""

    # -- masters -----------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> torch.Tensor:
        """All masters, [owned], to read: themselves, or a copy where they do not rest in place."""

    def landing(self, device: torch.device) -> torch.Tensor:
        """Where new masters, [owned], are put before `store`: the masters themselves where they
        rest on `device`.
        """
        return torch.empty(self.numel, dtype=self.flat.dtypes.master, device=device)

    @abstractmethod
    def store(self, values: torch.Tensor) -> None:
        """New values for all masters, [owned], from `landing`."""

    def masters_written(self) -> None:
        """Masters have been written to in a way that no version counter shows."""

    def follow(self) -> None:
        """Masters may have been written to: bring what gathers read up to date if they were."""

    def before_write(self) -> None:
        """Code outside a step is going to write to masters: what copies them has to be done."""

    def refuse_training(self, entry: Entry) -> None:
        """Raise ValueError if `entry`, frozen until now, cannot be trained from here on."""

    @abstractmethod
    def keep_written(self, own: torch.Tensor, written: list[Entry]) -> bool:
        """A module wrote to its parameters in a forward pass: `own`, [owned] in the compute dtype,
        becomes the masters' values. True if any differed.

        Raises:
            RuntimeError: masters cannot follow, and `written` names who was written to.
        """

    # -- elements of masters and states ------------------------------------------------------------

    def elements(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int
    ) -> torch.Tensor | OnDisk:
        """Elements [x, y) of `entry`, counted from its first, or the items that stand for them;
        this rank holds them.

        Args:
            key: of the optimizer's state; "" for the masters.
            value: the optimizer's parameter, or its state. What is returned is a view of it where
                it is in memory.
        """
        first, _ = entry.held()
        return value.detach().reshape(-1)[slice(*items_of(x - first, y - first, grain_of(key)))]

    def new_state(
        self, entry: Entry, key: str, dtype: torch.dtype, in_memory: bool
    ) -> torch.Tensor:
        """A state of zeros for the elements of `entry` that this rank holds. `in_memory`: also
        where others rest on disk.
        """
        return torch.zeros(state_shape(entry, key), dtype=dtype, device=entry.param.device)

    def beside_masters(self, name: str, dtype: torch.dtype) -> torch.Tensor | OnDisk:
        """Room for a number called `name` for each element of this rank's interval, on the masters'
        tier.
        """
        a, b = self.flat.interval
        return torch.empty(b - a, dtype=dtype, device=self.flat.master.device)

    def renew(self) -> None:
        """Masters were written to by `elements`: bring what gathers read up to date."""

    # -- gathers -----------------------------------------------------------------------------------

    @property
    def copies(self) -> bool:
        """Gathers begin with a copy of the masters, so that they may go beside the computation."""
        return True

    @abstractmethod
    def put(self, full: torch.Tensor) -> None:
        """This rank's masters into their place in the whole, in the compute dtype, on the current
        stream.

        Raises:
            TierError: they could not be read.
        """

    def fetch(self) -> None:
        """Start reading what `put` will put, if it comes from a disk and is not under way."""

    # -- gradients ---------------------------------------------------------------------------------

    def gradient_ledger(self, device: MemoryLedger) -> MemoryLedger:
        """The ledger of the memory that reduced gradients are in; `device`: that of the device."""
        return device

    @property
    def gradient_tier(self) -> Tier:
        """The tier that reduced gradients are on, as far as they are in memory."""
        return Tier.DEVICE

    def bring_down(self, total: torch.Tensor) -> torch.Tensor:
        """A summed gradient where the optimizer wants it: it itself, or a copy under way."""
        return total

    def settle_gradient(self, total: torch.Tensor) -> None:
        """Wait, if the host is about to read `total`, from `bring_down`."""

    def take_gradient(
        self, total: torch.Tensor, span: tuple[int, int], wanted: list[Entry]
    ) -> None:
        """Sums over the addresses `span`, of which the entries `wanted` are meant, where gradients
        lie on disk: added to what is there.

        Raises:
            TierError: they could not be written.
        """
        raise AssertionError("gradients are stored in memory")

    def gradient_norm(self, entry: Entry, p: float) -> torch.Tensor:
        """The p-norm of what this rank accounts for of the gradient of `entry`, a 0-dim tensor,
        where gradients lie on disk.
        """
        raise AssertionError("gradients are stored in memory")

    def gradients_finite(self) -> bool:
        """Whether all gradients on disk are finite numbers."""
        return True

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply all gradients on disk with `factor` when they are next read."""

    def show_gradient(self, entry: Entry, part: torch.Tensor, what: str) -> torch.Tensor:
        """What `.grad` shows of `part`, this rank's elements of a gradient that is not reduced yet:
        it itself, or, where it is not where its parameter is, something of its shape called `what`.
        """
        # .data: a version counter of its own, which tells whether the user wrote to it
        return part.data.to(entry.param.dtype).view(entry.param.shape)


class DeviceStorage(Storage):
    """Masters on the device: a buffer of their own, or an interval of the whole where that always
    exists and has their dtype.
    """

    master: torch.Tensor

    def build(self, device: torch.device) -> torch.Tensor:
        flat, d = self.flat, self.flat.dtypes
        if flat.full is not None and d.compute == d.master:
            self.master = flat.full[slice(*flat.owned)]
        else:
            self.master = torch.empty(self.numel, dtype=d.master, device=device)
        return self.master

    def resting_bytes(self) -> dict[Tier, dict[str, int]]:
        flat = self.flat
        if not flat.resident or flat.full is None:
            return {Tier.DEVICE: {MASTERS: nbytes_of(self.master)}}
        if storage_of(flat.full) == storage_of(self.master):
            return {Tier.DEVICE: {PARAMETERS: nbytes_of(flat.full)}}
        return {Tier.DEVICE: {MASTERS: nbytes_of(self.master), PARAMETERS: nbytes_of(flat.full)}}

    def load(self) -> torch.Tensor:
        return self.master

    def landing(self, device: torch.device) -> torch.Tensor:
        return self.master

    def store(self, values: torch.Tensor) -> None:
        pass  # `landing` has given the masters themselves

    def refuse_training(self, entry: Entry) -> None:
        if self.flat.frozen_low:
            raise ValueError(
                f"parameter {entry.slot.name!r} was frozen when the model was sharded, so it is stored"
                f" in {self.flat.dtypes.master} without fp32 master weights, and cannot be trained"
                " now. Set it free inside `with onefold.unsharded(model):`. Or leave"
                " requires_grad=True while calling shard() and freeze it afterwards, or use"
                " precision='fp32'."
            )

    def keep_written(self, own: torch.Tensor, written: list[Entry]) -> bool:
        master = self.master
        if storage_of(own) == storage_of(master):
            return False  # the masters are that part of the whole
        then = master if own.dtype == master.dtype else master.to(own.dtype)
        if torch.equal(own, then):
            return False
        if own.dtype == master.dtype:
            master.copy_(own)
        else:  # elements that nobody wrote to keep what the compute dtype cannot hold
            master.copy_(torch.where(own == then, master, own.to(master.dtype)))
        return True

    @property
    def copies(self) -> bool:
        flat = self.flat
        return not flat.resident or flat.dtypes.compute != flat.dtypes.master

    def put(self, full: torch.Tensor) -> None:
        # Else the masters are that interval of the whole
        if storage_of(self.master) != storage_of(full):
            full[slice(*self.flat.owned)].copy_(self.master)


class InPlaceStorage(DeviceStorage):
    """One rank, one dtype: the parameters stay the tensors that they are, in no buffer."""

    def build(self, device: torch.device) -> torch.Tensor:
        raise AssertionError("there is nothing to lay out")

    def resting_bytes(self) -> dict[Tier, dict[str, int]]:
        return {Tier.DEVICE: {PARAMETERS: sum(nbytes_of(e.param) for e in self.flat.entries)}}


def state_shape(entry: Entry, key: str) -> tuple[int, ...]:
    """The shape of what this rank holds of the state `key`."""
    shape: tuple[int, ...] = tuple(entry.param.shape)
    return shape if packed(key) is None else (-(-entry.param.numel() // grain_of(key)),)


def refuse_written(written: list[Entry]) -> None:
    """Raise RuntimeError if any parameter was written to in a forward pass, where the change would
    be lost.
    """
    if written:
        raise RuntimeError(
            f"parameter {written[0].slot.name!r} was written to in the forward pass, and it is stored"
            " off the device or travels encoded, so that the change would be lost. Write to it after"
            " optimizer.step(), under torch.no_grad()."
        )
