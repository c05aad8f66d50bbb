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
from dataclasses import dataclass, field
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

Advance = Callable[[int], object]


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between the checkpoints.

    Attributes:
        what: "only in the first", "only in the second", "shape", "dtype" or "values".
        first, second: dtype and shape in each checkpoint; "" if it is missing there.
        differing, of: number of elements that differ, and of all elements.
        largest: the greatest |a - b|; nan if a or b is NaN in some element.
        relative: the greatest |a - b| / max(|a|, |b|).
        at: the flattened index of the greatest |a - b|.
    """

    item: Item
    what: str
    first: str = ""
    second: str = ""
    differing: int = 0
    of: int = 0
    largest: float = 0.0
    relative: float = 0.0
    at: int = -1


@dataclass(frozen=True)
class ValueDifference:
    """A value, not a tensor, that differs. `part`: one of PARTS. `where`: such as "group 1, lr"."""

    part: str
    where: str
    first: Any
    second: Any


@dataclass
class Difference:
    """The result of a comparison.

    Attributes:
        tensors, values: the differences. compared: {part: number of tensors that both have}.
        nbytes: the size of these tensors in the first checkpoint.
        skipped: requested parts that could not be compared, because another library saved one of
            the checkpoints.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    skipped: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether runs that resume from the two checkpoints would do the same."""
        return not self.tensors and not self.values

    def differing(self, part: str) -> tuple[int, int]:
        """Return the number of (tensors, values) of a part that differ."""
        tensors = sum(d.item.kind in KINDS_OF[part] for d in self.tensors)
        return tensors, sum(d.part == part for d in self.values)


@dataclass(frozen=True)
class Tolerance:
    """Elements a and b are equal if |a - b| <= absolute + relative · max(|a|, |b|). With both
    tolerances 0, their bits must be equal.
    """

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        return self.absolute == self.relative == 0


def differences(
    first: Source,
    second: Source,
    *,
    parts: Collection[str] = PARTS,
    tolerance: Tolerance = Tolerance(),
    wanted: Callable[[str], bool] = lambda name: True,
    advance: Advance | None = None,
) -> Difference:
    """Return every difference between two sources in the given `parts`.

    Args:
        wanted: returns, for the name of a parameter, whether to compare its tensors and scalars.
        advance: called with the number of elements compared since its last call.

    Raises:
        CheckpointError: one of the sources cannot be read, or is damaged.
    """
    kinds = {kind: part for part in parts for kind in KINDS_OF[part]}
    found = Difference(compared=dict.fromkeys(parts, 0))
    here, there = first.items(), second.items()
    for item, a, b in paired(first, second, lambda item: item.kind in kinds and wanted(item.name)):
        if a is None or b is None:
            where = f"only in the {'first' if a else 'second'}"
            shown = _shown(here[a]) if a else "", _shown(there[b]) if b else ""
            found.tensors.append(TensorDifference(item, where, *shown))
            continue
        found.compared[kinds[item.kind]] += 1
        found.nbytes += numel_of(here[a].shape) * here[a].dtype.itemsize
        difference = _tensor(first, second, a, b, tolerance, advance or (lambda n: None))
        if difference is not None:
            found.tensors.append(difference)
        first.compare()
        second.compare()
    if "optimizer" in parts:
        names = dict.fromkeys(
            i.name for i in (*here, *there) if i.kind == "parameter" and wanted(i.name)
        )
        for where, value, others in _optimizer_values(first, second, names):
            found.values += values_differing("optimizer", value, others, where, tolerance)
    if isinstance(first, FolderSource) and isinstance(second, FolderSource):
        if "rest" in parts:
            found.values += values_differing("rest", _rest(first), _rest(second), "", tolerance)
        if "random" in parts:
            found.values += values_differing("random", _random(first), _random(second), "")
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


# -- tensors ---------------------------------------------------------------------------------------


def _tensor(
    first: Source, second: Source, a: Item, b: Item, tolerance: Tolerance, advance: Advance
) -> TensorDifference | None:
    one, other = first.stored(a), second.stored(b)
    numel = numel_of(one.shape)
    if one.shape != other.shape:
        return TensorDifference(a, "shape", _shown(one), _shown(other), of=numel)
    seen = _Seen()
    blocks = (first.blocks(a, 0, numel, BLOCK), second.blocks(b, 0, numel, BLOCK))
    for (start, x), (_, y) in zip(*blocks, strict=True):
        seen.look(x, y, start, tolerance)
        advance(len(x))
    if not seen.differing and (one.dtype == other.dtype or not tolerance.exact):
        return None
    what = "values" if seen.differing else "dtype"
    counts = seen.differing, numel, seen.largest, seen.relative, seen.at
    return TensorDifference(a, what, _shown(one), _shown(other), *counts)


class _Seen:
    """The differences of one tensor, accumulated block by block."""

    def __init__(self) -> None:
        self.differing, self.largest, self.relative, self.at = 0, 0.0, 0.0, -1

    def look(self, x: torch.Tensor, y: torch.Tensor, start: int, tolerance: Tolerance) -> None:
        if x.dtype == y.dtype and bytes_of(x) == bytes_of(y):
            return
        a, b = _as_numbers(x), _as_numbers(y)
        gap = (a - b).abs()
        both = torch.maximum(a.abs(), b.abs())
        gap[(a == b) | (a.isnan() & b.isnan())] = 0.0
        if tolerance.exact:
            same = _same_bits(x, y) if x.dtype == y.dtype else gap == 0
        else:
            same = (gap <= tolerance.absolute + tolerance.relative * both) | (gap == 0)
        if bool(same.all()):
            return
        self.differing += int((~same).sum())
        gap[same] = 0.0
        nans = gap.isnan()
        where = int(nans.to(torch.uint8).argmax() if bool(nans.any()) else gap.argmax())
        largest = float(gap[where])
        first_nan = math.isnan(largest) and not math.isnan(self.largest)
        if self.at < 0 or largest > self.largest or first_nan:
            self.largest, self.at = largest, start + where
        relative = gap / both.clamp_min(torch.finfo(torch.float64).tiny)
        self.relative = max(self.relative, float(relative.nan_to_num().max()))


def _as_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return the elements as float64. Integers above 2^53 are rounded. A complex number is replaced
    by its modulus.
    """
    return x.abs().double() if x.is_complex() else x.double()


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return, for each element, whether all bits are equal."""
    size = x.dtype.itemsize
    return (x.view(torch.uint8).view(-1, size) == y.view(torch.uint8).view(-1, size)).all(dim=1)


def _shown(tensor: Stored | torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# -- everything else -------------------------------------------------------------------------------


def _optimizer_values(
    first: Source, second: Source, names: Iterable[str]
) -> Iterator[tuple[str, Any, Any]]:
    one, other = first.groups(), second.groups()
    if one is None and other is None:
        return
    if one is None or other is None:
        said = ["absent" if groups is None else "there" for groups in (one, other)]
        yield "optimizer", said[0], said[1]
        return
    if len(one) != len(other):
        yield "optimizers", len(one), len(other)
    for number, (groups, others) in enumerate(zip(one, other, strict=False)):
        which = f"optimizer {number}, " if len(one) > 1 else ""
        if len(groups) != len(others):
            yield f"{which}groups", len(groups), len(others)
        for index, (a, b) in enumerate(zip(groups, others, strict=False)):
            yield f"{which}group {index}", a, b
    for name in names:
        yield name, dict(first.scalars(name)), dict(second.scalars(name))


def _rest(source: FolderSource) -> dict[str, Any]:
    """Return the other values that a run resumes from. Tensors among them are represented by their
    number, since they are compared as tensors.
    """
    keys = ("step", "scheduler", "scaler", "data", "extra", "extra_state", "wire")
    return {
        key: decode(source.state[key], lambda number: f"tensor {number}")  # type: ignore[arg-type, return-value]
        for key in keys
        if source.state.get(key) is not None
    }


def _random(source: FolderSource) -> dict[str, dict[str, str]]:
    """Return {rank: {generator: digest of its state}}."""
    out = {}
    for item in source.records:
        if item.kind == "rng":
            digests = {
                name: hashlib.sha256(json.dumps(encode(state, name)).encode()).hexdigest()[:12]
                for name, state in random_of(source, int(item.name)).items()
            }
            out[f"rank {item.name}"] = digests
    return out


def values_differing(
    part: str, a: Any, b: Any, where: str, tolerance: Tolerance = Tolerance()
) -> list[ValueDifference]:
    """Return the differences between two nested values, each with its position."""
    inside: Iterable[tuple[Any, Any, Any]]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        inside = ((k, a.get(k, _ABSENT), b.get(k, _ABSENT)) for k in dict.fromkeys((*a, *b)))
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        inside = zip(range(len(a)), a, b, strict=True)
    elif _same(a, b, tolerance):
        return []
    else:
        return [ValueDifference(part, where, _plain(a), _plain(b))]
    return [
        d
        for key, x, y in inside
        for d in values_differing(part, x, y, f"{where}, {key}" if where else str(key), tolerance)
    ]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def _same(a: Any, b: Any, tolerance: Tolerance) -> bool:
    if isinstance(a, _ARRAYS) or isinstance(b, _ARRAYS):
        try:
            x, y = torch.as_tensor(a, device="cpu"), torch.as_tensor(b, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            return False
        if x.shape != y.shape:
            return False
        seen = _Seen()
        seen.look(x.reshape(-1).contiguous(), y.reshape(-1).contiguous(), 0, tolerance)
        return not seen.differing
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and float in (type(a), type(b)):
        gap = tolerance.absolute + tolerance.relative * max(abs(a), abs(b))
        return a == b or (a != a and b != b) or abs(a - b) <= gap
    return type(a) is type(b) and bool(a == b)


def _plain(value: Any) -> Any:
    """Return a short form of a value, for output and JSON."""
    if isinstance(value, _ARRAYS):
        tensor = torch.as_tensor(value, device="cpu")
        return tensor.item() if tensor.numel() == 1 else _shown(tensor)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
