"""Collect and write this rank's part of a checkpoint, and merge all ranks' reports on the first
rank.

    every rank   parts ─► planned tensors ─► its file ─► report: (item, dtype, shape, elements) of each piece
    first rank   reports ─► records ─► manifest;  values ─► state.json

Each rank writes the elements that it owns. State that every rank holds whole (stage 0) is divided
by the same layout for writing. Exactly one rank therefore writes each element, and a checkpoint is
the same for every stage. Moments in fewer bits are written decoded, and come back to the same bits
(quant/moment_packing.py).

A parameter may be a box of a global tensor: then the ranks that hold the same box do this, and each
piece is an interval of the flattened box.

    parameter 'h.0.weight'      0 ......................... 768
    stage 3, rank 1 holds                 [300 ... 768)             writes 300 .. 768
    stage 0, rank 1 holds       [0 ....................... 768)     writes 300 .. 768
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

import onefold.checkpoint.per_rank as per_rank
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.manifest import FileRecord, Record, StoredPiece, key_of
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import CODES, Planned, bytes_of, numel_of, write_tensors
from onefold.checkpoint.values import encode
from onefold.comm import Group
from onefold.layout.holders import BoxInterval, whole_region
from onefold.optim.states import OptimizerParts, kinds_of, meet
from onefold.recipe.moments import BLOCK, moment_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import HeldParts, MasterParts, StateItem
from onefold.runtime.state.dicts import beside_parameters

#: Elements read or written at a time: the CPU's cache holds them between checksum and copy. A multiple of
#: BLOCK, so that blocks of packed moments stay whole.
CHUNK = 1 << 20
assert not CHUNK % BLOCK


@dataclass(frozen=True)
class Held:
    """Elements [x, y) of a parameter or of a state of it, which this rank holds, on whatever tier and
    in whatever format. `dtype`: of the values, decoded.
    """

    entry: Entry
    key: str
    dtype: torch.dtype
    parts: HeldParts
    x: int
    y: int

    @property
    def where(self) -> BoxInterval:
        """The elements as those of the whole tensor."""
        return self.inside(self.x, self.y)

    def inside(self, x: int, y: int) -> BoxInterval:
        return BoxInterval(self.entry.region or whole_region(self.entry.shape), x, y)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the elements in parts of at most `CHUNK`."""
        return ((a, min(a + CHUNK, self.y)) for a in range(self.x, self.y, CHUNK))

    def values(self) -> Iterator[torch.Tensor]:
        """Yield the elements in order, on any device."""
        for a, b in self.chunks():
            with disable_torch_function(), torch.no_grad():
                part = self.parts.values(self.entry, self.key, a, b).to(self.dtype)
            yield part

    def write(self, x: int, y: int, values: torch.Tensor) -> None:
        self.parts.write(StateItem(self.entry, self.key, self.dtype), x, y, values)


@dataclass(frozen=True)
class PieceToWrite:
    """The elements `where` of a tensor of `shape`, which this rank writes.

    Attributes:
        values: returns them in order, in parts on any device.
        watched: tensors whose version counters tell of writes to them, if they stay the same between
            two steps.
    """

    item: Item
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: BoxInterval
    values: Callable[[], Iterable[torch.Tensor]]
    aliases: tuple[str, ...] = ()
    watched: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.where.numel * self.dtype.itemsize


@dataclass
class RankState:
    """This rank's part of a checkpoint.

    Attributes:
        tensors: written to this rank's file.
        values: as JSON, sent to the first rank.
    """

    tensors: list[PieceToWrite] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.tensors)

    def add(self, held: Held, watched: tuple[torch.Tensor, ...], first: bool) -> None:
        """Add what this rank writes of a parameter or a state. The first rank also reports tensors
        without elements.
        """
        if held.y > held.x or first:
            names, shape = held.entry.names, held.entry.shape
            item = Item("state" if held.key else "parameter", names[0], held.key)
            aliases = () if held.key else names[1:]
            self.tensors.append(
                PieceToWrite(item, shape, held.dtype, held.where, held.values, aliases, watched)
            )

    def add_own(self, item: Item, value: torch.Tensor) -> None:
        """Add a tensor that this rank stores whole."""
        where = BoxInterval(whole_region(value.shape), 0, value.numel())
        flat = value.detach().reshape(-1)
        self.tensors.append(
            PieceToWrite(item, tuple(value.shape), value.dtype, where, lambda: [flat])
        )

    def keep(self, value: torch.Tensor) -> int:
        """Add a large tensor found among the values. Returns its number."""
        number = sum(piece.item.kind == "extra" for piece in self.tensors)
        self.add_own(Item("extra", str(number)), value)
        return number


def collect(
    engines: Sequence[Engine],
    models: Sequence[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    things: Mapping[str, Any],
    frozen: bool | Collection[str],
    own: Sequence[Mapping[str, tuple[Group, str]]],
    first: int,
) -> RankState:
    """Collect this rank's part of a checkpoint. Local; copies only tensors that are not contiguous.

    Args:
        models: the model, or this rank's stages of a pipeline.
        things: scheduler, scaler, data and extra, each None if not given.
        frozen: include parameters that take no gradient; or the names of those to include.
        own: for each model the buffers of which ranks have values of their own, see `Buffers.own`.
        first: the first rank, which stores what is equal on all.

    Raises:
        CheckpointError: something cannot be stored.
    """
    out, home = RankState(values={"scalars": {}}), engines[0]
    known = {id(entry.param): entry for engine in engines for entry in engine.entries}
    with disable_torch_function(), torch.no_grad():
        chosen = _chosen(known.values(), frozen)
        for engine, model, buffers in zip(engines, models, own, strict=True):
            _collect_model(out, engine, model, chosen, buffers)
            _collect_optimizers(out, engine, of_stage(engine, engines, optimizers), known)
        # The first stage alone stores what belongs to no parameter
        if first in home.group.ranks:
            if home.rank == 0:  # what is equal on all ranks
                for name in ("scheduler", "scaler"):
                    if things[name] is not None:
                        out.values[name] = encode(state_of(things[name], name), name)
                if things["extra"] is not None:
                    out.values["extra"] = encode(things["extra"], "extra", out.keep)
            data = things["data"]
            out.values["data"] = None if data is None else encode(state_of(data, "data"), "data")
            text = json.dumps(encode(per_rank.capture(), "the random state")).encode()
            random = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            out.add_own(Item("rng", str(home.rank)), random)
        elif odd := out.values.pop("extra_state", None):
            raise CheckpointError(
                f"stages after the first have extra states ({', '.join([*odd][:3])}), which have no place"
                " in a checkpoint of the whole model."
            )
    return out


def _collect_model(
    out: RankState,
    engine: Engine,
    model: nn.Module,
    chosen: Collection[Entry],
    own: Mapping[str, tuple[Group, str]],
) -> None:
    """Add the `chosen` parameters of a model, its buffers and extra states."""
    first, masters = engine.rank == 0, MasterParts()
    for entry in (e for e in engine.entries if e in chosen):
        held = Held(entry, "", entry.flat.dtypes.master, masters, *entry.accounted())
        # What a module writes in a forward pass is in these masters before `keep_writes` can wait
        shared = (entry.local, entry.compute) if entry.flat.spec.shares_memory else ()
        out.add(held, (entry.param, *shared), first)
    buffers, odd = beside_parameters(engine, model)
    for name, buffer in buffers.items():
        group, place = own.get(name, (engine.group, ""))
        if group.rank == 0:
            out.add_own(Item("buffer", name, place), buffer)
    if first and odd:
        out.values.setdefault("extra_state", {}).update(
            (name, encode(value, f"the extra state {name!r} of the model", out.keep))
            for name, value in odd.items()
        )


def _collect_optimizers(
    out: RankState,
    engine: Engine,
    optimizers: list[torch.optim.Optimizer],
    known: Mapping[int, Entry],
) -> None:
    """Add the groups of optimizers, and their states of this engine's parameters.

    Args:
        known: the entries of this engine and of other stages of the pipeline, by id(parameter).
    """
    here = {id(entry.param): entry for entry in engine.entries}
    said: list[dict[str, Any]] = []
    for optimizer in optimizers:
        meet(optimizer)
        kind, groups = type(optimizer).__name__, []
        for number, (group, entries) in enumerate(groups_of(optimizer, known)):
            names = [entry.name for entry in entries if id(entry.param) in here]
            if engine.rank == 0:
                groups.append(encode({**group, "params": names}, f"group {number} of {kind}"))
        said.append({"class": kind, "groups": groups})
        for key, state in optimizer.state.items():
            if id(key) not in known and state:
                what = repr(key)
                if isinstance(key, torch.Tensor):
                    what = f"a tensor of shape {tuple(key.shape)}"
                raise CheckpointError(
                    f"{kind} keeps state under {what}, which is no parameter of the model, and"
                    " nothing could give it back. Keep it in a parameter group, or save it with"
                    " extra=."
                )
        _collect_states(out, engine, optimizer, here)
    if engine.rank == 0:
        out.values.setdefault("optimizers", []).append(said)


def _collect_states(
    out: RankState,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    here: Mapping[int, Entry],
) -> None:
    """Add an optimizer's states; single numbers to the values, by the parameter's name."""
    held = [(here[id(p)], state) for p, state in optimizer.state.items() if id(p) in here]
    parts, first = OptimizerParts(optimizer), engine.rank == 0
    # A load may give the optimizer other states before a save in the background has copied these
    parts.made = {entry: dict(state) for entry, state in held}
    kinds = kinds_of([(parts.shape(entry), state) for entry, state in held])
    for (entry, state), kind_of in zip(held, kinds, strict=True):
        whole, moments, (start, stop) = parts.owned(entry), set[str](), parts.accounted(entry)
        for key, value in state.items():
            kind, name = kind_of[key], moment_of(key)
            if kind in ("packed", "elements"):
                if name not in moments:  # codes and scales are one moment
                    dtype = torch.float32 if kind == "packed" else value.dtype
                    out.add(Held(entry, name, dtype, parts, start, stop), (value,), first)
                moments.add(name)
            elif kind == "number":
                # Every rank has the number. Ranks that answer for some of the parameter's elements
                # report it (all ranks, if it has none); the first report counts.
                if stop > start or entry.numel == 0:
                    numbers = out.values["scalars"].setdefault(entry.name, {})
                    numbers[key] = encode(value, f"{key!r} of parameter {entry.name!r}")
            elif whole is not None and entry.region is None:
                if whole.counts() and (first or entry.flat.divided):
                    out.add_own(Item("state", entry.name, key), value)
            elif entry.flat.divided:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for"
                    f" parameter {entry.name!r}: neither one number nor one for each element, so it"
                    " cannot be cut for another number of ranks."
                )
            elif first:
                out.add_own(Item("state", entry.name, key), value)


def _chosen(entries: Collection[Entry], frozen: bool | Collection[str]) -> set[Entry]:
    """Return the entries to save. Raises: CheckpointError: the model has no such parameters."""
    if frozen is True:
        return set(entries)
    names = frozenset[str]() if frozen is False else frozenset(frozen)
    unknown = sorted(names.difference(*(entry.names for entry in entries)))
    if isinstance(frozen, str) or unknown:
        what = repr(frozen) if isinstance(frozen, str) else ", ".join(unknown[:5])
        raise CheckpointError(
            f"frozen={what}: expected True, False, or a list with names of the model's parameters."
        )
    return {e for e in entries if e.param.requires_grad or not names.isdisjoint(e.names)}


def groups_of(
    optimizer: torch.optim.Optimizer, known: Mapping[int, Entry]
) -> list[tuple[dict[str, Any], list[Entry]]]:
    """Return the groups of an optimizer, and the entries of their parameters. `known`: by id(parameter).
    Raises: CheckpointError: one belongs to another model.
    """
    for number, group in enumerate(optimizer.param_groups):
        if foreign := [i for i, p in enumerate(group["params"]) if id(p) not in known]:
            raise CheckpointError(
                f"parameter {foreign[0]} in group {number} of {type(optimizer).__name__} belongs to"
                " another model than the one given: make the optimizer of model.parameters() after"
                " shard(), and give both to one save or load."
            )
    return [(group, [known[id(p)] for p in group["params"]]) for group in optimizer.param_groups]


def of_stage(
    engine: Engine, engines: Sequence[Engine], optimizers: list[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of one of this rank's stages: those with a parameter of it; all of them if
    there is one stage.
    """
    if len(engines) == 1:
        return optimizers
    here = {id(entry.param) for entry in engine.entries}
    stepped = [
        (o, (id(p) for group in o.param_groups for p in group["params"])) for o in optimizers
    ]
    return [optimizer for optimizer, params in stepped if not here.isdisjoint(params)]


def state_of(thing: Any, name: str) -> Any:
    """Return `thing.state_dict()`, or `thing` itself if it is a dict.
    Raises: CheckpointError: `thing` is neither.
    """
    if isinstance(thing, dict):
        return thing
    if not callable(getattr(thing, "state_dict", None)):
        raise CheckpointError(f"{name}={thing!r}: expected something with state_dict(), or a dict.")
    return thing.state_dict()


#: A tensor of which a rank has written a piece, what all ranks say of it alike (dtype, shape, for a buffer
#: a checksum), its other names, and the piece.
Report = tuple[Item, tuple[str, tuple[int, ...], int], tuple[str, ...], StoredPiece]


def write_parts(folder: Path, name: str, parts: RankState) -> tuple[FileRecord, list[Report]]:
    """Write this rank's file. Returns the reports for the first rank."""
    # Two stages of a pipeline on this rank may have the same buffer
    planned = {
        key_of(p.item, p.where): Planned(
            key_of(p.item, p.where), p.dtype, (p.where.numel,), p.values
        )
        for p in parts.tensors
        if p.where.numel
    }
    file = FileRecord(write_tensors(folder / name, [*planned.values()]), tensors=True)
    reports = list[Report]()
    for p in parts.tensors:
        crc = 0
        for part in p.values() if p.item.kind == "buffer" else ():
            crc = crc32(bytes_of(part.cpu().contiguous()), crc)
        reports.append(
            (p.item, (CODES[p.dtype], p.shape, crc), p.aliases, StoredPiece(name, p.where))
        )
    return file, reports


def records(reports: Sequence[list[Report]]) -> tuple[Record, ...]:
    """Merge all ranks' reports into the tensors of a manifest.
    Raises: CheckpointError: the reports contradict each other.
    """
    found: dict[Item, list[tuple[int, Report]]] = {}
    for rank, each in enumerate(reports):
        for report in each:
            found.setdefault(report[0], []).append((rank, report))
    made = []
    for item, all_said in found.items():
        first, (_, like, aliases, _) = all_said[0]
        if other := next(((rank, r[1]) for rank, r in all_said if r[1] != like), None):
            raise CheckpointError(
                f"{item} is {like} on rank {first} and {other[1]} on rank {other[0]}: dtype, shape"
                " and values must be the same."
            )
        pieces = [piece for _, (*_, piece) in all_said if piece.where.numel]
        if item.kind == "buffer":
            pieces = pieces[:1]  # every stage of a pipeline has its own (a table of rotations)
        covered = sum(p.where.numel for p in pieces)
        if item.kind == "state" and covered < numel_of(like[1]):
            raise CheckpointError(
                f"{item}: only some of the ranks have it. An optimizer must have stepped on all"
                " ranks alike."
            )
        if covered > numel_of(like[1]):
            raise CheckpointError(
                f"several stages hold the {item}. The module of a stage must have the names of the"
                " whole model: keep blocks in a ModuleDict under their numbers there."
            )
        in_order = tuple(sorted(pieces, key=lambda p: (p.where.region.offset, p.where.start)))
        made.append(Record(item, *like[:2], in_order, aliases))
    return tuple(made)


def values_of(said: list[dict[str, Any]], data_of: Sequence[int]) -> dict[str, Any]:
    """Merge all ranks' values into the contents of state.json. `data_of`: see `Together`; of the
    ranks of the first stage.
    Raises: CheckpointError: ranks that compute with the same data were elsewhere in it, or stages
    have other groups.
    """
    out = {k: v for k, v in said[0].items() if k != "data"}
    out["scalars"] = {
        name: found for values in reversed(said) for name, found in values["scalars"].items()
    }
    out["optimizers"] = _joined([each for v in said for each in v.get("optimizers", ())])
    # The position of the first rank of each data coordinate, in order
    data: dict[int, tuple[int, Any]] = {}
    positions = [values["data"] for values in said if "data" in values]
    for rank, (position, at) in enumerate(zip(positions, data_of, strict=True)):
        if position is None:
            continue
        first, known = data.setdefault(at, (rank, position))
        if position != known:
            raise CheckpointError(
                f"ranks {first} and {rank} compute with the same data, and were given different"
                " positions in it (data=): give ranks that differ in no data axis the same."
            )
    if len(set(data_of)) < len(data_of):
        out["data_of"] = list(data_of)  # whose random generators belong together
    found = [data[at][1] for at in sorted(data)]
    if found:
        out["data"] = {"all": found[0]} if all(d == found[0] for d in found) else {"ranks": found}
    return out


def _joined(stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the optimizers of a model, whose groups have the parameters of the same groups of all its
    stages.
    """
    options = [
        [[{**group, "params": None} for group in o["groups"]] for o in each] for each in stages
    ]
    if any(each != options[0] for each in options):
        raise CheckpointError(
            "the optimizers of the stages have different groups, or groups with different options: give"
            f" each stage's optimizer the same, empty groups included. They are {options}."
        )
    first, *others = stages
    for other in others:
        for one, two in zip(first, other, strict=True):
            for ours, theirs in zip(one["groups"], two["groups"], strict=True):
                ours["params"] += theirs["params"]
    return first


def saved_by(engine: Engine) -> dict[str, Any]:
    """Return versions, world size and recipe of this run, for people who read the manifest."""
    import onefold

    recipe = engine.recipe
    return {
        "onefold": onefold.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": engine.world_size,
        **({"mesh": engine.mesh.describe()} if engine.mesh.several else {}),
        "stage": recipe.stage,
        "recipe": {name: str(getattr(recipe, name)) for name in type(recipe).__dataclass_fields__},
    }
