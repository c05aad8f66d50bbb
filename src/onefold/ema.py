"""Averages of a sharded model's weights (EMA, SWA). Each rank holds its share of them.

    ema = onefold.ema.EMA(model, decay=0.999)
    for batch in loader:
        ...
        optimizer.step(); ema.update()
    with ema.applied():            # the model computes with the averages
        evaluate(model)

| property          | value                                                                                    |
|-------------------|------------------------------------------------------------------------------------------|
| elements          | this rank's interval of the master weights: 1/N at every stage, stage 0 too              |
| tier              | that of the master weights                                                               |
| dtype             | that of the master weights; fp32 if these have 16 bits                                   |
| parameters        | those that are trainable when the `EMA` is made                                          |
| other parameters  | not averaged: the model's own values                                                     |
| buffers           | not averaged: the model's own values                                                     |

An update is the same as in torch's `AveragedModel`. The first update copies the weights, each later
one is `average.lerp_(weight, 1 - decay)`. Updates need no communication, and give the same bits at
every stage. `applied()` swaps masters and averages; the model then gathers as usual.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold.layout import overlap
from onefold.memory import nbytes_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.gather_paths import state_context
from onefold.runtime.hooks import engine_of
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import (
    HeldParts,
    MasterParts,
    StateItem,
    from_first,
    master_items,
    tell_all,
)
from onefold.runtime.state.dicts import whole_state_dict
from onefold.runtime.storage import OnDisk, put_row
from onefold.runtime.unit import Unit

#: The category of the averages in memory ledgers.
AVERAGES = "averages"
_STATE_DICT, _LOAD, _APPLIED = "EMA.state_dict()", "EMA.load_state_dict()", "EMA.applied()"


@dataclass
class _Share:
    """The averages of one flat buffer.

    Attributes:
        values: the average of this rank's interval, or of each parameter if the flat buffer is
            unsharded.
        aside: the masters while averages of another dtype are applied.
    """

    _flat: weakref.ref[Flat]  # weak: an average must not keep the model alive
    values: list[torch.Tensor | OnDisk]
    aside: torch.Tensor | None = None

    @classmethod
    def of(cls, flat: Flat, name: str) -> _Share:
        dtype = _dtype(flat)
        if flat.unsharded:
            bare = [
                torch.empty_like(e.param, dtype=dtype, requires_grad=False) for e in flat.entries
            ]
            return cls(weakref.ref(flat), [*bare])
        return cls(weakref.ref(flat), [flat.storage.beside_masters(name, dtype)])

    @property
    def flat(self) -> Flat:
        flat = self._flat()
        assert flat is not None, "the engine holds it"
        return flat

    @property
    def in_memory(self) -> list[torch.Tensor]:
        return [value for value in self.values if isinstance(value, torch.Tensor)]

    @property
    def on_disk(self) -> list[OnDisk]:
        return [value for value in self.values if isinstance(value, OnDisk)]

    def masters(self) -> list[torch.Tensor]:
        """Return the masters of `in_memory`, in the same order."""
        if self.flat.unsharded:
            return [e.param.detach() for e in self.flat.entries]
        return [self.flat.master[self.flat.own_interval]] if self.in_memory else []

    def place(self, entry: Entry, x: int, y: int) -> torch.Tensor | OnDisk:
        """Return where the average of elements [x, y) of `entry` is. This rank must hold them."""
        value, at = self._of(entry)
        if isinstance(value, OnDisk):
            return replace(value, start=value.start + at + x, stop=value.start + at + y)
        return value.reshape(-1)[at + x : at + y]

    def write(self, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        into, at = self._of(entry)
        if isinstance(into, OnDisk):
            into.write(at + x, values)
        else:
            put_row(into, slice(at + x, at + y), values)

    def _of(self, entry: Entry) -> tuple[torch.Tensor | OnDisk, int]:
        """Return the tensor or region with the average of `entry`, and the position of the entry's
        element 0 in it.
        """
        if self.flat.unsharded:
            return self.values[entry.index], 0
        return self.values[0], entry.slot.start - self.flat.interval[0]

    def change(self, masters: torch.Tensor, average: torch.Tensor | OnDisk) -> None:
        """Swap masters and average."""
        if isinstance(average, OnDisk):
            values = average.read()
            self.change(masters, values)
            average.write(0, values)
        elif masters.dtype == average.dtype:
            before = masters.clone()
            masters.copy_(average)
            average.copy_(before)
        elif self.aside is None:  # the masters have 16 bits: the fp32 average stays as it is
            self.aside = masters.to(average.device, copy=True)
            masters.copy_(average)
        else:
            masters.copy_(self.aside)
            self.aside = None


class AverageParts(HeldParts):
    """The averages as parts: this rank holds its interval only, at every stage.

    Args:
        shares: those of the flat buffers that are averaged, by index. The others have their masters.
        swapped: `EMA.applied` has swapped masters and averages.
    """

    def __init__(self, shares: Mapping[int, _Share], swapped: bool) -> None:
        self._shares, self._swapped, self._masters = shares, swapped, MasterParts()

    def held(self, entry: Entry, position: int | None = None) -> tuple[int, int]:
        averaged = entry.flat.index in self._shares
        return entry.accounted(position) if averaged else entry.owned(position)

    def place(self, entry: Entry, key: str, x: int, y: int) -> torch.Tensor | OnDisk:
        share = self._average(entry)
        return self._masters.place(entry, key, x, y) if share is None else share.place(entry, x, y)

    def read(self, item: StateItem, entry: Entry, x: int, y: int) -> torch.Tensor:
        if self._average(entry) is None:
            return self._masters.read(item, entry, x, y)
        return super().read(item, entry, x, y)

    def write(self, item: StateItem, entry: Entry, x: int, y: int, values: torch.Tensor) -> None:
        self._shares[entry.flat.index].write(entry, x, y, values)

    def _average(self, entry: Entry) -> _Share | None:
        """Return the share with the average of `entry`; None if its masters have the values."""
        share = self._shares.get(entry.flat.index)
        return None if share is None or (self._swapped and share.aside is None) else share


def _dtype(flat: Flat) -> torch.dtype:
    return torch.promote_types(flat.dtypes.master, torch.float32)


class EMA:
    """The exponential moving average of a sharded model's weights. Create and update it on every
    rank. Each rank holds the averages of its own elements: 1/N of the trainable weights.

    Args:
        model: the model that `onefold.shard` returned.
        decay: decay of the average, 0 <= decay < 1; None gives each update the same weight (SWA).

    Attributes:
        updates: number of updates. Before the first the average is a copy of the weights.

    Raises:
        ValueError: `model` was not sharded, or `decay` is out of range.
    """

    def __init__(self, model: nn.Module, decay: float | None = 0.999) -> None:
        if decay is not None and not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ValueError(
                f"decay={decay!r}: expected a number from 0 up to 1, such as 0.999, or None to"
                " weigh all updates alike."
            )
        engine = engine_of(model)
        self.decay, self.updates = decay, 0
        self._model, self._inside = weakref.ref(model), False
        self._shares: dict[int, _Share] = {}
        held: dict[str, int] = {}
        with disable_torch_function(), torch.no_grad():
            for unit, flat in _flats(engine):
                if not flat.storage.encoded and any(e.param.requires_grad for e in flat.entries):
                    share = _Share.of(flat, f"average {id(self)}")
                    self._shares[flat.index] = share
                    held[unit.name] = held.get(unit.name, 0) + sum(map(nbytes_of, share.in_memory))
            self._follow(engine, copy=True)
        for name, nbytes in held.items():
            ledger = engine.memory if engine.device == self._device() else engine.transfers.host
            ledger.add(AVERAGES, nbytes, name)
            weakref.finalize(self, ledger.add, AVERAGES, -nbytes, name).atexit = False

    def update(self) -> None:
        """Add the current weights to the average. Call it after each optimizer step. Local.

        Raises:
            RuntimeError: the averages are applied.
        """
        if self._inside:
            raise RuntimeError(
                "EMA.update() was called inside ema.applied(), where the model's weights are the"
                " averages: leave it first."
            )
        with disable_torch_function(), torch.no_grad():
            self._follow(self._engine(), copy=self.updates == 0)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Use the averages as the model's weights inside this context. Collective.

        For evaluation, export, or `onefold.full_state_dict(model)`. An optimizer step or a load
        inside is an error.
        """
        model, engine = self._module(), self._engine()
        if engine.stack or engine.full_params_depth or self._inside:
            outer = "onefold.full_params" if engine.full_params_depth else "itself"
            where = "a forward pass" if engine.stack else outer
            raise RuntimeError(f"EMA.applied() was entered inside {where}: enter it outside.")
        tell_all(engine.resources, _APPLIED, None)
        engine.masters.about_to_write()
        self._exchange(engine)
        self._inside, engine.masters.copying = True, self._refuse
        try:
            yield model
        finally:
            self._inside, copying, engine.masters.copying = False, engine.masters.copying, None
            if copying is not None and copying != self._refuse:
                copying()  # wait for a background save, which copies the averages
            self._exchange(engine)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole averages on rank 0's host, with the keys of
        `AveragedModel.state_dict()`; {} on other ranks. Collective.
        """
        model, engine = self._module(), self._engine()
        tell_all(engine.resources, _STATE_DICT, None)
        parts = AverageParts(self._shares, self._inside)
        found = whole_state_dict(engine, model, parts, self._items(engine.entries))
        if engine.rank != 0:
            return {}
        return {"n_averaged": torch.tensor(self.updates, device="cpu")} | {
            f"module.{name}": value for name, value in found.items()
        }

    def _items(self, entries: Iterable[Entry]) -> list[StateItem]:
        """Return the items of `state_dict`: averages, and masters where there are none."""
        items = master_items(entries)
        averaged = [item.entries[0].flat.index in self._shares for item in items]
        return [
            replace(item, dtype=_dtype(item.entries[0].flat)) if yes else item
            for item, yes in zip(items, averaged, strict=True)
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Load a whole dict of `state_dict()` or of torch's `AveragedModel`. Collective.

        Rank 0's dict counts; other ranks may give None. Buffers and frozen parameters of the model
        do not change.

        Raises:
            ValueError: on every rank, if the dict is not of this model.
        """
        engine = self._engine()
        if self._inside:
            raise RuntimeError(
                "EMA.load_state_dict() was called inside ema.applied(): leave it first."
            )
        verdict = self._look(engine, state_dict) if engine.rank == 0 else None
        complaint, updates = tell_all(engine.resources, _LOAD, verdict)[0]
        if complaint:
            raise ValueError(f"{_LOAD}: {complaint}")
        parts = AverageParts(self._shares, swapped=False)
        averaged = [e for e in engine.entries if e.flat.index in self._shares]
        with disable_torch_function(), torch.no_grad():
            for item in self._items(averaged):
                whole = _find(state_dict or {}, item.entries[0]) if engine.rank == 0 else None
                from_first(engine.resources, parts, item, whole)
            if any(share.on_disk for share in self._shares.values()):
                engine.transfers.flush()
        self.updates = updates

    # -- one flat buffer ---------------------------------------------------------------------------

    def _follow(self, engine: Engine, copy: bool) -> None:
        weight = 1 - self.decay if self.decay is not None else 1 / (self.updates + 1)
        averages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for _, flat in _flats(engine):
            if (share := self._shares.get(flat.index)) is None:
                continue
            for on_disk in share.on_disk:
                self._follow_on_disk(on_disk, copy, weight)
            now = share.masters()
            for average, value in zip(share.in_memory, now, strict=True):
                if copy:
                    average.copy_(value)
                elif value.dtype == average.dtype:
                    averages.append(average)
                    weights.append(value)
                else:
                    average.lerp_(value.to(average.dtype), weight)
        if averages:
            for kind in {(t.device, t.dtype) for t in averages}:
                same = [i for i, t in enumerate(averages) if (t.device, t.dtype) == kind]
                ends = [weights[i] for i in same]
                torch._foreach_lerp_([averages[i] for i in same], ends, weight)
        if any(share.on_disk for share in self._shares.values()):
            engine.transfers.flush()

    @staticmethod
    def _follow_on_disk(average: OnDisk, copy: bool, weight: float) -> None:
        masters = replace(average, kind="master")
        for chunk in average.storage.chunks():
            a, b = overlap((average.start, average.stop), chunk)
            if a < b:
                a, b = a - average.start, b - average.start
                value = masters.read(a, b).to(average.dtype)
                average.write(a, value if copy else average.read(a, b).lerp_(value, weight))

    # -- swapping masters and averages -------------------------------------------------------------

    def _exchange(self, engine: Engine) -> None:
        """Swap masters and averages. Collective if ranks share masters."""
        with disable_torch_function(), torch.no_grad():
            for unit, flat in _flats(engine):
                if (share := self._shares.get(flat.index)) is None:
                    continue
                if flat.unsharded:
                    for entry, average in zip(flat.entries, share.values, strict=True):
                        share.change(entry.param.data, average)
                        torch.autograd.graph.increment_version(entry.param)
                    continue
                parts = MasterParts()
                masters = parts.values(flat, engine.device)
                share.change(masters[flat.own_interval], share.values[0])
                if flat.shared:
                    context = state_context(engine.resources, unit.name)
                    flat.holders.all_gather(masters, context, flat.index, move="state").wait()
                parts.finish()
            if any(share.on_disk for share in self._shares.values()):
                engine.transfers.flush()
            engine.make_stale()

    def _refuse(self) -> None:
        engine = self._engine()
        engine.masters.copying = self._refuse
        raise RuntimeError(
            "the model's weights were to be written to (by an optimizer step, a load or"
            " full_params(write=True)) inside ema.applied(), where they are the averages: leave it"
            " first."
        )

    # -- other -------------------------------------------------------------------------------------

    def _module(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this EMA is gone.")
        return model

    def _engine(self) -> Engine:
        return engine_of(self._module())

    def _device(self) -> torch.device | None:
        return next((t.device for share in self._shares.values() for t in share.in_memory), None)

    def _look(self, engine: Engine, state: Mapping[str, Any] | None) -> tuple[str | None, int]:
        """Return what is wrong with rank 0's dict (or None), and its number of updates."""
        if not isinstance(state, Mapping) or "n_averaged" not in state:
            complaint = (
                "rank 0 was given no state of an average; expected what EMA.state_dict() or"
                " torch's AveragedModel.state_dict() returned (n_averaged, module.<name>, ...)."
            )
            return complaint, 0
        for entry in (e for share in self._shares.values() for e in share.flat.entries):
            found = _find(state, entry)
            if found is None:
                return f"'module.{entry.part.names[0]}' is missing: it is of another model.", 0
            if tuple(found.shape) != tuple(entry.shape):
                shapes = f"{tuple(found.shape)}, expected {tuple(entry.shape)}"
                return f"'module.{entry.part.names[0]}' has shape {shapes}.", 0
        return None, int(state["n_averaged"])


def _find(state: Mapping[str, Any], entry: Entry) -> Any:
    return next(
        (state[f"module.{name}"] for name in entry.part.names if f"module.{name}" in state), None
    )


def _flats(engine: Engine) -> list[tuple[Unit, Flat]]:
    return [(unit, flat) for unit in engine.units for flat in unit.flats]
