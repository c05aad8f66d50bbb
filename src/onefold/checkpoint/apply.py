"""Load a source into a sharded model and its optimizers. Each rank reads only the elements that it
will own.

    divided     (stages 1 to 3)   rank r reads its interval, a few MiB at a time
    replicated  (stage 0)         rank r reads interval r, then the ranks all-gather: one rank reads each byte

A rank whose read fails still joins every later collective, so no other rank waits forever. All
ranks raise at the end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.parts import CHUNK, Held, groups_of
from onefold.checkpoint.progress import moved
from onefold.checkpoint.source import Item, Source
from onefold.checkpoint.together import Together
from onefold.checkpoint.values import fits
from onefold.comm import Group
from onefold.optim.faced_states import policy_of, stored_as
from onefold.optim.states import OptimizerParts, meet, placed, show_states
from onefold.optim.verdict import fresh_state
from onefold.optim.whole import StateElsewhere
from onefold.reading import short
from onefold.recipe.moments import SIGNED
from onefold.runtime.agree import HOW
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry, Flat
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import MasterParts
from onefold.runtime.state.dicts import beside_parameters
from onefold.wording import few


class Filling:
    """What a source and a model have in common, and the reads from the one into the other. To make it
    is local and changes nothing.

    Attributes:
        found: the source's item for each parameter, by the parameter's first name.
        buffers: the model's buffers that the source has, by its item: the one of this rank's own
            values, if ranks have such.
        missing: names in the model that the source lacks.
        unexpected: names in the source that the model lacks.
        error: the first error of a read, for the caller to raise: a rank whose read fails still takes
            part in all that is collective.

    Raises:
        CheckpointError: shapes differ; with `strict`, also if the source has a buffer's values for other
            parts of the model only.
    """

    def __init__(
        self, engine: Engine, module: nn.Module, source: Source, strict: bool | str = False
    ) -> None:
        self.engine, self.source = engine, source
        self.error: Exception | None = None
        self._buffer = torch.empty(CHUNK * 8, dtype=torch.uint8, device="cpu")  # in fp64 at most
        items = source.items()
        own = {item.name: item.state for item in items if item.kind == "buffer" and item.state}
        held, odd = beside_parameters(engine, module)
        places = engine.buffers.places(held) if own else {}
        wanted = [
            (e.name, source.parameter(e.names) or Item("parameter", e.name), e.shape)
            for e in engine.entries
        ]
        for name, tensor in held.items():
            item = Item("buffer", name, places[name][1] if name in own else "")
            wanted.append((name, item, tuple(tensor.shape)))
        there = [each for each in wanted if each[1] in items]
        wrong = [
            f"{name}: {items[item].shape} in it, {shape} in the model"
            for name, item, shape in there
            if items[item].shape != shape
        ]
        self.found = {name: item for name, item, _ in there if item.kind == "parameter"}
        self.buffers = {item: held[name] for name, item, _ in there if item.kind == "buffer"}
        self.missing = [name for name, item, _ in wanted if item not in items]
        if strict and (elsewhere := [name for name in self.missing if name in own]):
            name = elsewhere[0]
            raise CheckpointError(
                f"{source.describe} has other values of buffer {name!r} for ranks with other parts of"
                f" the model ({own[name]} among them), and this run is divided otherwise. Load it on a"
                " mesh with the same axes beside data, or give strict=False to leave such buffers as"
                " they are."
            )
        if wrong:
            raise CheckpointError(
                f"{source.describe} is of another model: shapes differ. {few(wrong, 5, '; ')}."
            )
        taken = {*self.found.values(), *(i for i in items if i.kind == "buffer" and i.name in held)}
        left = {i.name for i in items if i.kind in ("parameter", "buffer") and i not in taken}
        if source.missing is not None:
            self.missing = [*source.missing]
        if strict == "trained":
            frozen = {e.name for e in engine.entries if not e.param.requires_grad}
            self.missing = [name for name in self.missing if name not in frozen]
        self.unexpected = sorted(left)
        # A source that was fitted to the model lists tensors without a place there, not in items()
        self.unexpected += source.unexpected
        if isinstance(source, FolderSource):  # no other has extra states
            theirs = source.state.get("extra_state", {}).keys()
            self.missing += sorted(odd.keys() - theirs)
            self.unexpected += sorted(theirs - odd.keys())

    def model(self) -> None:
        """Load parameters and buffers. Collective."""
        engine, masters = self.engine, MasterParts()
        engine.about_to_write()
        with disable_torch_function(), torch.inference_mode(False), torch.no_grad():
            for flat in engine.flats:
                there = [(e, self.found[e.name]) for e in flat.entries if e.name in self.found]
                dtype = flat.dtypes.master
                self._fill(flat, [(Held(e, "", dtype, masters, *e.owned()), i) for e, i in there])
            with self._keeping():
                masters.finish()
            # The first of the ranks that share a buffer reads it
            places = engine.buffers.places(self.buffers)
            by_group: dict[Group, dict[Item, torch.Tensor]] = {}
            for item, tensor in self.buffers.items():
                group = places[item][0] if item.state else engine.group
                by_group.setdefault(group, {})[item] = tensor
            for group, found in by_group.items():
                for item, tensor in found.items() if group.rank == 0 else ():
                    with self._keeping():
                        tensor.copy_(self._whole(item))
            self._wait()
            for group, found in by_group.items():
                group.broadcast([*found.values()], engine.state_context("buffers"))
            engine.make_stale()
            engine.uninitialized.given({*self.found, *(item.name for item in self.buffers)})

    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Load optimizer states and parameter groups, after `fit_groups` has checked that they match.
        Collective. The states that the optimizers held before for these parameters are discarded.
        """
        for optimizer in optimizers:
            meet(optimizer)
        for optimizer, groups in zip(optimizers, self.source.groups() or [], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                set_options(group, saved)
        states: dict[str, list[Item]] = {}
        for item in self.source.items():
            if item.kind == "state":
                states.setdefault(item.name, []).append(item)
        parts = [OptimizerParts(optimizer) for optimizer in optimizers]
        owner = {
            id(p): (each, group)
            for each in parts
            for group in each.optimizer.param_groups
            for p in group["params"]
        }
        with disable_torch_function(), torch.inference_mode(False), torch.no_grad():
            for flat in self.engine.flats:
                found: dict[tuple[str, str], list[tuple[Held, Item]]] = {}
                for entry in (e for e in flat.entries if id(e.param) in owner):
                    for held, item in self._create(*owner[id(entry.param)], entry, states):
                        found.setdefault((held.key, str(held.dtype)), []).append((held, item))
                # Ranks with other boxes may have fewer kinds: those of matrices that are stepped whole
                most = max(self._wait(len(found))) if flat.shared else 0
                # In the same order on every rank, since some of these reads are collective
                for kind in sorted(found):
                    self._fill(flat, found[kind])
                for _ in range(most - len(found)):
                    self._wait()
            with self._keeping():
                self.engine.transfers.flush()
            for each in parts:
                show_states(each.optimizer)
                if each.error:
                    self.error = self.error or CheckpointError(each.error)

    def _create(
        self, parts: OptimizerParts, group: Mapping[str, Any], entry: Entry,
        states: Mapping[str, list[Item]],
    ) -> Iterator[tuple[Held, Item]]:  # fmt: skip
        """Make the states that the source has of a parameter. An owner of a matrix reads its own here;
        the states that have an element for each of the parameter's are yielded, to be read.
        """
        optimizer, whole, flat = parts.optimizer, parts.owned(entry), entry.flat
        known, source = self.source.items(), self.found.get(entry.name)
        name = entry.name if source is None else source.name
        stored_dtype = None if source is None else known[source].dtype
        state: dict[str, Any] = {
            key: placed(value, entry.param, group)
            for key, value in self.source.scalars(name).items()
        }
        for item in states.get(name, ()):
            stored, like = known[item], known[item].shape == entry.shape
            adam = item.state in SIGNED and isinstance(
                optimizer, (torch.optim.Adam, torch.optim.AdamW)
            )
            dtype = entry.param.dtype if adam or stored.dtype == stored_dtype else stored.dtype
            if whole is not None and not whole.mine and (like or entry.region is None):
                continue
            if like:
                kinds = stored_as(optimizer, entry, item.state, dtype)
                with self._keeping():
                    state |= parts.create(entry, item.state, dtype)
                values = kinds.get(item.state, torch.float32)
                held = Held(entry, item.state, values, parts, *parts.held(entry))
                if whole is None:
                    yield held, item
                else:
                    self._own(held, item)
            elif entry.region is None and (
                whole is not None or not (flat.divided or flat.storage.on_disk)
            ):
                with self._keeping():
                    state[item.state] = self._whole(item).to(entry.param.device, dtype)
            else:
                self.error = self.error or CheckpointError(
                    f"{self.source.describe}: {item} has a shape of its own, {stored.shape}, and cannot be"
                    " divided; load it at stage 0, into a model that is not parallelized."
                )
        if whole is not None and not whole.mine and (state or states.get(name)):
            optimizer.state[entry.param] = StateElsewhere(whole)
        elif state:
            optimizer.state[entry.param] = state
        else:
            optimizer.state.pop(entry.param, None)

    def _fill(self, flat: Flat, wanted: Sequence[tuple[Held, Item]]) -> None:
        """Read parts of one flat buffer. Where several ranks hold the same elements, each reads those
        that it accounts for, and the ranks then all-gather.
        """
        if not flat.shared or not wanted:
            for held, item in wanted:
                self._own(held, item)
            return
        length = flat.owned[1] - flat.owned[0]
        row = torch.zeros(length, dtype=wanted[0][0].dtype, device=self.engine.device)
        with self._keeping():
            for held, item in wanted:
                x, y = held.entry.accounted()
                for a, b in replace(held, x=x, y=y).chunks():
                    row[held.entry.among_owned((a, b))] = self._read(held, item, a, b)
        self._wait()
        context = self.engine.state_context(flat.unit_name)
        flat.holders.all_gather(row, context, flat.index).wait()
        with self._keeping():
            for held, _ in wanted:
                held.write(held.x, held.y, row[held.entry.among_owned((held.x, held.y))])

    def _own(self, held: Held, item: Item) -> None:
        with self._keeping():
            for a, b in held.chunks():
                held.write(a, b, self._read(held, item, a, b))

    def _read(self, held: Held, item: Item, a: int, b: int) -> torch.Tensor:
        """Return elements [a, b), until the next call."""
        self._go_on()
        out = self._buffer[: (b - a) * held.dtype.itemsize].view(held.dtype)
        self.source.read_box(item, held.inside(a, b), out)
        return out

    def _whole(self, item: Item) -> torch.Tensor:
        self._go_on()
        return self.source.whole(item)

    def _wait(self, mine: int = 0) -> list[int]:
        """Wait for slow ranks as long as they move bytes, which the training's groups do not. Returns
        what each rank gives.
        """
        return Together.of(self.engine).all_gather(mine)

    def _go_on(self) -> None:
        """Raise the first error: nothing is read after it."""
        if self.error is not None:
            raise self.error
        moved()

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or error


def fit_groups(
    engines: Sequence[Engine],
    optimizers: list[torch.optim.Optimizer],
    source: Source,
    strict: bool = True,
) -> None:
    """Check that the source's optimizers have the same parameter groups. Local; changes nothing.
    Without `strict`, stored groups may have further parameters, which these models do not have.
    Raises: CheckpointError: the source has no optimizer, or one with other parameter groups.
    """
    groups = source.groups() or []
    if len(groups) != len(optimizers):
        raise CheckpointError(
            f"{source.describe} holds {len(groups) or 'no'} optimizer, {len(optimizers)} were given: give"
            " those that were saved with it, or none."
        )
    known = {id(e.param): e for engine in engines for e in engine.entries}
    states: dict[str, set[str]] = {}
    for item in source.items():
        if item.kind == "state":
            states.setdefault(item.name, set()).add(item.state)
    for number, (optimizer, stored) in enumerate(zip(optimizers, groups, strict=True)):
        if len(stored) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{source.describe}: its optimizer {number} has {len(stored)} parameter groups, the"
                f" given {type(optimizer).__name__} {len(optimizer.param_groups)}. Make the groups"
                " as they were when it was saved."
            )
        ours = groups_of(optimizer, known)
        for index, ((group, entries), saved) in enumerate(zip(ours, stored, strict=True)):
            for entry in entries:
                policy_of(optimizer, entry)  # refuses formats that disagree
            where = f"{source.describe}: group {index} of its optimizer {number}"
            _refuse_options(where, group, saved)
            _refuse_states(source, states, optimizer, group, saved)
            here = {source.stored_name(name) for entry in entries for name in entry.names}
            theirs = {source.stored_name(name) for name in saved["params"]}
            extra = [e.name for e in entries if theirs.isdisjoint(map(source.stored_name, e.names))]
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
        ours = group.get(key)  # what schedulers keep in a group may not be there yet
        right = fits(ours, value) and not (isinstance(value, float) and math.isnan(value))
        if key not in ("params", *HOW) and not right:
            raise CheckpointError(
                f"{where} has {key}={short(value)}, where the given optimizer has {short(ours)}: the"
                " optimizer is of another kind."
            )


def _refuse_states(
    source: Source,
    states: Mapping[str, set[str]],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    saved: dict[str, Any],
) -> None:
    """Raise CheckpointError if a parameter of the group has states, but not those that the first step of
    an optimizer of torch's makes. (Others may have some for large matrices only.)
    `states`: the keys of its tensors.
    """
    known, expected = source.items(), dict[int, dict[str, Any]]()
    merged = group | {k: v for k, v in saved.items() if k not in ("params", *HOW)}
    own = group["params"] and type(optimizer).__module__.startswith("torch.optim.")
    for name in saved["params"] if own else ():
        # Whether each is a tensor: torch's steps take an int for none
        there = {k: isinstance(v, torch.Tensor) for k, v in source.scalars(name).items()}
        there |= dict.fromkeys(states.get(name, ()), True)
        if Item("parameter", name) not in known or not there:
            continue
        dims = len(known[Item("parameter", name)].shape)
        if dims not in expected:
            expected[dims] = {}
            with contextlib.suppress(Exception):  # it needs a closure
                expected[dims] = fresh_state(optimizer, merged, group["params"][0], (2,) * dims)
        for key, ours in expected[dims].items():
            if there.get(key, -1) < isinstance(ours, torch.Tensor):
                raise CheckpointError(
                    f"{source.describe} has no {key} for parameter {name!r} as"
                    f" {type(optimizer).__name__} keeps it: the optimizer is of another kind."
                )


def set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group its saved options."""
    for key, value in saved.items():
        if key in ("params", "param_names") or (key in HOW and key in group):
            continue
        ours = group.get(key)
        if isinstance(ours, torch.Tensor):
            ours.copy_(torch.as_tensor(value, device="cpu"))
        elif isinstance(ours, tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value
