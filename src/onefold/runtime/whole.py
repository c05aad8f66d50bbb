"""Whole flat buffers on every rank, outside a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.comm import CollectiveContext
from onefold.runtime.parameters.interval import disable_torch_function

if TYPE_CHECKING:
    from onefold.runtime.entry import Entry
    from onefold.runtime.flat import Flat
    from onefold.runtime.progress import Resources


def state_context(resources: Resources, unit_name: str) -> CollectiveContext:
    """Return what errors and the ledger say of a collective over parameters or states of a unit."""
    return CollectiveContext("state", unit_name, resources.progress.step, "state")


def new_masters(flat: Flat, device: torch.device) -> torch.Tensor:
    """Return all masters of this rank, [owned], with their present values. The caller changes some
    of them and gives the tensor to `flat.storage.store`.
    """
    masters = flat.storage.landing(device)
    return masters if masters is flat.master else masters.copy_(flat.storage.load())


def put_elements(masters: torch.Tensor, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
    """Copy `values` into elements [x, y) of `entry` in this rank's `masters`, [owned]."""
    at = entry.slot.start - entry.flat.owned[0]
    masters[at + x : at + y].copy_(values)


def gather_whole(resources: Resources, flat: Flat, full: torch.Tensor) -> torch.Tensor:
    """Fill `full`, [numel], with the masters of all ranks; this rank's, [owned], are in place.
    Collective.
    """
    owners, context = flat.owners_group, state_context(resources, flat.unit_name)
    owners.all_gather(full, context, flat.index, move="state").wait()
    return full


def whole_masters(resources: Resources, flat: Flat) -> torch.Tensor:
    """Return a new buffer, [numel], with the masters of all ranks. Collective."""
    full = torch.empty(flat.layout.numel, dtype=flat.dtypes.master, device=resources.device)
    with disable_torch_function(), torch.no_grad():
        if flat.whole_master:
            return full.copy_(flat.storage.load())
        full[flat.owned[0] : flat.owned[1]].copy_(flat.storage.load())
        return gather_whole(resources, flat, full)
