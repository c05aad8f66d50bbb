"""Outlines: the tensors that a model consists of. `Fitted`: a source whose tensors are converted to
the names and shapes of a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import Item, Source, Stored
from onefold.pretrained.hf_names import Runs, Shape, overlapping
from onefold.runtime.flat import Entry
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.state.dicts import contents

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
        for names in ties(outline):
            if names[0] not in out:
                out |= {name: outline[name] for name in names}
    return out


def unwrapped(module: nn.Module, names: Iterable[str]) -> tuple[nn.Module, dict[str, str]]:
    """Return the model inside peft's wrappers, and {name in `module`: name in the inner model}."""
    inner: Any = getattr(module, "get_base_model", None) if hasattr(module, "peft_config") else None
    base: nn.Module = inner() if callable(inner) else module
    adapters = tuple(
        f"{path}.{part}." if path else f"{part}."
        for path, m in module.named_modules()
        for part in (
            *(getattr(m, "adapter_layer_names", None) or ()),
            *(getattr(m, "other_param_names", None) or ()),
        )
    )
    prefix = next((path + "." for path, m in module.named_modules() if m is base and path), "")
    out = {}
    for name in names:
        if not name.startswith(adapters) and name.startswith(prefix):
            plain = name.removeprefix(prefix)
            if adapters:
                # Adapters of two parameters of one module wrap each other
                plain = re.sub(r"\.((base_layer|original_module)\.)+", ".", plain)
            out[name] = plain
    return base, out


#: {attribute with peft's trained copies of a module: attribute with the original module}.
_COPIES = {"modules_to_save": "original_module", "ln_tuning_layers": "base_layer"}


def copies(module: nn.Module) -> dict[str, str]:
    """Return {parameter of a copy: same parameter of the original module} for each module that peft
    trains as a copy. The copy starts with the original's values. Only parameters on the meta device
    are returned.
    """
    return {
        f"{path}.{kept}.{adapter}.{name}": f"{path}.{original}.{name}"
        for path, wrapping in module.named_modules()
        for kept, original in _COPIES.items()
        if hasattr(wrapping, original)
        for adapter, copy in getattr(wrapping, kept, {}).items()
        for name, parameter in copy.named_parameters()
        if parameter.is_meta
    }


class Fitted(Source):
    """A source that shows another source's tensors under the names of a model.

    Args:
        source: the source of the tensors.
        outline: the outline of the model.
        made: {name in the model: the runs of the source's tensors that it consists of}.
        wanted: names of the model's tensors that the source should have.
        unexpected: tensors of the source without a place in the model.

    Attributes:
        missing: first names of those that it lacks.
        rules: transformers' rules by which names were converted, if any.
    """

    def __init__(
        self,
        source: Source,
        outline: Outline,
        made: Mapping[str, Runs],
        wanted: Set[str],
        unexpected: Iterable[str],
        rules: Any = None,
    ) -> None:
        self.source, self.folder = source, source.folder
        self.missing: list[str] = []
        self.unexpected, self.rules = sorted(unexpected), rules
        self._items: dict[Item, Stored] = {}
        self._runs: dict[Item, Runs] = {}
        self._aliases: dict[str, str] = {}
        for names in ties(outline):
            there = [name for name in names if name in made]
            if not there:
                self.missing += () if wanted.isdisjoint(names) else names[:1]
                continue
            like, runs = outline[names[0]], made[there[0]]
            item = Item("parameter" if isinstance(like, nn.Parameter) else "buffer", names[0])
            dtype = source.stored(Item("parameter", runs[0].name)).dtype if runs else like.dtype
            self._items[item], self._runs[item] = Stored(dtype, tuple(like.shape)), runs
            self._aliases |= dict.fromkeys(names[1:], names[0])
            if any(made[name] != runs for name in there):  # as transformers takes it
                logging.getLogger("onefold").warning(
                    "%s has a tensor for each of %s, which are one parameter in the model: the first"
                    " is read", source.describe, ", ".join(there),
                )  # fmt: skip

    @property
    def describe(self) -> str:
        return self.source.describe

    def items(self) -> Mapping[Item, Stored]:
        return self._items

    def close(self) -> None:
        self.source.close()

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def names(self) -> set[str]:
        """Return every name of the model for which the source has values."""
        return {item.name for item in self._items} | set(self._aliases)

    def read(self, item: Item, start: int, stop: int, out: Tensor) -> None:
        for run in overlapping(self._runs[item], start, stop):
            into = out[run.at - start : run.at - start + run.length]
            self.source.read(Item("parameter", run.name), run.start, run.start + run.length, into)


def refuse_shapes(there: Mapping[str, Shape], expected: Outline, what: str, hint: str = "") -> None:
    """Raise CheckpointError if tensors that both sides have differ in shape. The message begins
    with `what` and ends with `hint`.
    """
    wrong = [
        f"{name}: {there[name]} there, {tuple(like.shape)} in the model"
        for name, like in expected.items()
        if there.get(name, like.shape) != like.shape
    ]
    if wrong:
        raise CheckpointError(f"{what} {'; '.join(wrong[:5])}.{hint}")
