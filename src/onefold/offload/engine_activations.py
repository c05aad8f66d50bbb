"""Activations of an engine's passes on the host, where the recipe gives bytes for them.

Hooks are in place while a pass over the model runs forward, below the gatherer's: what lies in
gathered buffers is a handle already when the rest comes by here. In a backward pass, recomputations
included, nothing new goes down. Parameters and buffers stay, since they would be there all the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from onefold.memory import storage_of
from onefold.offload.activations import ActivationStore

if TYPE_CHECKING:
    from onefold.runtime.flat import Flat
    from onefold.runtime.progress import Resources
    from onefold.runtime.unit import Unit


class HostActivations:
    """What an engine tells of its passes. `store` is None where the recipe keeps activations on the
    device: then nothing happens.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resources: Resources,
        gathered: Mapping[int, tuple[Unit, Flat]],
    ) -> None:
        """`gathered`: the buffers that hold whole parameters at the time, by their storage."""
        self._units, self._model = units, units[0].module
        self._hooks: saved_tensors_hooks | None = None
        self._passes = 0
        self._there: set[int] = set()  # storages that exist whatever is saved of them
        there, transfers = self._there, resources.transfers

        def skip(t: torch.Tensor) -> bool:
            storage = storage_of(t)
            return storage in there or storage in gathered

        budget = resources.recipe.offload_activations
        self.store = (
            ActivationStore(
                resources.device,
                budget,
                skip=skip,
                ledger=resources.memory,
                host=transfers.host,
                moved=lambda move, nbytes: transfers.entered(move, "activations", nbytes),
            )
            if budget is not None
            else None
        )

    def begin_forward(self) -> None:
        if self.store is None or not torch.is_grad_enabled():
            return
        self._look()
        self.store.begin_forward()
        self._hooks = self.store.hooks()
        if self._hooks is not None:
            self._hooks.__enter__()

    def end_forward(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def end_backward(self) -> None:
        if self.store is not None:
            self.store.end_backward()

    def close(self) -> None:
        """Graphs that are alive keep what they need."""
        if self.store is not None:
            self.store.close()

    def _look(self) -> None:
        """See where parameters and buffers lie. Those that the engine has not laid out itself are
        looked at in the first passes only.
        """
        flats = [flat for unit in self._units for flat in unit.flats]
        self._there.update(
            storage_of(flat.full) for flat in flats if flat.full is not None and flat.resident
        )
        if self._passes >= 2:
            return
        self._passes += 1
        model = self._model()
        buffers = list(model.buffers()) if model is not None else []
        own = [entry.param for flat in flats if flat.unsharded for entry in flat.entries]
        self._there.update(storage_of(t) for t in (*buffers, *own) if not t.is_meta)
