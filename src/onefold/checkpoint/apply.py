"""Load a source into a sharded model and its optimizers. Each rank reads only the elements that it
will own.

    divided     (stages 1 to 3)   rank r reads its interval straight into its master
    replicated  (stage 0)         rank r reads interval r, then the ranks all-gather: one rank reads each byte

A rank whose read fails still joins every later collective, so no other rank waits forever. All
ranks raise at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.progress import moved
from onefold.checkpoint.source import Item, Source
from onefold.checkpoint.tensorfile import numel_of
from onefold.checkpoint.together import Together
from onefold.checkpoint.values import fits, is_number, short
from onefold.checkpoint.views import Local, Recoded
from onefold.comm import Group
from onefold.optim.states import OptimizerParts, meet, placed, show_states
from onefold.optim.verdict import fresh_state
from onefold.optim.whole import StateElsewhere
from onefold.quant.moments import moment_policy
from onefold.recipe.moments import FORMATS, SIGNED, Format, grain_of, items_of, packed
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts
from onefold.runtime.state.dicts import beside_parameters
from onefold.runtime.storage import OnDisk

#: Elements read at a time when the destination cannot be read into directly.
BUFFER = 4 << 20
#: Options of a parameter group that choose an implementation only. A load does not change them.
LOCAL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


@dataclass
class Wanted:
    """A state in the source and its destination. `into`: this rank's elements of it, flattened."""

    entry: Entry
    item: Item
    into: torch.Tensor | OnDisk


@dataclass(frozen=True)
class ModelFit:
    """The names that a source and a model have in common, and those that they do not.

    Attributes:
        found: the source's item for each parameter, by the parameter's first name.
        buffers: the model's buffers that the source has, by its item: the one of this rank's own
            values, if ranks have such.
        missing: names in the model that the source lacks.
        unexpected: names in the source that the model lacks.
    """

    found: Mapping[str, Item]
    buffers: Mapping[Item, torch.Tensor]
    missing: list[str]
    unexpected: list[str]


def fit_model(engine: Engine, module: nn.Module, source: Source, strict: bool) -> ModelFit:
    """Match the source's tensors with the model's. Local; changes nothing.
    Raises: CheckpointError: shapes differ; with `strict`, also if names differ.
    """
    items = source.items()
    buffers: dict[Item, torch.Tensor] = {}
    found: dict[str, Item] = {}
    missing, wrong = [], []
    for entry in engine.entries:
        name, shape = entry.name, entry.shape
        item = source.parameter(entry.names)
        if item is None:
            missing.append(name)
        elif items[item].shape != shape:
            wrong.append(f"{name}: {items[item].shape} in it, {shape} in the model")
        else:
            found[entry.names[0]] = item
    own = {item.name: item.state for item in items if item.kind == "buffer" and item.state}
    held, _ = beside_parameters(engine, module)
    places = engine.buffers.places(held) if own else {}
    for name, tensor in held.items():
        item = Item("buffer", name, places[name][1] if name in own else "")
        if item not in items:
            missing.append(name)
        elif items[item].shape != tuple(tensor.shape):
            wrong.append(f"{name}: {items[item].shape} in it, {tuple(tensor.shape)} in the model")
        else:
            buffers[item] = tensor
    if strict and (elsewhere := [name for name in missing if name in own]):
        name = elsewhere[0]
        raise CheckpointError(
            f"{source.describe} has other values of buffer {name!r} for ranks with other parts of the"
            f" model ({own[name]} among them), and this run is divided otherwise. Load it on a mesh"
            " with the same axes beside data, or give strict=False to leave such buffers as they are."
        )
    taken = set(found.values()) | {i for i in items if i.kind == "buffer" and i.name in held}
    unexpected = sorted(
        item.name for item in items if item.kind in ("parameter", "buffer") and item not in taken
    )
    # The tiles of one parameter all report the same name: report it once
    wrong, missing = list(dict.fromkeys(wrong)), list(dict.fromkeys(missing))
    # A source that was fitted to the model lists tensors without a place there, not in items()
    unexpected += source.unexpected
    if wrong:
        raise CheckpointError(
            f"{source.describe} is of another model: shapes differ. {'; '.join(wrong[:5])}."
        )
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{source.describe} is of another model: {len(missing)} names are missing in it"
            f" ({', '.join(missing[:5])}), {len(unexpected)} are unknown to this model"
            f" ({', '.join(unexpected[:5])}). Give strict=False to load what fits."
        )
    return ModelFit(found, buffers, missing, unexpected)


def fill_model(engine: Engine, fit: ModelFit, reading: StateReader) -> None:
    """Load parameters and buffers. Collective. The first error is kept in `reading.error`."""
    engine.about_to_write()
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        for unit in engine.units:
            for flat in unit.flats:
                here = [e for e in flat.entries if e.names[0] in fit.found]
                found = [(entry, fit.found[entry.names[0]]) for entry in here]
                reading.masters(flat, found)
        reading.buffers(fit.buffers)
        engine.make_stale()
        engine.uninitialized.given({*fit.found, *(item.name for item in fit.buffers)})


def load_model(engine: Engine, module: nn.Module, source: Source) -> None:
    """Load everything in the source that fits the model. Collective.
    Raises: CheckpointError: on every rank: shapes differ, or a read failed (the model's contents
    are then undefined).
    """
    together, fit = Together.of(engine), None
    with together.each_rank():
        fit = fit_model(engine, module, source, strict=False)
    assert fit is not None
    reading = StateReader.of(engine, source)
    fill_model(engine, fit, reading)
    together.agree(reading.error)


class StateReader:
    """Reads from a source for one engine. `error` is the first error, for the caller to raise.

    Its `source` has the parts that this rank's holders hold, see `Local`.
    """

    def __init__(self, engine: Engine, source: Source, error: Exception | None = None) -> None:
        self.engine, self.source, self.error = engine, source, error

    @classmethod
    def of(cls, engine: Engine, source: Source) -> StateReader:
        """Return a reader of a source with whole parameters."""
        return cls(engine, Local.of(engine, source))

    def masters(self, flat: Flat, found: list[tuple[Entry, Item]]) -> None:
        """Read the master weights of a flat buffer. Parameters not in `found` stay as they are."""
        if flat.shared:
            values = flat.storage.landing(self.engine.device)
            if values is not flat.master:
                values.copy_(flat.storage.load())
            self._own_interval(flat, found, values)
            flat.storage.store(values)
            return
        parts = MasterParts()
        for entry, item in found:
            self._held(entry, item, parts.target(entry))
        parts.finish()

    def states(self, flat: Flat, key: str, dtype: torch.dtype, wanted: list[Wanted]) -> None:
        """Read the states `key` of parameters of one flat buffer."""
        on_disk, grain, first = isinstance(wanted[0].into, OnDisk), grain_of(key), flat.owned[0]
        if not flat.shared or not (packed(key) is None or flat.layout.block or on_disk):
            for w in wanted:
                self._held(w.entry, w.item, w.into)
            return
        numel = (flat.owned[1] - first) // grain
        buffer = torch.empty(numel, dtype=dtype, device=self.engine.device)
        self._own_interval(flat, [(w.entry, w.item) for w in wanted], buffer, grain)
        for w in wanted:
            here = w.entry.here
            w.into.copy_(buffer[slice(*items_of(here.start, here.stop, grain))])

    def _held(self, entry: Entry, item: Item, into: torch.Tensor | OnDisk) -> None:
        """Read all elements that this rank holds into `into`."""
        self.read(item, *entry.outside(*entry.owned(), item.state)[1:], into)

    def _own_interval(
        self, flat: Flat, found: list[tuple[Entry, Item]], buffer: torch.Tensor, grain: int = 1
    ) -> None:
        """Read this rank's interval into `buffer`: [owned], or the items that encode those
        elements. Where several ranks hold the same elements, each reads its own interval and the
        ranks then all-gather.
        """
        first = flat.owned[0]
        for entry, item in found:
            a, b = entry.accounted()
            _, start, stop = entry.outside(a, b, item.state)
            at = entry.slot.start - first
            self.read(item, start, stop, buffer[slice(*items_of(at + a, at + b, grain))])
        if flat.shared:
            # The backend may not support float8
            wire = buffer.view(torch.uint8) if buffer.dtype == torch.float8_e4m3fn else buffer
            context = self.engine.state_context(flat.unit_name)
            flat.holders.all_gather(wire, context, flat.index, move="state").wait()

    def buffers(self, wanted: Mapping[Item, torch.Tensor]) -> None:
        """Read buffers on the first of the ranks that share them, and broadcast them."""
        by_group: dict[Group, dict[Item, torch.Tensor]] = {}
        places = self.engine.buffers.places(wanted)
        for item, tensor in wanted.items():
            group = places[item][0] if item.state else self.engine.group
            by_group.setdefault(group, {})[item] = tensor
        for group, found in by_group.items():
            for item, tensor in found.items() if group.rank == 0 else ():
                self.read(item, 0, tensor.numel(), tensor)
            group.broadcast([*found.values()], self.engine.state_context("buffers"))

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor | OnDisk) -> None:
        """Read elements [start, stop) into `out`, on any tier. Does nothing after a first error."""
        if stop <= start or self.error is not None:
            return
        moved()
        try:
            if isinstance(out, OnDisk):
                for at, part in self.source.blocks(item, start, stop, BUFFER, out.dtype):
                    out.write(at - start, part)
            elif out.device.type == "cpu" and out.is_contiguous():
                self.source.read(item, start, stop, out.detach().view(-1))
            else:
                whole = out
                if not out.is_contiguous():
                    whole = torch.empty_like(out, memory_format=torch.contiguous_format)
                for at, part in self.source.blocks(item, start, stop, BUFFER, out.dtype):
                    whole.view(-1)[at - start :][: part.numel()].copy_(part)
                if whole is not out:
                    out.copy_(whole)
        except Exception as error:
            self.error = error


def fill_optimizers(
    engine: Engine, optimizers: list[torch.optim.Optimizer], reading: StateReader
) -> None:
    """Load optimizer states and parameter groups, after `fit_groups` has checked that they match.
    Collective. The first error is kept in `reading.error`.

    The states that the optimizers held before for these parameters are discarded.
    """
    for optimizer in optimizers:
        meet(optimizer)
    _set_groups(optimizers, reading.source.groups() or [])
    if isinstance(reading.source, Local) and (odd := reading.source.odd):
        reading.error = reading.error or CheckpointError(
            f"{reading.source.describe}: {odd[0]} has a shape of its own and cannot be divided along"
            " another axis than data; load it into a model that is not parallelized."
        )
    owner = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
    source = _recoded(engine, owner, reading.source)
    states: dict[str, list[Item]] = {}
    for item in source.items():
        if item.kind == "state":
            states.setdefault(item.name, []).append(item)
    recoded = StateReader(engine, source, reading.error)
    with disable_torch_function(), torch.no_grad(), torch.inference_mode(False):
        for unit in engine.units:
            for flat in unit.flats:
                _load_flat_states(recoded, flat, owner, states)
        for optimizer in optimizers:
            show_states(optimizer)
    reading.error = recoded.error


def _recoded(
    engine: Engine,
    owner: Mapping[int, tuple[torch.optim.Optimizer, dict[str, Any]]],
    source: Source,
) -> Source:
    """Return a view of `source` with moments in the format in which this run stores them."""
    formats: dict[str, Format] = {}
    plain = FORMATS["fp32"]
    for entry in engine.entries:
        if id(entry.param) in owner:
            how = moment_policy(owner[id(entry.param)][0], engine.recipe, entry.flat)
            if how is not None:
                formats |= {source.stored_name(name): how.format for name in entry.names}
    return Recoded(source, lambda name, numel: formats.get(name, plain).of(numel))


def fit_groups(
    engine: Engine, optimizers: list[torch.optim.Optimizer], source: Source, strict: bool = True
) -> None:
    """Check that the source's optimizers have the same parameter groups. Local; changes nothing.
    Without `strict`, stored groups may have further parameters, which this model does not have.
    Raises: CheckpointError: the source has no optimizer, or one with other parameter groups.
    """
    groups = source.groups()
    if not groups:
        raise CheckpointError(
            f"{source.describe} holds no optimizer; leave optimizer out, or give one that was saved"
            " with it."
        )
    if len(groups) != len(optimizers):
        raise CheckpointError(
            f"{source.describe} holds {len(groups)} optimizers, {len(optimizers)} were given."
        )
    names = {id(e.param): e.names for e in engine.entries}
    try:
        for optimizer in optimizers:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for flat in engine.flats:
                if any(id(e.param) in stepped for e in flat.entries):
                    moment_policy(optimizer, engine.recipe, flat)  # refuses formats that disagree
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    states: dict[str, set[str]] = {}
    for item in source.items():
        if item.kind == "state":
            part = packed(item.state)
            states.setdefault(item.name, set()).add(item.state if part is None else part.key)
    for number, (optimizer, stored) in enumerate(zip(optimizers, groups, strict=True)):
        if len(stored) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{source.describe}: its optimizer {number} has {len(stored)} parameter groups, the"
                f" given {type(optimizer).__name__} {len(optimizer.param_groups)}. Make the groups"
                " as they were when it was saved."
            )
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, stored, strict=True)):
            if any(id(p) not in names for p in group["params"]):
                raise CheckpointError(
                    f"group {index} of the given {type(optimizer).__name__} has a parameter of"
                    " another model: make the optimizer of model.parameters() after shard(), and"
                    " give both to one load."
                )
            where = f"{source.describe}: group {index} of its optimizer {number}"
            _refuse_options(where, group, saved)
            _refuse_numbers(source, states, optimizer, group, saved)
            ours = list(dict.fromkeys(names[id(p)] for p in group["params"]))
            here = {source.stored_name(name) for n in ours for name in n}
            theirs = {source.stored_name(name) for name in saved["params"]}
            extra = [n[0] for n in ours if theirs.isdisjoint(map(source.stored_name, n))]
            gone = [n for n in saved["params"] if strict and source.stored_name(n) not in here]
            if extra or gone:
                raise CheckpointError(
                    f"{source.describe}: group {index} of its optimizer {number} is of other"
                    f" parameters: it has not {extra[:3] or 'any more'}, and the given one has not"
                    f" {gone[:3] or 'any fewer'}. Make the groups as they were when it was saved."
                )


def _refuse_options(where: str, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raise CheckpointError if a saved option is of another kind than the group's own."""
    for key, value in saved.items():
        # What schedulers keep in a group (initial_lr, max_lr) may not be there yet
        ours = group.get(key, group.get("lr") if key.endswith("_lr") else None)
        taken = key != "params" and not (key in LOCAL_OPTIONS and key in group)
        if taken and not fits(ours, value, strict=True):
            raise CheckpointError(
                f"{where} has {key}={short(value)}, where the given optimizer has {short(ours)}:"
                " Onefold did not write this value, or the optimizer is of another kind."
            )


def _refuse_numbers(
    source: Source,
    states: Mapping[str, set[str]],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    saved: dict[str, Any],
) -> None:
    """Raise CheckpointError if a parameter of the group has states without the numbers, such as
    `step`, that the optimizer keeps beside them, or has others in their place. `states`: the keys
    of its other states.
    """
    known = source.items()
    merged = group | {k: v for k, v in saved.items() if k not in ("params", *LOCAL_OPTIONS)}
    expected: dict[int, dict[str, Any]] = {}
    for name in saved["params"]:
        numbers, item = source.scalars(name), Item("parameter", name)
        if item not in known or not group["params"] or not (numbers or name in states):
            continue
        dims = len(known[item].shape)
        if dims not in expected:
            expected[dims] = _numbers_of(optimizer, merged, dims)
        for key, ours in expected[dims].items():
            there = key in numbers or key in states.get(name, ())
            # torch's steps take an int for no tensor
            right = key not in numbers or (
                fits(ours, numbers[key], strict=True)
                and isinstance(numbers[key], torch.Tensor) >= isinstance(ours, torch.Tensor)
            )
            if not (there and right):
                what = f"{key}={short(numbers[key])}" if there else f"no {key}"
                raise CheckpointError(
                    f"{source.describe} has {what} for parameter {name!r}, where"
                    f" {type(optimizer).__name__} keeps {'a tensor' if ours is None else short(ours)}:"
                    " Onefold did not write this, or the optimizer is of another kind."
                )


def _numbers_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dims: int
) -> dict[str, Any]:
    """Return the numbers that the optimizer keeps for a parameter of the group with `dims`
    dimensions, and None for each of its tensors if it is torch's own: others may have tensors for
    large matrices only. {} if it does not tell.
    """
    like = group["params"][0]
    try:
        state = fresh_state(optimizer, group, like, (2,) * dims)
    except Exception:
        return {}
    numbers = {k: v for k, v in state.items() if is_number(v) and numel_of(np.shape(v)) == 1}
    own = type(optimizer).__module__.startswith("torch.optim.")
    return dict.fromkeys(state if own else ()) | numbers


def _set_groups(
    optimizers: list[torch.optim.Optimizer], groups: list[list[dict[str, Any]]]
) -> None:
    for optimizer, stored in zip(optimizers, groups, strict=True):
        for group, saved in zip(optimizer.param_groups, stored, strict=True):
            for key, value in saved.items():
                if key == "params" or (key in LOCAL_OPTIONS and key in group):
                    continue
                ours = group.get(key)
                if isinstance(ours, torch.Tensor):
                    ours.copy_(torch.as_tensor(value, device="cpu"))
                elif isinstance(ours, tuple) and isinstance(value, list):
                    group[key] = tuple(value)
                else:
                    group[key] = value


def _load_flat_states(
    reading: StateReader, flat: Flat, owner: Mapping[int, tuple[torch.optim.Optimizer, dict[str, Any]]],
    states: Mapping[str, list[Item]],
) -> None:  # fmt: skip
    """Load the optimizer states of the parameters of one flat buffer."""
    known = reading.source.items()
    parts = {optimizer: OptimizerParts(optimizer) for optimizer, _ in owner.values()}
    found: dict[tuple[str, torch.dtype, bool], list[Wanted]] = {}
    for entry in flat.entries:
        if id(entry.param) not in owner:
            continue
        optimizer, group = owner[id(entry.param)]
        how = moment_policy(optimizer, reading.engine.recipe, flat)
        whole = parts[optimizer].owned(entry)
        parameter = reading.source.parameter(entry.names)
        name = parameter.name if parameter is not None else entry.name
        state: dict[str, Any] = {
            key: placed(value, entry.param, group)
            for key, value in reading.source.scalars(name).items()
        }
        for item in states.get(name, ()):
            stored = known[item]
            dtype = stored.dtype
            adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
            if item.state in SIGNED and adam:
                dtype = how.of(entry).dtype if how is not None else entry.param.dtype
            elif parameter is not None and dtype == known[parameter].dtype:
                dtype = entry.param.dtype
            if whole is not None and (stored.shape == entry.slot.shape or entry.region is None):
                if not whole.mine:
                    continue
                shape = whole.matrix.shape if stored.shape == entry.slot.shape else stored.shape
                made = torch.empty(shape, dtype=dtype, device=entry.param.device)
                reading.read(item, 0, made.numel(), made)
                state[item.state] = made
            elif packed(item.state) is not None or stored.shape == entry.slot.shape:
                state[item.state] = parts[optimizer].create_one(entry, item.state, dtype)
                into = parts[optimizer].place(entry, item.state, *entry.owned())
                kind = (item.state, dtype, isinstance(into, OnDisk))
                found.setdefault(kind, []).append(Wanted(entry, item, into))
            elif not (flat.divided or flat.storage.on_disk):
                made = torch.empty(stored.shape, dtype=dtype, device=entry.param.device)
                reading.read(item, 0, made.numel(), made)
                state[item.state] = made
            else:
                reading.error = reading.error or CheckpointError(
                    f"{reading.source.describe}: {item} has a shape of its own, {stored.shape}, and"
                    " cannot be divided; load it at stage 0."
                )
        if whole is not None and not whole.mine and (state or states.get(name)):
            optimizer.state[entry.param] = StateElsewhere(whole)
        elif state:
            optimizer.state[entry.param] = state
        else:
            optimizer.state.pop(entry.param, None)
    # In the same order on every rank, since some of these reads are collective
    for key, dtype, on_disk in sorted(found, key=lambda kind: (kind[0], str(kind[1]), kind[2])):
        reading.states(flat, key, dtype, found[key, dtype, on_disk])
