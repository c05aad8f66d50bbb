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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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


#: The numbers of two tensors are at least so far apart; no tensor has as many rows.
_APART = 1 << 40


class NotRows(Exception):
    """Raised when a rule of transformers does more than move rows."""


class Tags:
    """The row numbers given to tensors; see [Note: rows are tagged]."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, int, int]] = []  # name, elements in a row, rows

    def add(self, name: str, shape: Shape) -> torch.Tensor:
        """Number the rows of tensor `name` of `shape`. Returns its stand-in, int64 [..., at most
        2].
        """
        width = shape[-1] if len(shape) > 1 else 1
        kept, rows = min(2, width), numel_of(shape) // max(1, width)
        numbers = torch.arange(rows * kept, device="cpu") + len(self._sources) * _APART
        self._sources.append((name, width, rows))
        return numbers.view((*shape[:-1], kept) if len(shape) > 1 else shape)

    def trace(self, tags: torch.Tensor) -> tuple[Shape, Runs]:
        """Return the shape of the tensor that `tags` represents, and the runs it is made of.
        Raises: NotRows, IndexError: it is not made of whole rows.
        """
        flat = tags.reshape(-1)
        if not flat.numel():
            return tuple(tags.shape), ()
        _, width, _ = self._sources[int(flat[0]) // _APART]
        kept = min(2, width)
        first = flat[::kept]
        if kept == 2 and (tags.shape[-1] != 2 or not torch.equal(flat[1::2], first + 1)):
            raise NotRows
        breaks = (torch.nonzero(first[1:] != first[:-1] + kept).reshape(-1) + 1).tolist()
        runs = []
        for begin, end in zip([0, *breaks], [*breaks, len(first)], strict=True):
            of, at = divmod(int(first[begin]), _APART)
            (name, its_width, rows), (row, inside) = self._sources[of], divmod(at, kept)
            if of < 0 or inside or its_width != width or row + end - begin > rows:
                raise NotRows
            runs.append(ElementRun(begin * width, name, row * width, (end - begin) * width))
        return ((*tags.shape[:-1], width) if kept == 2 else tuple(tags.shape)), tuple(runs)


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


@dataclass(frozen=True)
class Whole:
    """A tensor to write.

    Attributes:
        like: a stand-in on the meta device.
        make: returns the tensor on the rank that writes it, None on others that have parts of it.
            Collective over these. None: this rank has no part.
        owner: the rank that writes it.
    """

    like: torch.Tensor
    make: Callable[[], torch.Tensor | None] | None
    owner: int = 0

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, make: Any, owner: int = 0) -> Whole:
        return cls(torch.empty(shape, dtype=dtype, device="meta"), make, owner)

    @property
    def nbytes(self) -> int:
        return self.like.numel() * self.like.itemsize


@dataclass
class Layout:
    """How a model's tensors are made of a folder's.

    Attributes:
        made: {name in the model: (shape, runs of the folder's tensors)}.
        left: names in the folder without a place in the model.
    """

    made: dict[str, tuple[Shape, Runs]]
    left: list[str]
    rules: Rules | None = None


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


def writing(tensors: Mapping[str, Whole], module: nn.Module) -> dict[str, Whole]:
    """Return the folder's tensors, made of the model's (`tensors`), so that the folder equals one
    written by `save_pretrained`.
    """
    rules = rules_of(module, saving=True)
    if rules is None or not rules.rules:
        return dict(tensors)
    out: dict[str, Whole] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in rules.order(tensors):
        renamed, pattern = rules.loading.apply_converters(name, rules.converters)
        if pattern is None:
            out[rules.loading.apply_renamings(name, rules.renamings)] = tensors[name]
        else:
            groups.setdefault(renamed, []).append((name, pattern))
    for first, sources in groups.items():
        out |= _made_together(rules, first, sources, tensors)
    return out


def _made_together(
    rules: Rules, first: str, sources: list[tuple[str, str]], tensors: Mapping[str, Whole]
) -> dict[str, Whole]:
    """Return what one converter makes of `sources`, (name, pattern): on stand-ins now, on whole
    tensors when the first of them is written. If it needs values for the shapes, they keep the
    model's names; `from_pretrained` opens such a folder too.
    """
    shapes = {name: tuple(tensor.like.shape) for name, tensor in tensors.items()}

    def convert(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = rules.converter(sources[0][1])
        for name, pattern in sources:
            converter.add_tensor(first, name, pattern, values[name])
        found = rules.run(converter, first, shapes)
        return {rules.loading.apply_renamings(k, rules.renamings): v for k, v in found.items()}

    try:
        likes = convert({name: tensors[name].like for name, _ in sources})
    except (RuntimeError, ValueError, KeyError, IndexError, NotImplementedError):
        return {name: tensors[name] for name, _ in sources}
    made: dict[str, torch.Tensor | None] = {}

    def make(key: str) -> torch.Tensor | None:
        if not made:
            values = {name: tensors[name].make() for name, _ in sources}  # type: ignore[misc]
            made.update(dict.fromkeys(likes))  # an error must not make this rank ask again
            here = {name: value for name, value in values.items() if value is not None}
            made.update(convert(here) if here else {})
        return made.pop(key)

    whole = tensors[sources[0][0]]
    return {
        key: Whole(like, None if whole.make is None else partial(make, key), whole.owner)
        for key, like in likes.items()
    }


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
