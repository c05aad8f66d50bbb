"""Map elements of a Hugging Face folder's tensors to elements of the model's tensors, and back.

    in the folder                                 in the model
    ...experts.0.w1.weight  [I, H]   ─┐
    ...experts.0.w3.weight  [I, H]   ─┼──────►    ...experts.gate_up_proj  [E, 2·I, H]
    ...experts.1.w1.weight  [I, H]   ─┘
    wte.weight                       ──────►      transformer.wte.weight        (prefix of the base model)

[Note: rows are tagged] transformers renames, stacks, joins and splits tensors while it loads them.
This module runs transformers' own rules on small integer tensors in which every row holds its
number. The numbers in a result say which rows of which tensors it is made of. A row is a slice
along the last dimension. Two numbers represent each row: a rule that changes the inside of rows (a
transposition, a split across them, arithmetic) breaks up the pairs, which is detected and refused.
"""

from __future__ import annotations

import bisect
import copy
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import NotStreamed
from onefold.checkpoint.tensorfile import numel_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ElementRun:
    """Elements `[at, at + length)` of a flattened tensor are elements `[start, start + length)` of
    tensor `name` on the other side.
    """

    at: int
    name: str
    start: int
    length: int


Runs = tuple[ElementRun, ...]


class NotRows(Exception):
    """Raised when a rule of transformers does more than move rows."""


class Tags:
    """The row numbers given to tensors; see [Note: rows are tagged]."""

    def __init__(self) -> None:
        self._next = 0
        self._starts: list[int] = []
        self._sources: list[tuple[str, int, int]] = []  # name, elements in a row, rows

    def add(self, name: str, shape: Shape) -> torch.Tensor:
        """Number the rows of tensor `name` of `shape`. Returns its stand-in, int64 [..., at most
        2].
        """
        width = shape[-1] if len(shape) > 1 else 1
        kept, rows = min(2, width), numel_of(shape) // max(1, width)
        self._starts.append(self._next)
        self._sources.append((name, width, rows))
        numbers = torch.arange(self._next, self._next + rows * kept, device="cpu")
        self._next += rows * kept + 2  # a gap: numbers of two tensors are never consecutive
        return numbers.view((*shape[:-1], kept) if len(shape) > 1 else shape)

    def trace(self, tags: torch.Tensor) -> tuple[Shape, Runs]:
        """Return the shape of the tensor that `tags` represents, and the runs it is made of.
        Raises: NotRows: it is not made of whole rows.
        """
        flat = tags.reshape(-1)
        if not flat.numel():
            return tuple(tags.shape), ()
        _, width, _ = self._sources[self._at(int(flat[0]))]
        kept = min(2, width)
        first = flat[::kept]
        if kept == 2 and (tags.shape[-1] != 2 or not torch.equal(flat[1::2], first + 1)):
            raise NotRows
        breaks = (torch.nonzero(first[1:] != first[:-1] + kept).reshape(-1) + 1).tolist()
        runs = []
        for begin, end in zip([0, *breaks], [*breaks, len(first)], strict=True):
            number = int(first[begin])
            name, its_width, rows = self._sources[self._at(number)]
            row, inside = divmod(number - self._starts[self._at(number)], kept)
            if inside or its_width != width or row + end - begin > rows:
                raise NotRows
            runs.append(ElementRun(begin * width, name, row * width, (end - begin) * width))
        return ((*tags.shape[:-1], width) if kept == 2 else tuple(tags.shape)), tuple(runs)

    def _at(self, number: int) -> int:
        """Return the index of the tensor that has row `number`."""
        at = bisect.bisect_right(self._starts, number) - 1
        if at < 0:
            raise NotRows
        return at


def whole(name: str, shape: Shape) -> Runs:
    """Return the runs of a tensor that equals one other tensor, element for element."""
    return (ElementRun(0, name, 0, numel_of(shape)),)


def overlapping(runs: Sequence[ElementRun], start: int, stop: int) -> Iterable[ElementRun]:
    """Yield the parts of `runs` inside elements `[start, stop)`. `runs`: in order of `at`, without
    gaps.
    """
    at = max(0, bisect.bisect_right(runs, start, key=lambda run: run.at) - 1)
    while at < len(runs) and runs[at].at < stop:
        run, at = runs[at], at + 1
        begin, end = max(run.at, start), min(run.at + run.length, stop)
        if begin < end:
            yield ElementRun(begin, run.name, run.start + begin - run.at, end - begin)


# -- transformers' rules ---------------------------------------------------------------------------


def is_transformers(module: nn.Module) -> bool:
    """Return whether `module` is a transformers model. Does not import transformers."""
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


class Rules:
    """transformers' renamings and converters for one model, of loading or of saving."""

    def __init__(self, module: nn.Module, saving: bool) -> None:
        self.module: Any = module
        self.loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module(
            "transformers.conversion_mapping"
        ).get_model_conversion_mapping
        if saving:
            # Reverse the rules by which the weights were loaded. For a model that was never loaded,
            # reverse those by which it would be, except changes of a prefix: its files may or may
            # not have had that prefix.
            used = getattr(module, "_weight_conversions", None)
            if used is None:
                known, prefix = mapping(module, add_legacy=False), self.loading.PrefixChange
                used = [c for c in known if not isinstance(c, prefix)]
            self.rules = [c.reverse_transform() for c in reversed(used)]
        else:
            self.rules = list(mapping(module))
        self.renamings = [c for c in self.rules if isinstance(c, self.loading.WeightRenaming)]
        self.converters = [c for c in self.rules if isinstance(c, self.loading.WeightConverter)]
        self._by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}

    def order(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=self.loading.dot_natural_key)

    def converter(self, pattern: str) -> Any:
        return copy.deepcopy(self._by_pattern[pattern])

    def run(
        self, converter: Any, first: str, shapes: Mapping[str, Shape]
    ) -> dict[str, torch.Tensor]:
        config = self.module.config
        made = converter.convert(first, model=_Shapes(shapes, config), config=config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def remember(self) -> None:
        """Record in the model by which rules its weights were loaded. Saving reverses them."""
        self.module._weight_conversions = [c for c in self.rules if c.was_used()]


class _Shapes:
    """A stand-in for the model, for converters that ask for whole shapes. A sharded model's
    parameters do not have them.
    """

    def __init__(self, shapes: Mapping[str, Shape], config: Any) -> None:
        self._shapes, self.config = shapes, config

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


def rules_of(module: nn.Module, saving: bool) -> Rules | None:
    """Return transformers' rules for a model; None if names do not change. This is so for other
    models and for transformers before version 5.
    """
    if not is_transformers(module):
        return None
    try:
        return Rules(module, saving)
    except ImportError:
        return None


@dataclass
class Layout:
    """How the tensors of one side (model or folder) are made of those of the other.

    Attributes:
        made: {name on this side: (shape, runs of the other side's tensors)}.
        left: names of the other side without a place on this side.
    """

    made: dict[str, tuple[Shape, Runs]]
    left: list[str]
    rules: Rules | None = None

    @classmethod
    def as_it_is(cls, shapes: Mapping[str, Shape]) -> Layout:
        """Return a layout with the same tensors on both sides."""
        return cls({name: (shape, whole(name, shape)) for name, shape in shapes.items()}, [])


def reading(
    stored: Mapping[str, Shape], expected: Mapping[str, Shape], module: nn.Module
) -> Layout:
    """Return how the model's tensors (`expected`) are made of the folder's (`stored`).
    Raises: NotStreamed: a rule of transformers does more than move rows.
    """
    rules = rules_of(module, saving=False)
    prefix = getattr(module, "base_model_prefix", "") if is_transformers(module) else ""
    out = Layout({}, [], rules)
    groups: dict[str, tuple[Any, Tags]] = {}
    for key in rules.order(stored) if rules else sorted(stored):
        name, pattern = _renamed(key, rules)
        name = _prefixed(name, prefix, expected)
        if name not in expected and (plain := _prefixed(key, prefix, expected)) in expected:
            name, pattern = plain, None
        if name not in expected:
            out.left.append(key)
        elif pattern is None or rules is None:
            out.made.setdefault(name, (stored[key], whole(key, stored[key])))
        else:
            converter, tags = groups.setdefault(name, (rules.converter(pattern), Tags()))
            converter.add_tensor(name, key, pattern, tags.add(key, stored[key]))
    for first, (converter, tags) in groups.items():
        assert rules is not None
        try:
            made = rules.run(converter, first, expected)
            for name, value in made.items():
                out.made[name] = tags.trace(value)
        except (NotRows, RuntimeError, ValueError, KeyError, IndexError) as error:
            raise NotStreamed(
                f"{first!r} of the model is computed from"
                f" {', '.join(map(repr, converter.source_patterns[:3]))} of the folder by more than"
                f" moving rows ({converter.operations}), which cannot be"
                f" streamed{f' ({error})' if str(error) else ''}. Load the model with"
                " from_pretrained on rank 0 and shard that."
            ) from None
    out.left += [name for name in out.made if name not in expected]
    out.made = {name: made for name, made in out.made.items() if name in expected}
    return out


def writing(shapes: Mapping[str, Shape], module: nn.Module) -> Layout:
    """Return how the folder's tensors are made of the model's (`shapes`), so that the folder equals
    one written by `save_pretrained`.

    If a rule does more than move rows, its tensors keep the model's names and are listed in `left`.
    `from_pretrained` opens such a folder too.
    """
    rules = rules_of(module, saving=True)
    if rules is None or not rules.rules:
        return Layout.as_it_is(shapes)
    out = Layout({}, [], rules)
    groups: dict[str, tuple[Any, Tags, list[str]]] = {}
    for name in rules.order(shapes):
        renamed, pattern = rules.loading.apply_converters(name, rules.converters)
        if pattern is None:
            key = rules.loading.apply_renamings(name, rules.renamings)
            out.made[key] = shapes[name], whole(name, shapes[name])
            continue
        converter, tags, names = groups.setdefault(renamed, (rules.converter(pattern), Tags(), []))
        converter.add_tensor(renamed, name, pattern, tags.add(name, shapes[name]))
        names.append(name)
    for first, (converter, tags, names) in groups.items():
        try:
            made = {
                rules.loading.apply_renamings(key, rules.renamings): tags.trace(value)
                for key, value in rules.run(converter, first, shapes).items()
            }
            if not _tiles(made, {name: shapes[name] for name in names}):
                raise NotRows
        except (NotRows, RuntimeError, ValueError, KeyError, IndexError):
            out.left += names
            made = Layout.as_it_is({name: shapes[name] for name in names}).made
        out.made |= made
    return out


def _renamed(key: str, rules: Rules | None) -> tuple[str, str | None]:
    if rules is None:
        return key, None
    found: tuple[str, str | None] = rules.loading.rename_source_key(
        key, rules.renamings, rules.converters
    )
    return found


def _prefixed(name: str, prefix: str, expected: Mapping[str, Shape]) -> str:
    """Return `name` without or with the base model's prefix, whichever name the model has."""
    if not prefix:
        return name
    without = name.removeprefix(prefix + ".")
    if without != name and without in expected:
        return without
    return f"{prefix}.{name}" if f"{prefix}.{name}" in expected else name


def _tiles(made: Mapping[str, tuple[Shape, Runs]], of: Mapping[str, Shape]) -> bool:
    """Return whether `made` contains every element of the tensors `of` exactly once."""
    runs = sorted((run.name, run.start, run.length) for _, runs in made.values() for run in runs)
    at: dict[str, int] = dict.fromkeys(of, 0)
    for name, start, length in runs:
        if at.get(name) != start:
            return False
        at[name] = start + length
    return all(at[name] == numel_of(shape) for name, shape in of.items())
