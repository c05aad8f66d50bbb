"""Where a shard is stored between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.layout import LOW
from onefold.memory import storage_of
from onefold.recipe import Tier
from onefold.recipe.moments import grain_of, items_of, packed

if TYPE_CHECKING:
    from onefold.runtime.flat import Entry, Flat


# Where this rank's shard of a flat buffer is stored between steps. `shard()` chooses one `Storage`
# for each flat buffer; the engine and its parts call the same methods on all of them.
#
# | class            | file                     | masters are stored                      | readable in place |
# |------------------|--------------------------|-----------------------------------------|-------------------|
# | `Storage`        | here                     | on the device, or where they were       | yes               |
# | `HostStorage`    | offload/storage.py       | in host memory                          | yes               |
# | `NvmeStorage`    | offload/storage.py  | in files on a disk                      | no                |
# | `EncodedStorage` | quant/encoded.py         | on the device, encoded (frozen weights) | no                |
#
#     build ─► store ─► ( put ─► gather ... backward ─► accept ─► take_gradient ─► step ─► renew )*
#
# Elements are counted from the first that this rank owns. "[owned]" is the shape of a tensor of all
# the elements that it owns.


class Storage:
    """What the engine asks of the place where a shard is stored. Here masters are on the device: a
    buffer of their own, or an interval of the resident whole if that has their dtype; in no buffer
    at all where one rank has nothing to divide or cast.

    Attributes:
        flat: the flat buffer. numel: the number of elements that this rank owns.
        offloaded: an optimizer step is done on the host, unit by unit (offload/step.py).
        in_place: masters are tensors that can be read and written where they are stored.
        on_disk: masters and states are in files. gradients_on_disk: gradients too.
        gradient_tier: of the reduced gradients that are in memory.
        measures_gradients: norms of gradients come from `gradient_norm`.
    """

    offloaded: bool = False
    in_place: bool = True
    on_disk: bool = False
    gradients_on_disk: bool = False
    measures_gradients: bool = False
    gradient_tier: Tier = Tier.DEVICE

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.numel = flat.spec.own

    # -- building ----------------------------------------------------------------------------------

    def build(self, device: torch.device) -> torch.Tensor:
        """Take memory. Returns the tensor [owned] whose views the optimizer's parameters become. If
        masters are not `in_place`, that has no memory once they are.
        """
        flat = self.flat
        if flat.full is not None and flat.spec.shares_memory:
            return flat.full[slice(*flat.owned)]
        return torch.empty(self.numel, dtype=flat.dtypes.master, device=device)

    # -- masters -----------------------------------------------------------------------------------

    def decoded(self) -> torch.Tensor | None:
        """Return a copy of all masters, [owned], if they are stored encoded."""
        return None

    def store(self, values: torch.Tensor) -> None:
        """Store new values for all masters, [owned], which may be the masters themselves, and are
        here.
        """
        assert values is self.flat.master

    def renew(self) -> None:
        """Bring what gathers read up to date: masters were written to in their place."""

    def refuse_training(self, entry: Entry) -> None:
        """Raise ValueError if `entry`, frozen until now, cannot be trained from here on."""
        spec, dtype = self.flat.spec, self.flat.dtypes.master
        if dtype in LOW and dtype != spec.recipe.optimizer.dtype:
            raise ValueError(
                f"parameter {entry.slot.name!r} was frozen when the model was sharded, so it is stored"
                f" in {dtype} without fp32 master weights, and cannot be trained"
                " now. Set it free between onefold.unshard(model) and a new shard(). Or leave"
                " requires_grad=True while calling shard() and freeze it afterwards, or use"
                " precision='fp32'."
            )

    def keep_written(self, own: torch.Tensor) -> None:
        """Make `own`, [owned] in the compute dtype, the masters' values: a module has written to
        its parameters in a forward pass. Only for masters on the device.
        """
        master = self.flat.master
        if storage_of(own) == storage_of(master):
            return  # the masters are a view of the whole
        # Elements that nobody wrote to keep the bits that the compute dtype cannot hold
        same = own == master.to(own.dtype)
        master.copy_(torch.where(same, master, own.to(master.dtype)))

    # -- elements of masters and states ------------------------------------------------------------

    def read(self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int) -> torch.Tensor:
        """Return elements [x, y) of `entry`, counted from its first, or the items of a state that
        stand for them: a view of `value`, or new host memory if they are on a disk. This rank must
        hold them.

        Args:
            key: of the optimizer's state; "" for the masters.
            value: the optimizer's parameter, or its state.
        """
        return value.detach().reshape(-1)[_items(entry, key, x, y)]

    def write(
        self, entry: Entry, key: str, value: torch.Tensor, x: int, y: int, new: torch.Tensor
    ) -> None:
        """Overwrite elements [x, y) by `new`, [y - x] or one for each item that stands for them.
        See `read`.
        """
        row = value.detach().reshape(-1)
        row[_items(entry, key, x, y)].copy_(new)
        if not value.is_contiguous():  # `row` is a copy
            value.detach().copy_(row.view(value.shape))

    def new_state(
        self, entry: Entry, key: str, dtype: torch.dtype, in_memory: bool
    ) -> torch.Tensor:
        """Return a state of zeros for the elements of `entry` that this rank holds. `in_memory`: in
        memory even if other states are stored on disk.
        """
        return torch.zeros(state_shape(entry, key), dtype=dtype, device=entry.param.device)

    # -- gathers -----------------------------------------------------------------------------------

    def put(self, full: torch.Tensor) -> None:
        """Copy this rank's masters into their place in the whole, in the compute dtype, on the
        current stream.

        Raises:
            TierError: they could not be read.
        """
        # Otherwise the masters are a view of the whole
        if storage_of(self.flat.master) != storage_of(full):
            full[slice(*self.flat.owned)].copy_(self.flat.master)

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

    def take_gradient(self, total: torch.Tensor, wanted: list[Entry]) -> None:
        """Add sums, [owned], to the gradients on disk, for the entries `wanted`.

        Raises:
            TierError: they could not be written.
        """
        raise NotImplementedError  # only a storage with `gradients_on_disk` has some

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


def _items(entry: Entry, key: str, x: int, y: int) -> slice:
    """Return where elements [x, y) are in what this rank holds of a master or a state."""
    first, _ = entry.owned()
    return slice(*items_of(x - first, y - first, grain_of(key)))


def state_shape(entry: Entry, key: str) -> tuple[int, ...]:
    """Return the shape of what this rank holds of the state `key`."""
    shape: tuple[int, ...] = tuple(entry.param.shape)
    return shape if packed(key) is None else (-(-entry.param.numel() // grain_of(key)),)
