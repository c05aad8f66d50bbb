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

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.errors import NotStreamed
from onefold.checkpoint.parts import Held
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
        self._sources: list[tuple[str, int]] = []  # name, elements in a row

    def add(self, name: str, shape: Shape) -> Tensor:
        """Number the rows of tensor `name` of `shape`. Returns its stand-in, int64 [..., at most
        2].
        """
        width = shape[-1] if len(shape) > 1 else 1
        like = (*shape[:-1], min(2, width)) if len(shape) > 1 else shape
        numbers = torch.arange(numel_of(like), device="cpu") + len(self._sources) * _APART
        self._sources.append((name, width))
        return numbers.view(like)

    def trace(self, tags: Tensor) -> tuple[Shape, Runs]:
        """Return the shape of the tensor that `tags` represents, and the runs it is made of.
        Raises: NotRows, IndexError: it is not made of whole rows.
        """
        flat, shape = tags.reshape(-1), tuple(tags.shape)
        breaks = (torch.nonzero(flat[1:] != flat[:-1] + 1).reshape(-1) + 1).tolist()
        runs, widths = [], set()
        for begin, end in pairwise([0, *breaks, len(flat)]) if len(flat) else ():
            of, at = divmod(int(flat[begin]), _APART)
            name, width = self._sources[of]
            kept = min(2, width)  # numbers of a row
            if of < 0 or begin % kept or end % kept or at % kept:
                raise NotRows
            widths.add(width)
            at, start, length = (n // kept * width for n in (begin, at, end - begin))
            runs.append(ElementRun(at, name, start, length))
        width = max(widths, default=1)
        if len(widths) > 1 or (width > 1 and shape[-1] % 2):
            raise NotRows
        if width > 1:
            shape = (*shape[:-1], shape[-1] // 2 * width)
        return shape, tuple(runs)


def whole(name: str, shape: Shape) -> Runs:
    """Return the runs of a tensor that equals one other tensor, element for element."""
    return (ElementRun(0, name, 0, numel_of(shape)),)


def overlapping(runs: Sequence[ElementRun], start: int, stop: int) -> Iterable[ElementRun]:
    """Yield the parts of `runs` inside elements `[start, stop)`."""
    for run in runs:
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
        self.by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}

    def convert(
        self,
        first: str,
        sources: Sequence[tuple[str, str]],
        values: Mapping[str, Tensor],
        shapes: Mapping[str, Shape],
    ) -> dict[str, Tensor]:
        """Return what one converter makes of the values of `sources`, (name, pattern). `shapes`:
        those of the model's tensors. A sharded model's parameters do not tell them.
        """
        converter = copy.deepcopy(self.by_pattern[sources[0][1]])
        for name, pattern in sources:
            converter.add_tensor(first, name, pattern, values[name])

        def whole(name: str) -> Tensor:
            return torch.empty(shapes[name], device="meta")

        config = self.module.config
        model = SimpleNamespace(get_parameter=whole, config=config)
        made = converter.convert(first, model=model, config=config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def remember(self) -> None:
        """Record in the model by which rules its weights were loaded. Saving reverses them."""
        self.module._weight_conversions = [c for c in self.rules if c.was_used()]


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
class Outgoing:
    """A tensor to write.

    Attributes:
        make: returns it whole on the first of the ranks that have parts of it, None on the others.
            Collective over these. None: this rank has no part.
        held: the part of it that this rank writes. None: it is written whole.
    """

    dtype: torch.dtype
    shape: Shape
    make: Callable[[], Tensor | None] | None
    held: Held | None = None

    @property
    def nbytes(self) -> int:
        return numel_of(self.shape) * self.dtype.itemsize

    def written(self) -> Iterable[Tensor]:
        """Return what this rank writes, in order. Collective if the tensor is written whole."""
        if self.held is not None:
            return self.held.values()
        whole = None if self.make is None else self.make()
        return () if whole is None else (whole,)


def reading(
    stored: Mapping[str, Shape], expected: Mapping[str, Shape], module: nn.Module
) -> tuple[dict[str, tuple[Shape, Runs]], list[str], Rules | None]:
    """Return how the model's tensors (`expected`) are made of the folder's (`stored`): {name in the
    model: (shape, runs of the folder's tensors)}, names in the folder without a place in the model,
    and the rules.

    Raises: NotStreamed: a rule of transformers does more than move rows.
    """
    rules = rules_of(module, saving=False)
    prefix = getattr(module, "base_model_prefix", "") if is_transformers(module) else ""
    made, left = dict[str, tuple[Shape, Runs]](), list[str]()
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=rules.loading.dot_natural_key if rules else None):
        name, pattern = key, None
        if rules is not None:
            name, pattern = rules.loading.rename_source_key(key, rules.renamings, rules.converters)
        name = _prefixed(name, prefix, expected)
        if name not in expected and (plain := _prefixed(key, prefix, expected)) in expected:
            name, pattern = plain, None
        if name not in expected:
            left.append(key)
        elif pattern is None:
            made.setdefault(name, (stored[key], whole(key, stored[key])))
        else:
            groups.setdefault(name, []).append((key, pattern))
    for first, sources in groups.items():
        assert rules is not None
        tags = Tags()
        try:
            numbers = {key: tags.add(key, stored[key]) for key, _ in sources}
            for name, value in rules.convert(first, sources, numbers, expected).items():
                made[name] = tags.trace(value)
        except (NotRows, RuntimeError, ValueError, KeyError, IndexError) as error:
            raise NotStreamed(
                f"{first!r} of the model is computed from"
                f" {', '.join(repr(pattern) for _, pattern in sources[:3])} of the folder by more than"
                f" moving rows ({rules.by_pattern[sources[0][1]].operations}), which cannot be"
                f" streamed{f' ({error})' if str(error) else ''}. Load the model with"
                " from_pretrained on rank 0 and shard that."
            ) from None
    left += [name for name in made if name not in expected]
    return {name: of for name, of in made.items() if name in expected}, left, rules


def writing(tensors: Mapping[str, Outgoing], module: nn.Module) -> dict[str, Outgoing]:
    """Return the folder's tensors, made of the model's (`tensors`), so that the folder equals one
    written by `save_pretrained`.
    """
    rules = rules_of(module, saving=True)
    if rules is None or not rules.rules:
        return dict(tensors)
    out: dict[str, Outgoing] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(tensors, key=rules.loading.dot_natural_key):
        renamed, pattern = rules.loading.apply_converters(name, rules.converters)
        if pattern is None:
            out[rules.loading.apply_renamings(name, rules.renamings)] = tensors[name]
        else:
            groups.setdefault(renamed, []).append((name, pattern))
    for first, sources in groups.items():
        out |= _made_together(rules, first, sources, tensors)
    return out


def _made_together(
    rules: Rules, first: str, sources: list[tuple[str, str]], tensors: Mapping[str, Outgoing]
) -> dict[str, Outgoing]:
    """Return what one converter makes of `sources`: on stand-ins now, on whole tensors when the first
    of them is written. If it needs values for the shapes, they keep the model's names;
    `from_pretrained` opens such a folder too.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    names = [name for name, _ in sources]

    def convert(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = rules.convert(first, sources, values, shapes)
        return {rules.loading.apply_renamings(k, rules.renamings): v for k, v in found.items()}

    try:
        likes = convert(
            {n: torch.empty(shapes[n], dtype=tensors[n].dtype, device="meta") for n in names}
        )
    except (RuntimeError, ValueError, KeyError, IndexError, NotImplementedError):
        return {name: tensors[name] for name in names}
    made: dict[str, Tensor | None] = {}

    def make(key: str) -> Tensor | None:
        if not made:
            values = {n: tensor.make() for n in names if (tensor := tensors[n]).make is not None}
            made.update(dict.fromkeys(likes))  # an error must not make this rank ask again
            if any(value is not None for value in values.values()):
                made.update(convert(values))  # type: ignore[arg-type]
        return made.pop(key)

    here = any(tensors[name].make is not None for name in names)
    return {
        key: Outgoing(like.dtype, tuple(like.shape), partial(make, key) if here else None)
        for key, like in likes.items()
    }


def _prefixed(name: str, prefix: str, expected: Mapping[str, Shape]) -> str:
    """Return `name` without or with the base model's prefix, whichever name the model has."""
    if not prefix:
        return name
    without = name.removeprefix(prefix + ".")
    if without != name and without in expected:
        return without
    return f"{prefix}.{name}" if f"{prefix}.{name}" in expected else name
