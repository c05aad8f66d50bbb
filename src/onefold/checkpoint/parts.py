"""Collect and write this rank's part of a checkpoint, and merge all ranks' reports on the first
rank.

    every rank   parts ─► planned tensors ─► its file ─► report: (item, dtype, shape, start, stop, crc) of each piece
    first rank   reports ─► records ─► manifest;  values ─► state.json

Each rank writes the elements that it owns. State that every rank holds whole (stage 0) is divided
by the same layout for writing. Exactly one rank therefore writes each element, and a checkpoint is
the same for every stage.

A parameter may be a box of a global tensor: then the ranks that hold the same box do this, and each
piece is an interval of the flattened box.

    parameter 'h.0.weight'      0 ......................... 768
    stage 3, rank 1 holds                 [300 ... 768)             writes 300 .. 768
    stage 0, rank 1 holds       [0 ....................... 768)     writes 300 .. 768
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onefold.checkpoint.per_rank as per_rank
from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.manifest import FileRecord, Record, StoredPiece, key_of
from onefold.checkpoint.source import Item
from onefold.checkpoint.tensorfile import CODES, DTYPES, Planned, write_tensors
from onefold.checkpoint.values import encode
from onefold.comm import Group
from onefold.layout.holders import TensorBox, whole_region
from onefold.optim.states import OptimizerParts, kinds_of, meet
from onefold.recipe.moments import grain_of
from onefold.runtime.engine import Engine
from onefold.runtime.flat import Entry
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.parts import HeldParts, MasterParts
from onefold.runtime.state.dicts import beside_parameters
from onefold.runtime.storage import OnDisk


@dataclass(frozen=True)
class PieceToWrite:
    """A piece that this rank writes: elements [start, stop) of a flattened tensor of `shape`, or of
    a flattened `box` of it. `tensor`: [stop - start], in memory or on disk.
    """

    item: Item
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: torch.Tensor | OnDisk
    aliases: tuple[str, ...] = ()
    box: TensorBox | None = None

    @property
    def key(self) -> str:
        """Its name in this rank's file."""
        return key_of(self.item, self.start, self.box)


@dataclass
class RankState:
    """This rank's part of a checkpoint.

    Attributes:
        tensors: written to this rank's file.
        values: as JSON, sent to the first rank.
        extras: number of large tensors that `values` refer to by number.
    """

    tensors: list[PieceToWrite] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    extras: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.numel() * part.tensor.element_size() for part in self.tensors)

    def add_own(self, item: Item, value: torch.Tensor) -> None:
        """Add a tensor that this rank stores whole."""
        flat = value.detach().reshape(-1)
        self.tensors.append(PieceToWrite(item, tuple(value.shape), 0, value.numel(), flat))

    def keep(self, value: torch.Tensor) -> int:
        """Add a large tensor found among the values. Returns its number."""
        self.add_own(Item("extra", str(self.extras)), value)
        self.extras += 1
        return self.extras - 1


def collect(
    engine: Engine,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    things: Mapping[str, Any],
    frozen: bool | Collection[str] = True,
    own: Mapping[str, tuple[Group, str]] | None = None,
) -> RankState:
    """Collect this rank's part of a checkpoint. Local; copies only tensors that are not contiguous.

    Args:
        things: scheduler, scaler, data and extra, each None if not given.
        frozen: include parameters that take no gradient; or the names of those to include.
        own: the buffers of which ranks have values of their own, see `Buffers.own`.

    Raises:
        CheckpointError: something cannot be stored.
    """
    out, first = RankState(), engine.rank == 0
    with disable_torch_function(), torch.no_grad():
        states = States(engine, optimizers)
        chosen = _chosen(engine, frozen)
        entries = [
            e
            for e in engine.entries
            if frozen is True or e.param.requires_grad or not chosen.isdisjoint(e.names)
        ]
        masters = MasterParts()
        for held, entry, key in [*((masters, entry, "") for entry in entries), *states.tensors]:
            start, stop = held.accounted(entry)
            if stop > start or first:  # the first rank also reports tensors without elements
                names = entry.names
                item = Item("state", names[0], key) if key else Item("parameter", names[0])
                aliases = () if key else names[1:]
                mine, box = held.place(entry, key, start, stop), entry.region
                shape, a, b = entry.outside(start, stop, key)
                shape = shape if box is None else entry.shape
                out.tensors.append(PieceToWrite(item, shape, a, b, mine, aliases, box))
        for entry, key, value in states.wholes:
            if first or entry.flat.divided:
                out.add_own(Item("state", entry.name, key), value)
        buffers, odd = beside_parameters(engine, module)
        for name, buffer in buffers.items():
            group, place = (own or {}).get(name, (engine.group, ""))
            if group.rank == 0:
                out.add_own(Item("buffer", name, place), buffer)
        if first:
            _collect_first(out, odd, things)
            out.values["optimizers"] = [
                {"class": name, "groups": [encode(g, f"group {i} of {name}") for i, g in enumerate(groups)]}
                for name, groups in zip((type(o).__name__ for o in optimizers), states.groups, strict=True)
            ]  # fmt: skip
        out.values["scalars"] = {
            name: {key: encode(v, f"{key!r} of parameter {name!r}") for key, v in scalars.items()}
            for name, scalars in brought(states.scalars).items()
        }
        if things["data"] is not None:
            out.values["data"] = encode(state_of(things["data"], "data"), "data")
        text = json.dumps(encode(per_rank.capture(), "the random state")).encode()
        random = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        out.add_own(Item("rng", str(engine.rank)), random)
    return out


def _chosen(engine: Engine, frozen: bool | Collection[str]) -> frozenset[str]:
    """Return the names in `frozen`. Raises: CheckpointError: the model has no such parameters."""
    if isinstance(frozen, bool):
        return frozenset()
    known = {name for entry in engine.entries for name in entry.names}
    if isinstance(frozen, str) or (unknown := sorted(set(frozen) - known)):
        what = repr(frozen) if isinstance(frozen, str) else ", ".join(unknown[:5])
        raise CheckpointError(
            f"frozen={what}: expected True, False, or a list with names of the model's parameters."
        )
    return frozenset(frozen)


def _collect_first(out: RankState, odd: Mapping[str, Any], things: Mapping[str, Any]) -> None:
    """Add what only the first rank stores: values that are equal on all ranks."""
    if odd:
        out.values["extra_state"] = {
            name: encode(value, f"the extra state {name!r} of the model", out.keep)
            for name, value in odd.items()
        }
    for name in ("scheduler", "scaler"):
        if things[name] is not None:
            out.values[name] = encode(state_of(things[name], name), name)
    if things["extra"] is not None:
        out.values["extra"] = encode(things["extra"], "extra", out.keep)


def brought(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return `scalars` with all numbers on the host. A fused optimizer has a count of steps for each
    parameter on the device; the host waits for one copy, not for each of them.
    """
    out = {name: dict(state) for name, state in scalars.items()}
    there: dict[tuple[torch.device, torch.dtype], list[tuple[str, str, torch.Tensor]]] = {}
    for name, state in out.items():
        for key, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.device.type not in ("cpu", "meta")
                and value.numel() == 1
                and value.layout is torch.strided
            ):
                kind = value.device, value.dtype
                there.setdefault(kind, []).append((name, key, value))
    for found in there.values():
        numbers = torch.stack([value.detach().reshape(()) for *_, value in found]).cpu()
        for (name, key, value), number in zip(found, numbers.unbind(), strict=True):
            out[name][key] = number.clone().view(value.shape)
    return out


class States:
    """The state that optimizers hold for the parameters of an engine.

    Attributes:
        tensors: (parts, entry, key) for element-wise state, and for packed codes and scales.
        wholes: (entry, key, tensor) for state whose shape differs from its parameter's.
        scalars: {parameter: {key: value}} for single numbers.
        groups: for each optimizer its groups as plain values, with names as "params".
    """

    def __init__(self, engine: Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        self.tensors: list[tuple[HeldParts, Entry, str]] = []
        self.wholes: list[tuple[Entry, str, torch.Tensor]] = []
        self.scalars: dict[str, dict[str, Any]] = {}
        self.groups: list[list[dict[str, Any]]] = []
        known = {id(entry.param): entry for entry in engine.entries}
        for optimizer in optimizers:
            meet(optimizer)
            self.groups.append([])
            for number, group in enumerate(optimizer.param_groups):
                found = [known.get(id(p)) for p in group["params"]]
                if None in found:
                    raise CheckpointError(
                        f"parameter {found.index(None)} in group {number} of"
                        f" {type(optimizer).__name__} belongs to another model than the one given:"
                        " make the optimizer of model.parameters() after shard(), and give both to"
                        " one save or load."
                    )
                names = [e.name for e in found if e is not None]
                options = {k: v for k, v in group.items() if k != "params"}
                self.groups[-1].append({**options, "params": names})
            self._sort(optimizer, known)

    def _sort(self, optimizer: torch.optim.Optimizer, known: dict[int, Entry]) -> None:
        foreign = [key for key, state in optimizer.state.items() if id(key) not in known and state]
        if foreign:
            what = repr(foreign[0])
            if isinstance(foreign[0], torch.Tensor):
                what = f"a tensor of shape {tuple(foreign[0].shape)}"
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state under {what}, which is no parameter of the"
                " model, and nothing could give it back. Keep it in a parameter group, or save it"
                " with extra=."
            )
        held = {p: state for p, state in optimizer.state.items() if id(p) in known}
        parts = OptimizerParts(optimizer)
        shapes = {p: parts.shape(known[id(p)]) for p in held}
        kinds = kinds_of([(shapes[p], state) for p, state in held.items()])
        for (p, state), kind_of in zip(held.items(), kinds, strict=True):
            entry = known[id(p)]
            whole = parts.owned(entry)
            for key, value in state.items():
                kind = kind_of[key]
                if kind in ("packed", "elements"):
                    self.tensors.append((parts, entry, key))
                elif kind == "number":
                    # Every rank has the number. Ranks that answer for some of the parameter's
                    # elements report it (all ranks, if it has none); the first report counts.
                    start, stop = parts.accounted(entry)
                    if stop > start or entry.numel == 0:
                        self.scalars.setdefault(entry.name, {})[key] = value
                elif whole is not None and entry.region is None:
                    if whole.counts():
                        self.wholes.append((entry, key, value))
                elif not entry.flat.divided:
                    self.wholes.append((entry, key, value))
                else:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)}"
                        f" for parameter {entry.name!r}: neither one number nor one for"
                        " each element, so it cannot be cut for another number of ranks."
                    )


def state_of(thing: Any, name: str) -> Any:
    """Return `thing.state_dict()`, or `thing` itself if it is a dict.
    Raises: CheckpointError: `thing` is neither.
    """
    if isinstance(thing, dict):
        return thing
    if not callable(getattr(thing, "state_dict", None)):
        raise CheckpointError(f"{name}={thing!r}: expected something with state_dict(), or a dict.")
    return thing.state_dict()


#: A tensor of which a rank has written a piece (item, dtype, shape, other names), and the piece.
Report = tuple[Item, str, tuple[int, ...], tuple[str, ...], StoredPiece]


def write_parts(folder: Path, name: str, parts: RankState) -> tuple[FileRecord, list[Report]]:
    """Write this rank's file. Returns the reports for the first rank."""
    planned = [
        Planned(p.key, p.tensor.dtype, (p.stop - p.start,), _fetch(p.tensor))
        for p in parts.tensors
        if p.stop > p.start
    ]
    written = write_tensors(folder / name, planned)
    reports = []
    for p in parts.tensors:
        piece = StoredPiece(name, p.start, p.stop, written.crcs.get(p.key, 0), p.box)
        reports.append((p.item, CODES[p.tensor.dtype], p.shape, p.aliases, piece))
    return FileRecord(written.nbytes, written.head, head_only=True), reports


def _fetch(tensor: torch.Tensor | OnDisk) -> Callable[[], torch.Tensor | Iterable[torch.Tensor]]:
    return tensor.pieces if isinstance(tensor, OnDisk) else lambda: tensor.contiguous().cpu()


def records(reports: Sequence[list[Report]]) -> tuple[Record, ...]:
    """Merge all ranks' reports into the tensors of a manifest.
    Raises: CheckpointError: the reports contradict each other.
    """
    found: dict[Item, tuple[str, tuple[int, ...], tuple[str, ...], list[StoredPiece]]] = {}
    for rank, said in enumerate(reports):
        for item, dtype, shape, aliases, piece in said:
            known = found.setdefault(item, (dtype, shape, aliases, []))
            if known[:2] != (dtype, shape):
                raise CheckpointError(
                    f"{item} is {DTYPES[dtype]} {shape} on rank {rank} and {DTYPES[known[0]]}"
                    f" {known[1]} on another."
                )
            if piece.stop > piece.start:
                known[3].append(piece)
    made = []
    for item, (dtype, shape, aliases, pieces) in found.items():
        whole = whole_region(shape)
        grain = grain_of(item.state) if any(p.box is not None for p in pieces) else 1
        numel = sum(-(-box.numel // grain) for box in {p.box or whole for p in pieces})
        if item.kind == "state" and (
            sum(p.stop - p.start for p in pieces) != numel
            or sum(box.numel for box in {p.box or whole for p in pieces}) != whole.numel
        ):
            raise CheckpointError(
                f"{item}: only some of the ranks have it. An optimizer must have stepped on all"
                " ranks alike."
            )
        in_order = tuple(sorted(pieces, key=lambda p: ((p.box or whole).offset, p.start)))
        made.append(Record(item, dtype, shape, in_order, aliases))
    return tuple(made)


def values_of(said: list[dict[str, Any]], data_of: Sequence[int]) -> dict[str, Any]:
    """Merge all ranks' values into the contents of state.json. `data_of`: see `Together`.
    Raises: CheckpointError: ranks that compute with the same data were elsewhere in it.
    """
    out = {key: value for key, value in said[0].items() if key not in ("scalars", "data")}
    scalars: dict[str, Any] = {}
    for values in said:
        for name, found in values.get("scalars", {}).items():
            scalars.setdefault(name, found)
    out["scalars"] = scalars
    # The position of the first rank of each data coordinate, in order
    data: dict[int, tuple[int, Any]] = {}
    for rank, (values, at) in enumerate(zip(said, data_of, strict=True)):
        if "data" not in values:
            continue
        first, position = data.setdefault(at, (rank, values["data"]))
        if position != values["data"]:
            raise CheckpointError(
                f"ranks {first} and {rank} compute with the same data, and were given different"
                " positions in it (data=): give ranks that differ in no data axis the same."
            )
    if len(set(data_of)) < len(data_of):
        out["data_of"] = list(data_of)  # whose random generators belong together
    if data:
        found = [data[at][1] for at in sorted(data)]
        out["data"] = {"all": found[0]} if all(d == found[0] for d in found) else {"ranks": found}
    return out


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
