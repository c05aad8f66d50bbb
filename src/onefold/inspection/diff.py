"""Compare two checkpoints: tensors element by element, and everything else that a run resumes from.

How the checkpoints were saved (ranks, stage, versions, time) is ignored. Both are read through
`Source`, so they may differ in number of ranks, stage or library. Tensors are compared in blocks,
which bounds the memory. Tensors of the same dtype are compared bit by bit, so a NaN equals itself.
Tensors of different dtypes are compared as fp64 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.source import Item, Source, Stored
from onefold.checkpoint.tensorfile import bytes_of, numel_of
from onefold.checkpoint.values import decode

#: Elements compared at a time.
BLOCK = 1 << 20
#: The parts that can be compared, and the kinds of tensors in each. "rest": step, scheduler,
#: scaler, position in the data, extra.
KINDS_OF: dict[str, tuple[str, ...]] = {
    "weights": ("parameter", "buffer"), "optimizer": ("state",), "rest": ("extra",), "random": ("rng",),
}  # fmt: skip
PARTS = tuple(KINDS_OF)
#: The parts that only Onefold's checkpoints say.
OWN = ("rest", "random")
REST = ("step", "scheduler", "scaler", "data", "extra", "extra_state")

Advance = Callable[[int], object]
Row = dict[str, Any]


@dataclass
class Difference:
    """The result of a comparison.

    Attributes:
        tensors: a row for each tensor that differs: kind, name, state, what ("only in the first", "only in
            the second", "shape", "dtype" or "values"), first and second (dtype and shape there), differing
            (elements), largest (the greatest |a - b|; nan if one is NaN; 0 if only bits differ) and at (its
            flattened index).
        values: a row for each other value that differs: part, where, first, second.
        compared: {part: number of tensors that both have}.
        skipped: requested parts that could not be compared, because another library saved one of
            the checkpoints.
    """

    tensors: list[Row] = field(default_factory=list)
    values: list[Row] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether runs that resume from the two checkpoints would do the same."""
        return not self.tensors and not self.values

    def differing(self, part: str) -> tuple[int, int]:
        """Return the number of (tensors, values) of a part that differ."""
        tensors = sum(row["kind"] in KINDS_OF[part] for row in self.tensors)
        return tensors, sum(row["part"] == part for row in self.values)


def differences(
    first: Source,
    second: Source,
    *,
    parts: Collection[str] = PARTS,
    wanted: Callable[[str], bool] = lambda name: True,
    advance: Advance = lambda n: None,
) -> Difference:
    """Return every difference between two sources in the given `parts`.

    Args:
        wanted: returns, for the name of a parameter, whether to compare its tensors and scalars.
        advance: called with the number of elements compared since its last call.

    Raises:
        CheckpointError: one of the sources cannot be read, or is damaged.
    """
    if not (isinstance(first, FolderSource) and isinstance(second, FolderSource)):
        skipped = [part for part in parts if part in OWN]
        parts = [part for part in parts if part not in OWN]
    else:
        skipped = []
    kinds = {kind: part for part in parts for kind in KINDS_OF[part]}
    found = Difference(compared=dict.fromkeys(parts, 0), skipped=skipped)
    named = [
        _by_name(
            source, lambda item: item.kind in kinds and (item.kind == "rng" or wanted(item.name))
        )
        for source in (first, second)
    ]
    for a, b in _paired(*named):
        one, other = (first.stored(a) if a else None), (second.stored(b) if b else None)
        item = a or b
        assert item is not None
        row = {**asdict(item), "what": "", "first": _shown(one), "second": _shown(other)}
        if a is None or b is None or one is None or other is None:
            row["what"] = f"only in the {'first' if a else 'second'}"
        else:
            found.compared[kinds[item.kind]] += 1
            if one.shape != other.shape:
                row["what"] = "shape"
            elif (looked := _tensors(first, second, a, b, advance))["differing"]:
                row |= {"what": "values", **looked}
            elif one.dtype != other.dtype:
                row["what"] = "dtype"
        if row["what"]:
            found.tensors.append(row)
    names = {item.name for items in named for item in items.values() if item.kind == "parameter"}
    for part, of in {"optimizer": lambda s: _optimizer(s, sorted(names)), "rest": _rest}.items():
        one_side, other_side = (
            dict(_flat(of(s))) if part in parts else {} for s in (first, second)
        )
        for where in dict.fromkeys((*one_side, *other_side)):
            x, y = one_side.get(where, "absent"), other_side.get(where, "absent")
            if x != y and repr(x) != repr(y):  # a NaN is itself
                found.values.append({"part": part, "where": where, "first": x, "second": y})
    return found


def _by_name(source: Source, wanted: Callable[[Item], bool]) -> dict[tuple[str, ...], Item]:
    """Return the tensors by part, name and state. A tied one has several names; a parameter may be a
    buffer elsewhere.
    """
    others, found = source.other_names(), dict[tuple[str, ...], Item]()
    for item in filter(wanted, source.items()):
        kind = "weight" if item.kind in KINDS_OF["weights"] else item.kind
        for name in (item.name, *others.get(item.name, ())):
            found[kind, name, item.state] = item
    return found


def _paired(
    here: Mapping[tuple[str, ...], Item], there: Mapping[tuple[str, ...], Item]
) -> list[tuple[Item | None, Item | None]]:
    """Return (item of the first, item of the second); None where one lacks it under all its names."""
    pairs = dict.fromkeys((here.get(key), there.get(key)) for key in {**here, **there})
    met = {item for pair in pairs if None not in pair for item in pair}
    return [pair for pair in pairs if None not in pair or met.isdisjoint(pair)]


def _tensors(first: Source, second: Source, a: Item, b: Item, advance: Advance) -> Row:
    stored, numel = first.stored(a), numel_of(first.stored(a).shape)
    dtype = stored.dtype if stored.dtype == second.stored(b).dtype else torch.float64
    seen: Row = {"differing": 0, "largest": -1.0, "at": -1}
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        x, y = (torch.empty(stop - start, dtype=dtype, device="cpu") for _ in range(2))
        first.read(a, start, stop, x)
        second.read(b, start, stop, y)
        advance(len(x))
        if bytes_of(x) == bytes_of(y):
            continue
        # Integers above 2^53 are rounded; a complex number counts by its modulus
        one, other = (t.abs().double() if t.is_complex() else t.double() for t in (x, y))
        differs = torch.ne(*(t.view(torch.uint8).view(len(t), -1) for t in (x, y))).any(dim=1)
        gap = (one - other).abs()
        at = int(torch.where(differs, gap.nan_to_num(math.inf), -1.0).argmax())
        seen["differing"] += int(differs.sum())
        largest = float(gap[at])
        if differs[at] and (largest > seen["largest"] or math.isnan(largest)):
            seen |= {"largest": largest, "at": start + at}
    return seen


def _shown(tensor: Stored | None) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" if tensor else ""


def _optimizer(source: Source, names: Iterable[str]) -> dict[str, Any]:
    """Return the parameter groups, and the scalars by parameter."""
    found: dict[str, Any] = {name: dict(source.scalars(name)) for name in names}
    optimizers = source.groups() or []
    for number, groups in enumerate(optimizers):
        which = f"optimizer {number}, " if len(optimizers) > 1 else ""
        found |= {f"{which}group {index}": group for index, group in enumerate(groups)}
    return found


def _rest(source: FolderSource) -> dict[str, Any]:
    """Return the other values that a run resumes from. Tensors among them are represented by their
    number, since they are compared as tensors.
    """
    return {
        key: decode(source.state[key], lambda number: f"tensor {number}")  # type: ignore[arg-type, return-value]
        for key in REST
        if source.state.get(key) is not None
    }


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of everything in nested mappings, lists, tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    for key, one in inside:
        yield from _flat(one, f"{where}, {key}" if where else str(key))
    if not isinstance(value, Mapping | list | tuple) or not value:
        yield where, value
