"""What tensors a model consists of, and how elements of a Hugging Face folder's tensors are mapped to
theirs, and back.

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
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.state.dicts import contents

Shape = tuple[int, ...]


# -- a model's tensors -----------------------------------------------------------------------------

#: The tensors of a model by name, in the order of its state dict: `nn.Parameter` and buffers. A tied
#: parameter is one object under all its names. Of a sharded model they are stand-ins on the meta
#: device, with logical shapes.
Outline = dict[str, Tensor]


def outline_of(module: nn.Module, masters: bool = False) -> Outline:
    """Return the outline of a model. Of a sharded one, with compute dtypes, or with those of the
    master weights.
    """
    if not is_sharded(module):
        held = module.state_dict(keep_vars=True).items()
        return {name: value for name, value in held if isinstance(value, Tensor)}
    out, parameters = Outline(), dict[Entry, Tensor]()
    for name, (value, entry) in contents(engine_of(module), module).items():
        if entry is not None:
            dtypes = entry.flat.dtypes
            like = stand_in(entry.shape, dtypes.master if masters else dtypes.compute)
            parameter = parameters.setdefault(entry, nn.Parameter(like, requires_grad=False))
            # A hook of the module may have renamed it
            out[name if name in entry.names else entry.name] = parameter
        elif isinstance(value, Tensor):
            out[name] = stand_in(value.shape, value.dtype)
    return out


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ties(outline: Outline) -> list[list[str]]:
    """Return all names of each tensor; the first is its main name."""
    out: dict[Any, list[str]] = {}
    for name, like in outline.items():
        out.setdefault(id(like) if isinstance(like, nn.Parameter) else name, []).append(name)
    return list(out.values())


def joined(outlines: Iterable[Outline]) -> Outline:
    """Return the outline of a pipeline, whose stages may have buffers of the same names."""
    out: Outline = {}
    for outline in outlines:
        new = {name for names in ties(outline) if names[0] not in out for name in names}
        out |= {name: like for name, like in outline.items() if name in new}
    return out


# -- rows ------------------------------------------------------------------------------------------


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


def traced(
    shapes: Mapping[str, Shape], convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, tuple[Shape, Runs]]:
    """Return the shape of each tensor that `convert` makes of tensors of these shapes, and the runs
    that it consists of. See [Note: rows are tagged].

    Raises:
        NotRows, IndexError: they are not made of whole rows of one width.
    """
    widths = {shape[-1] if len(shape) > 1 else 1 for shape in shapes.values()}
    if len(widths) > 1:
        raise NotRows
    (width,) = widths
    kept = min(2, width)  # numbers of a row
    tagged: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        like = (*shape[:-1], kept) if len(shape) > 1 else shape
        tagged[name] = torch.arange(numel_of(like), device="cpu").view(like) + number * _APART
    names, made = list(shapes), dict[str, tuple[Shape, Runs]]()
    for name, tags in convert(tagged).items():
        flat, shape, runs = tags.reshape(-1), tuple(tags.shape), []
        breaks = (torch.nonzero(flat[1:] != flat[:-1] + 1).reshape(-1) + 1).tolist()
        for begin, end in pairwise([0, *breaks, len(flat)]) if len(flat) else ():
            of, at = divmod(int(flat[begin]), _APART)
            if of < 0 or begin % kept or end % kept or at % kept:
                raise NotRows
            begin, end, at = (n // kept * width for n in (begin, end, at))
            runs.append(ElementRun(begin, names[of], at, end - begin))
        if width > 1:
            if shape[-1] % 2:
                raise NotRows
            shape = (*shape[:-1], shape[-1] // 2 * width)
        made[name] = shape, tuple(runs)
    return made


def same(name: str, shape: Shape) -> Runs:
    """Return the runs of a tensor that equals one other tensor, element for element."""
    return (ElementRun(0, name, 0, numel_of(shape)),)


# -- transformers' rules ---------------------------------------------------------------------------


def is_transformers(module: nn.Module) -> bool:
    """Return whether `module` is a transformers model. Does not import transformers."""
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


class Rules:
    """transformers' renamings and converters for one model, of loading or of saving."""

    def __init__(self, module: nn.Module, saving: bool) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.module: Any = module
        self.loading: Any = core_model_loading
        mapping: Any = conversion_mapping.get_model_conversion_mapping
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
        likes: Outline,
    ) -> dict[str, Tensor]:
        """Return what one converter makes of the values of `sources`, (name, pattern). `likes`:
        stand-ins for the model's tensors. A sharded model's parameters do not tell their shapes.
        """
        converter = copy.deepcopy(self.by_pattern[sources[0][1]])
        for name, pattern in sources:
            converter.add_tensor(first, name, pattern, values[name])
        config = self.module.config
        model = SimpleNamespace(get_parameter=likes.__getitem__, config=config)
        made = converter.convert(first, model=model, config=config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}

    def incoming(self, key: str, expected: Outline) -> tuple[str, str | None]:
        """Return the name in the model of the folder's tensor `key`, and the pattern of the converter
        that takes it, if any.
        """
        rename, prefix = self.loading.rename_source_key, self.module.base_model_prefix or None
        found: tuple[str, str | None] = rename(
            key, self.renamings, self.converters, prefix, expected
        )
        if found[0] not in expected:  # the folder may have the model's own names
            plain: str = rename(key, [], [], prefix, expected)[0]
            found = (plain, None) if plain in expected else found
        return found

    def remember(self) -> None:
        """Record in the model by which rules its weights were loaded. Saving reverses them."""
        self.module._weight_conversions = [c for c in self.rules if c.was_used()]


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write.

    Attributes:
        like: stands in for it, on the meta device: shape and dtype.
        make: returns it whole on the first of the ranks that have parts of it, None on the others.
            Collective over these. None: this rank has no part.
        held: the part of it that this rank writes. None: it is written whole.
    """

    like: Tensor
    make: Callable[[], Tensor | None] | None
    held: Held | None = None

    def written(self) -> Iterable[Tensor]:
        """Return what this rank writes, in order. Collective if the tensor is written whole."""
        if self.held is not None:
            return self.held.values()
        whole = None if self.make is None else self.make()
        return () if whole is None else (whole,)


def reading(
    stored: Mapping[str, Shape], expected: Outline, module: nn.Module
) -> tuple[dict[str, tuple[Shape, Runs]], list[str], Rules | None]:
    """Return how the model's tensors (`expected`) are made of the folder's (`stored`): {name in the
    model: (shape, runs of the folder's tensors)}, names in the folder without a place in the model,
    and the rules.

    Raises: NotStreamed: a rule of transformers does more than move rows.
    """
    rules = Rules(module, saving=False) if is_transformers(module) else None
    made, left = dict[str, tuple[Shape, Runs]](), list[str]()
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=rules.loading.dot_natural_key if rules else None):
        name, pattern = (key, None) if rules is None else rules.incoming(key, expected)
        if name not in expected:
            left.append(key)
        elif pattern is None:
            made.setdefault(name, (stored[key], same(key, stored[key])))
        else:
            groups.setdefault(name, []).append((key, pattern))
    for first, sources in groups.items():
        assert rules is not None
        convert = partial(rules.convert, first, sources, likes=expected)
        try:
            made |= traced({key: stored[key] for key, _ in sources}, convert)
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
    rules = Rules(module, saving=True)
    if not rules.rules:
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
    own = {name: tensor.like for name, tensor in tensors.items()}
    names = [name for name, _ in sources]

    def convert(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = rules.convert(first, sources, values, own)
        return {rules.loading.apply_renamings(k, rules.renamings): v for k, v in found.items()}

    try:
        likes = convert(own)
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
        key: Outgoing(like, partial(make, key) if here else None) for key, like in likes.items()
    }
