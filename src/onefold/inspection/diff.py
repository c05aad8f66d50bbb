"""Compare two checkpoints: tensors element by element, and everything else that a run resumes from.

How the checkpoints were saved (ranks, stage, versions, time) is ignored. Both are read through
`Source`, so they may differ in number of ranks, stage or library. Tensors are compared in blocks,
which bounds the memory. Tensors of the same dtype are compared bit by bit, so a NaN equals itself.
Tensors of different dtypes are compared by value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from onefold.checkpoint.folder_source import FolderSource
from onefold.checkpoint.per_rank import random_of
from onefold.checkpoint.source import Item, Source, Stored
from onefold.checkpoint.tensorfile import bytes_of, numel_of
from onefold.checkpoint.values import decode, encode

#: Elements compared at a time.
BLOCK = 1 << 20
#: The parts that can be compared, and the kinds of tensors in each. "rest": step, scheduler,
#: scaler, position in the data, extra.
KINDS_OF: dict[str, tuple[str, ...]] = {
    "weights": ("parameter", "buffer"), "optimizer": ("state",), "rest": ("extra",), "random": (),
}  # fmt: skip
PARTS = tuple(KINDS_OF)
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
    atol: float = 0.0,
    rtol: float = 0.0,
    wanted: Callable[[str], bool] = lambda name: True,
    advance: Advance = lambda n: None,
) -> Difference:
    """Return every difference between two sources in the given `parts`.

    Args:
        atol, rtol: a and b are equal if |a - b| <= atol + rtol · max(|a|, |b|). With both 0, their bits must
            be equal.
        wanted: returns, for the name of a parameter, whether to compare its tensors and scalars.
        advance: called with the number of elements compared since its last call.

    Raises:
        CheckpointError: one of the sources cannot be read, or is damaged.
    """
    kinds = {kind: part for part in parts for kind in KINDS_OF[part]}
    found = Difference(compared=dict.fromkeys(parts, 0))
    for item, a, b in paired(first, second, lambda item: item.kind in kinds and wanted(item.name)):
        one = first.stored(a) if a else None
        other = second.stored(b) if b else None
        row = {**asdict(item), "what": "", "first": _shown(one), "second": _shown(other)}
        if a is None or b is None or one is None or other is None:
            row["what"] = f"only in the {'first' if a else 'second'}"
        elif one.shape != other.shape:
            row["what"] = "shape"
        else:
            looked = _tensors(first, second, a, b, atol, rtol, advance)
            if looked["differing"]:
                row |= {"what": "values", **looked}
            elif one.dtype != other.dtype and atol == rtol == 0:
                row["what"] = "dtype"
        if a and b:
            found.compared[kinds[item.kind]] += 1
        if row["what"]:
            found.tensors.append(row)
    if "optimizer" in parts:
        items = [*first.items(), *second.items()]
        names = dict.fromkeys(i.name for i in items if i.kind == "parameter" and wanted(i.name))
        found.values += _values(
            "optimizer", _optimizer(first, names), _optimizer(second, names), atol, rtol
        )
    if isinstance(first, FolderSource) and isinstance(second, FolderSource):
        if "rest" in parts:
            found.values += _values("rest", _rest(first), _rest(second), atol, rtol)
        if "random" in parts:
            found.values += _values("random", _random(first), _random(second))
    else:
        found.skipped = [part for part in parts if part in ("rest", "random")]
    return found


def paired(
    first: Source, second: Source, wanted: Callable[[Item], bool]
) -> Iterator[tuple[Item, Item | None, Item | None]]:
    """Yield (tensor to name in the result, its item in the first source or None, its item in the
    second or None).
    """
    here, there = first.items(), second.items()
    own, others, met = first.aliases(), second.aliases(), set()
    for item in here:
        if wanted(item):
            match = _in_other(item, there, own, others)
            met.add(match)
            yield item, item, match
    for item in there:
        if wanted(item) and item not in met:
            yield item, _in_other(item, here, others, own), item


def _in_other(
    item: Item, there: Mapping[Item, Stored], own: Mapping[str, str], others: Mapping[str, str]
) -> Item | None:
    """Return `item` in the other source, if it is there. It may have a tied name there, or be a
    parameter instead of a buffer.
    """
    tied = [alias for alias, name in own.items() if name == item.name]
    names = [item.name, others.get(item.name, ""), *tied]
    kinds = KINDS_OF["weights"] if item.kind in KINDS_OF["weights"] else ()
    matches = (Item(kind, name, item.state) for kind in (item.kind, *kinds) for name in names)
    return next((match for match in matches if match in there), None)


def _tensors(
    first: Source, second: Source, a: Item, b: Item, atol: float, rtol: float, advance: Advance
) -> Row:
    numel = numel_of(first.stored(a).shape)
    seen: Row = {"differing": 0, "largest": -1.0, "at": -1}
    blocks = first.blocks(a, 0, numel, BLOCK), second.blocks(b, 0, numel, BLOCK)
    for (start, x), (_, y) in zip(*blocks, strict=True):
        differing, largest, at = _compared(x, y, atol, rtol)
        seen["differing"] += differing
        if differing and (largest > seen["largest"] or math.isnan(largest)):
            seen |= {"largest": largest, "at": start + at}
        advance(len(x))
    return seen


def _compared(x: torch.Tensor, y: torch.Tensor, atol: float, rtol: float) -> tuple[int, float, int]:
    """Return (elements that differ, the greatest |a - b| among them, nan before all, and its index)."""
    if x.dtype == y.dtype and bytes_of(x) == bytes_of(y):
        return 0, 0.0, -1
    # Integers above 2^53 are rounded; a complex number counts by its modulus
    a, b = (t.abs().double() if t.is_complex() else t.double() for t in (x, y))
    gap = (a - b).abs()
    gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
    differs = ~(gap <= atol + rtol * torch.maximum(a.abs(), b.abs()).nan_to_num())
    if atol == rtol == 0 and x.dtype == y.dtype:
        bits = (t.contiguous().view(torch.uint8).view(-1, x.dtype.itemsize) for t in (x, y))
        differs = torch.ne(*bits).any(dim=1)
    at = int(torch.where(differs, gap.nan_to_num(math.inf), -1.0).argmax())
    return int(differs.sum()), float(gap[at]), at


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


def _random(source: FolderSource) -> dict[str, dict[str, str]]:
    """Return {rank: {generator: digest of its state}}."""
    return {
        f"rank {item.name}": {
            name: hashlib.sha256(json.dumps(encode(state, name)).encode()).hexdigest()[:12]
            for name, state in random_of(source, int(item.name)).items()
        }
        for item in source.records
        if item.kind == "rng"
    }


def _values(part: str, a: Any, b: Any, atol: float = 0.0, rtol: float = 0.0) -> Iterator[Row]:
    """Yield the differences between two nested values, each with its place."""
    one, other = dict(_flat(a)), dict(_flat(b))
    for where in dict.fromkeys((*one, *other)):
        x, y = one.get(where, "absent"), other.get(where, "absent")
        numbers = isinstance(x, int | float) and isinstance(y, int | float)
        near = (
            numbers
            and float in (type(x), type(y))
            and math.isclose(x, y, rel_tol=rtol, abs_tol=atol)
        )
        if not (near or (x == y and (numbers or type(x) is type(y))) or (x != x and y != y)):
            yield {"part": part, "where": where, "first": x, "second": y}


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
