"""Offload an engine's activations to the host, where the recipe has a budget for them.

The hooks are installed during a forward pass over the model, below the gatherer's hooks. The
gatherer has already replaced tensors in gathered buffers by handles; the remaining tensors arrive
here. During a backward pass, recomputations included, nothing goes down. Parameters and buffers
stay on the device, where they are resident anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onefold.memory import storage_of
from onefold.offload.activations import ActivationStore
from onefold.runtime.resources import Activations

if TYPE_CHECKING:
    from onefold.runtime.engine import Engine


class HostActivations(Activations):
    """Offloads the activations of an engine's passes, as the engine announces them."""

    def __init__(self, engine: Engine) -> None:
        gathered = engine.gather.by_storage  # what holds gathered parameters at the moment
        self._units, self._model = engine.units, engine.units[0].module
        self._passes = 0
        self._there: set[int] = set()  # storages that are resident anyway
        there, transfers = self._there, engine.transfers

        def skip(t: torch.Tensor) -> bool:
            storage = storage_of(t)
            return storage in there or storage in gathered

        budget = engine.recipe.offload_activations
        assert budget is not None
        self.store = ActivationStore(
            engine.device,
            budget,
            skip=skip,
            ledger=engine.memory,
            host=transfers.host,
            moved=lambda move, nbytes: transfers.entered(move, "activations", nbytes),
        )

    def begin_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        self._look()
        self.store.begin_forward()
        self.hooks = self.store.hooks()
        if self.hooks is not None:
            self.hooks.__enter__()

    def end_forward(self) -> None:
        hooks, self.hooks = self.hooks, None
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def end_backward(self) -> None:
        self.store.end_backward()

    def close(self) -> None:
        """Take no more tensors. Graphs that are alive keep theirs."""
        self.store.close()

    def _look(self) -> None:
        """Record the storages of parameters and buffers. Those that the engine did not allocate are
        looked up in the first two passes only.
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
