"""`Outline`: the tensors that a model consists of. `Fitted`: a source whose tensors are converted
to the names and shapes of a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import Item, Source, Stored
from onefold.pretrained.hf_names import Runs, Shape, overlapping
from onefold.runtime.hooks import engine_of, is_sharded
from onefold.runtime.parameters.parameter import disable_torch_function
from onefold.runtime.state.dicts import contents


@dataclass
class Outline:
    """The tensors of a model, sharded or not, also on the meta device.

    Attributes:
        tensors: {name: (kind, logical shape)} in the order of its state dict.
        dtypes: {name: its compute dtype}.
        ties: all names of each tensor; the first is its main name.
    """

    tensors: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Outline:
        out = cls()
        engine = engine_of(module) if is_sharded(module) else None
        ties: dict[Any, list[str]] = {}
        with disable_torch_function():
            held: Any = (
                contents(engine, module)
                if engine
                else {n: (value, None) for n, value in module.state_dict(keep_vars=True).items()}
            )
            for name, (value, entry) in held.items():
                if not isinstance(value, torch.Tensor):
                    continue
                is_parameter = entry is not None or isinstance(value, nn.Parameter)
                shape, dtype = value.shape, value.dtype
                if entry is not None:
                    shape, dtype = entry.shape, entry.flat.dtypes.compute
                    if name not in entry.names:  # a hook of the module has renamed it
                        name = entry.name
                kind = "parameter" if is_parameter else "buffer"
                out.tensors[name], out.dtypes[name] = (kind, tuple(shape)), dtype
                ties.setdefault(id(value) if is_parameter else name, []).append(name)
        out.ties = list(ties.values())
        return out

    def add(self, other: Outline) -> None:
        """Add the tensors of another stage, which may have buffers of the same names."""
        self.ties += [names for names in other.ties if names[0] not in self.tensors]
        self.tensors |= {n: what for n, what in other.tensors.items() if n not in self.tensors}
        self.dtypes |= other.dtypes


def unwrapped(module: nn.Module, outline: Outline) -> tuple[nn.Module, dict[str, str]]:
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
    for name in outline.tensors:
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
        unexpected: tensors of the source without a place in the model.

    Attributes:
        missing: first names of the model's tensors that the source lacks.
        rules: transformers' rules by which names were converted, if any.
    """

    def __init__(
        self,
        source: Source,
        outline: Outline,
        made: Mapping[str, Runs],
        unexpected: Iterable[str] = (),
        rules: Any = None,
    ) -> None:
        self.source, self.folder = source, source.folder
        self.missing: list[str] = []
        self.unexpected, self.rules = sorted(unexpected), rules
        self._items: dict[Item, Stored] = {}
        self._runs: dict[Item, Runs] = {}
        self._aliases: dict[str, str] = {}
        for names in outline.ties:
            kind, shape = outline.tensors[names[0]]
            there = [name for name in names if name in made]
            if not there:
                self.missing.append(names[0])
                continue
            item, runs = Item(kind, names[0]), made[there[0]]
            dtype = outline.dtypes[names[0]]
            if runs:
                dtype = source.stored(Item("parameter", runs[0].name)).dtype
            self._items[item], self._runs[item] = Stored(dtype, shape), runs
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

    def read(self, item: Item, start: int, stop: int, out: torch.Tensor) -> None:
        for run in overlapping(self._runs[item], start, stop):
            into = out[run.at - start : run.at - start + run.length]
            self.source.read(Item("parameter", run.name), run.start, run.start + run.length, into)


def refuse_shapes(
    there: Mapping[str, Shape], expected: Mapping[str, Shape], what: str, hint: str = ""
) -> None:
    """Raise CheckpointError if tensors that both sides have differ in shape. The message begins
    with `what` and ends with `hint`.
    """
    wrong = [
        f"{name}: {there[name]} there, {shape} in the model"
        for name, shape in expected.items()
        if there.get(name, shape) != shape
    ]
    if wrong:
        raise CheckpointError(f"{what} {'; '.join(wrong[:5])}.{hint}")
