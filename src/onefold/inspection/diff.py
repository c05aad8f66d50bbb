"""Compare two checkpoints: tensors element by element, and everything else that a run resumes from.

How the checkpoints were saved (ranks, stage, versions, time) is ignored. Both are read through
`Source`, so they may differ in number of ranks, stage or library. Tensors are compared in blocks,
which bounds the memory. Tensors of the same dtype are compared bit by bit, so a NaN equals itself.
Tensors of different dtypes are compared as fp64 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.source import Item, Source
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

Row = dict[str, Any]


def differences(
    first: Source,
    second: Source,
    parts: Collection[str] = PARTS,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[Row]:
    """Return a row for each tensor and each other value that differs between two sources: part, where,
    first and second (a value; of a tensor dtype and shape; "absent"). Of tensors of one shape also
    differing (elements), largest (the greatest |a - b|; nan if one is NaN; 0 if only bits differ) and
    at (its flattened index).

    Args:
        parts: those in `OWN` are in Onefold's checkpoints only.
        wanted: returns, for the name of a parameter, whether to compare its tensors and scalars.

    Raises:
        CheckpointError: one of the sources cannot be read, or is damaged.
    """
    kinds = {kind: part for part in parts for kind in KINDS_OF[part]}
    rows: list[Row] = []
    pairs = _paired(
        first, second, lambda i: i.kind in kinds and (i.kind == "rng" or wanted(i.name))
    )
    for a, b in pairs:
        item, one, other = a or b, _shown(first, a), _shown(second, b)
        assert item is not None
        values: Row = {}
        if a and b and first.stored(a).shape == second.stored(b).shape:
            values = _values(first, second, a, b)
        if values or one != other:
            row = {"part": kinds[item.kind], "where": str(item), "first": one, "second": other}
            rows.append(row | values)
    sides = first, second
    names = {i.name for s in sides for i in s.items() if i.kind == "parameter" and wanted(i.name)}
    for part, of in {"optimizer": lambda s: _optimizer(s, sorted(names)), "rest": _rest}.items():
        here, there = (dict(_flat(of(s))) if part in parts else {} for s in sides)
        for where in {**here, **there}:
            x, y = here.get(where, "absent"), there.get(where, "absent")
            if x != y and repr(x) != repr(y):  # a NaN is itself
                rows.append({"part": part, "where": where, "first": x, "second": y})
    return rows


def _paired(
    first: Source, second: Source, wanted: Callable[[Item], bool]
) -> list[tuple[Item | None, Item | None]]:
    """Return (tensor of the first, the same of the second); None where one lacks it."""
    pairs = [(a, _same(first, a, second)) for a in filter(wanted, first.items())]
    met = {b for _, b in pairs}
    left = (b for b in filter(wanted, second.items()) if b not in met)
    return [*pairs, *((_same(second, b, first), b) for b in left)]


def _same(source: Source, item: Item, other: Source) -> Item | None:
    """Return the tensor of another source that has one of the names of `item`. A parameter may be a
    buffer there.
    """
    names = item.name, *source.other_names().get(item.name, ())
    alike = KINDS_OF["weights"] if item.kind in KINDS_OF["weights"] else (item.kind,)
    for name in (*names, *map(other.stored_name, names)):
        for kind in alike:
            if (found := Item(kind, name, item.state)) in other.items():
                return found
    return None


def _values(first: Source, second: Source, a: Item, b: Item) -> Row:
    """Return how the values of two tensors of one shape differ; {} if they are the same."""
    stored, numel = first.stored(a), numel_of(first.stored(a).shape)
    dtype = stored.dtype if stored.dtype == second.stored(b).dtype else torch.float64
    seen: Row = {"differing": 0, "largest": -1.0, "at": -1}
    for start in range(0, numel, BLOCK):
        stop = min(start + BLOCK, numel)
        x, y = (torch.empty(stop - start, dtype=dtype, device="cpu") for _ in range(2))
        first.read(a, start, stop, x)
        second.read(b, start, stop, y)
        if bytes_of(x) == bytes_of(y):
            continue
        # Integers above 2^53 are rounded; a complex number counts by its modulus
        one, other = (t.abs().double() if t.is_complex() else t.double() for t in (x, y))
        differs = torch.ne(*(t.view(torch.uint8).view(len(t), -1) for t in (x, y))).any(dim=1)
        gap = (one - other).abs()
        at = int(torch.where(differs, gap.nan_to_num(math.inf), -1.0).argmax())
        seen["differing"] += int(differs.sum())
        largest = float(gap[at])
        if largest > seen["largest"] or math.isnan(largest):
            seen |= {"largest": largest, "at": start + at}
    return seen if seen["differing"] else {}


def _shown(source: Source, item: Item | None) -> str:
    if item is None:
        return "absent"
    stored = source.stored(item)
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"


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
