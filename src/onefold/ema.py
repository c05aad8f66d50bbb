"""Averages of a sharded model's weights (EMA, SWA): ordinary code over this rank's elements.

    ema = onefold.ema.EMA(model, decay=0.999)
    for batch in loader:
        ...
        optimizer.step(); ema.update()
    with ema.applied():            # the model computes with the averages
        evaluate(model)

| property          | value                                                                           |
|-------------------|---------------------------------------------------------------------------------|
| elements          | those that this rank's optimizer steps: 1/N at stages 1 to 3, all at stage 0     |
| tier              | that of the master weights: the device or the host                               |
| dtype             | that of the master weights; fp32 if these have 16 bits                           |
| parameters        | those that are trainable when the `EMA` is made                                  |
| other parameters  | not averaged: the model's own values                                             |
| buffers           | not averaged: the model's own values                                             |

An update is the same as in torch's `AveragedModel`. The first update copies the weights, each later
one is `average.lerp_(weight, 1 - decay)`. Updates need no communication, and give the same bits at
every stage. `applied()` puts the averages in the masters' place; the model then gathers as usual.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.memory import nbytes_of
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.interval import disable_torch_function, local_part
from onefold.runtime.parts import (
    MasterParts,
    StateItem,
    from_first,
    master_items,
    said_by_first,
    tell_all,
)
from onefold.runtime.state.dicts import take, whole_state_dict

#: The category of the averages in memory ledgers.
AVERAGES = "averages"
_STATE_DICT, _LOAD, _APPLIED = "EMA.state_dict()", "EMA.load_state_dict()", "EMA.applied()"


class AverageParts(MasterParts):
    """The averages as parts, and the masters of parameters that have none."""

    def __init__(self, averages: Mapping[Entry, torch.Tensor]) -> None:
        super().__init__()
        self._averages = averages

    def here(self, entry: Entry, x: int, y: int) -> torch.Tensor | None:
        if entry not in self._averages:
            return super().here(entry, x, y)
        first = entry.owned()[0]
        return self._averages[entry].view(-1)[x - first : y - first]


class EMA:
    """The exponential moving average of a sharded model's weights. Create and update it on every
    rank. Each rank holds the averages of the elements that its optimizer steps.

    Args:
        model: the model that `onefold.shard` returned.
        decay: decay of the average, 0 <= decay < 1; None gives each update the same weight (SWA).

    Attributes:
        updates: number of updates. Before the first the average is a copy of the weights.

    Raises:
        ValueError: `model` was not sharded, `decay` is out of range, or master weights are on NVMe.
    """

    def __init__(self, model: nn.Module, decay: float | None = 0.999) -> None:
        if decay is not None and not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ValueError(
                f"decay={decay!r}: expected a number from 0 up to 1, such as 0.999, or None to"
                " weigh all updates alike."
            )
        engine = engine_of(model)
        self.decay, self.updates = decay, 0
        self._model, self._engine, self._inside = model, engine, False
        trained = [e for e in engine.entries if e.param.requires_grad and not e.flat.spec.stored]
        if away := next((e for e in trained if e.flat.storage.on_disk), None):
            raise ValueError(
                f"the master weights of {away.name!r} are on NVMe, and averages are kept in"
                " memory: to average weights, give shard() offload_optimizer='cpu' or None."
            )
        with disable_torch_function(), torch.no_grad():
            # Contiguous: their elements are read and written by their number in the parameter
            self._averages = {
                e: _wide(e).clone(memory_format=torch.contiguous_format) for e in trained
            }
        for entry, average in self._averages.items():
            here, nbytes = average.device == engine.device, nbytes_of(average)
            ledger, unit = engine.memory if here else engine.transfers.host, entry.flat.unit_name
            ledger.add(AVERAGES, nbytes, unit)
            weakref.finalize(self, ledger.add, AVERAGES, -nbytes, unit).atexit = False

    def update(self) -> None:
        """Add the current weights to the average. Call it after each optimizer step. Local.

        Raises:
            RuntimeError: the averages are applied.
        """
        self._refuse_inside("update")
        weight = 1 - self.decay if self.decay is not None else 1 / (self.updates + 1)
        with disable_torch_function(), torch.no_grad():
            averages, weights = list(self._averages.values()), [_wide(e) for e in self._averages]
            # The host's and the device's averages in one call, of which torch wants at least one
            if averages and self.updates:
                torch._foreach_lerp_(averages, weights, weight)
            elif averages:
                torch._foreach_copy_(averages, weights)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Use the averages as the model's weights inside this context. Collective. It takes the
        memory of the masters once more.

        For evaluation, export, or `onefold.full_state_dict(model)`. An optimizer step or a load
        inside is an error.
        """
        self._refuse_inside("applied")
        engine = self._engine
        engine.check_moment("EMA.applied")
        tell_all(engine, _APPLIED, None)
        engine.about_to_write()
        with disable_torch_function(), torch.no_grad():
            before = {e: local_part(e.param).clone() for e in self._averages}
        try:
            self._put(self._averages)
            self._inside, engine.refusing = True, self._refuse_writes
            yield self._model
        finally:
            self._inside, engine.refusing = False, None
            engine.about_to_write()  # wait for gathers and saves that read the averages
            self._put(before)

    def _put(self, values: Mapping[Entry, torch.Tensor]) -> None:
        """Put values in the masters' place."""
        with disable_torch_function(), torch.no_grad():
            for entry, value in values.items():
                local_part(entry.param).copy_(value)
        self._engine.make_stale()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole averages on rank 0's host, with the keys of
        `AveragedModel.state_dict()`; {} on other ranks. Collective.
        """
        tell_all(self._engine, _STATE_DICT, None)
        parts, items = AverageParts(self._averages), self._items()
        found = whole_state_dict(self._engine, self._model, parts, items)
        if self._engine.rank != 0:
            return {}
        out = OrderedDict[str, Any](n_averaged=torch.tensor(self.updates, device="cpu"))
        out.update({f"module.{name}": value for name, value in found.items()})
        versions: Any = getattr(found, "_metadata", {})
        out._metadata = {f"module.{path}".rstrip("."): v for path, v in versions.items()}  # type: ignore[attr-defined]
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load a whole dict of `state_dict()` or of torch's `AveragedModel`. Collective.

        Rank 0's dict counts; other ranks may give None. Buffers and frozen parameters of the model
        do not change.

        Raises:
            ValueError: on every rank, if the dict is not of this model.
        """
        self._refuse_inside("load_state_dict")
        engine, given = self._engine, dict[str, torch.Tensor]()
        updates = said_by_first(engine, _LOAD, partial(self._look, state_dict, given))
        parts = AverageParts(self._averages)
        with disable_torch_function(), torch.no_grad():
            for item in self._items():
                if item.entry in self._averages:
                    from_first(engine, parts, item, given.get(item.name))
        self.updates = updates

    def _items(self) -> list[StateItem]:
        """Return the items of `state_dict`: averages, and masters where there are none."""
        return [
            replace(item, dtype=average.dtype)
            if (average := self._averages.get(item.entry)) is not None
            else item
            for item in master_items(self._engine.entries)
        ]

    def _look(self, state: Mapping[str, Any] | None, given: dict[str, torch.Tensor]) -> int:
        """Return the number of updates of rank 0's dict, and put its averages into `given`.

        Raises:
            ValueError: what is wrong with it.
        """
        if not isinstance(state, Mapping) or "n_averaged" not in state:
            raise ValueError(
                "rank 0 was given no state of an average; expected what EMA.state_dict() or"
                " torch's AveragedModel.state_dict() returned (n_averaged, module.<name>, ...)."
            )
        plain = {n.removeprefix("module."): v for n, v in state.items() if n.startswith("module.")}
        dressed, versions = OrderedDict(plain), getattr(state, "_metadata", {}).items()
        dressed._metadata = {  # type: ignore[attr-defined]
            path.removeprefix("module").removeprefix("."): version
            for path, version in versions
            if path
        }
        take(self._engine, self._model, dressed, False, given, buffers=False)
        if lost := [entry.name for entry in self._averages if entry.name not in given]:
            raise ValueError(f"'module.{lost[0]}' is missing.")
        return int(state["n_averaged"])

    def _refuse_inside(self, call: str) -> None:
        if self._inside:
            raise RuntimeError(
                f"EMA.{call}() was called inside ema.applied(), where the model's weights are the"
                " averages: leave it first."
            )

    def _refuse_writes(self) -> None:
        raise RuntimeError(
            "the model's weights were to be written to (by an optimizer step, a load or"
            " full_params(write=True)) inside ema.applied(), where they are the averages: leave it"
            " first."
        )


def _wide(entry: Entry) -> torch.Tensor:
    """Return this rank's masters of a parameter, in at least 32 bits."""
    masters = local_part(entry.param)
    return masters.to(torch.promote_types(masters.dtype, torch.float32))
