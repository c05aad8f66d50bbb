"""Export a sharded peft model with its LoRA adapters added to the base model's weights.

    adapters on disk     lora_A [r, in], lora_B [out, r]      every rank reads them, one layer at a time
    this rank's interval of a weight [out, in]                the product is computed for whole rows
        W[rows] + s · B[rows] @ A                             a few MiB at a time, into the files

The base weights are those of the run. Encoded weights are decoded: the adapters were trained with
the decoded values. No rank holds more than its shard, one unit's decoded shard, one layer's
adapters and a few MiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import Item, closed_on_error
from onefold.checkpoint.tensorfile import CHUNK
from onefold.checkpoint.together import Together
from onefold.pretrained.adapters import FILES, adapter_names
from onefold.pretrained.export import (
    MAX_SHARD_BYTES,
    first_dtype,
    masters,
    plan,
    save_configuration,
    stream,
)
from onefold.pretrained.fitted import Outline, unwrapped
from onefold.pretrained.hf_names import Shape
from onefold.pretrained.huggingface import HuggingFaceSource
from onefold.pretrained.streams import Pieces, Progress, Sheet
from onefold.runtime.hooks import engine_of


def export_merged(
    model: nn.Module,
    adapters: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a sharded peft model as a transformers model, with the adapters added to its weights.
    Collective.

    Args:
        model: the return value of `onefold.shard` for a PeftModel with LoRA adapters, or for a
            transformers model after `add_adapter`. Biases and modules that are trained too
            (`bias="all"`, `modules_to_save`) are written with the model's values.
        adapters: the folder that `onefold.save_adapters` has written for this model. Every rank
            reads it.
        folder: the folder to create.
        dtype: dtype of floating-point parameters in the files. None for each parameter's master
            dtype.
        max_shard_bytes: as for `onefold.export`.
        progress: the same.
        tokenizer: the same.
        overwrite: the same.

    Raises:
        CheckpointError: on every rank: the adapters do more than add B·A to weights of linear
            layers (DoRA, embeddings), `folder` exists, or the disk has no space.
    """
    together = Together.of(engine_of(model))
    base, names, inside = _base_of(model)
    layers: dict[str, Layer] = {}

    def sheet() -> Sheet:
        layers.update(_layers(model, names, inside))
        return plan(inside, base, dtype, max_shard_bytes)

    def beside(there: Path) -> None:
        save_configuration(base, dtype or first_dtype(inside), there)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(there))

    def added(pieces: Pieces) -> Iterator[tuple[str, int, torch.Tensor]]:
        nothing = torch.empty(0, device="cpu")
        last, factors = "", (nothing, nothing)
        with closed_on_error(HuggingFaceSource(adapters, FILES)) as source:
            for name, start, data in pieces:
                if name not in layers:
                    yield name, start, data
                    continue
                if name != last:  # the rows of one weight follow each other
                    last, factors = name, layers[name].factors(source)
                yield from layers[name].added(*factors, name, start, data)
            source.close()

    return stream(
        [model], together, Path(folder), sheet, beside, progress, overwrite, change=added, renamed=names
    )  # fmt: skip


def _base_of(model: nn.Module) -> tuple[nn.Module, dict[str, str], Outline]:
    """Return (the base model below the adapters, {name in `model`: name in the base model}, the
    base model's outline).

    For a module that the adapter saves whole (peft's modules_to_save), the names are those of the
    trained copy.
    """
    outline = Outline.of(model)
    outline.dtypes |= masters(engine_of(model))
    base, names = unwrapped(model, outline)
    adapter = active_of(model)
    for path, module in model.named_modules():
        if not hasattr(module, "original_module") or adapter not in module.modules_to_save:
            continue
        original, copy = f"{path}.original_module.", f"{path}.modules_to_save.{adapter}."
        for own in [own for own in names if own.startswith(original)]:
            tied = next(tied for tied in outline.ties if own in tied)
            if len(tied) > 1:
                raise CheckpointError(
                    f"the adapter saves {path!r} whole, and its weight is tied in the base model"
                    f" ({', '.join(tied)}): merged, the two would be one again. Untie them"
                    " (tie_word_embeddings=False) before the adapters are made."
                )
            plain = names.pop(own)
            if (saved := copy + own.removeprefix(original)) in outline.tensors:
                names[saved] = plain
    inside = Outline(
        {names[n]: what for n, what in outline.tensors.items() if n in names},
        {names[n]: what for n, what in outline.dtypes.items() if n in names},
        [[names[n] for n in tied] for tied in outline.ties if tied[0] in names],
    )
    return base, names, inside


@dataclass(frozen=True)
class Merging:
    """The adapters that `onefold.stream_params` adds to weights.

    Attributes:
        names: {name in the model: name in its base model}. Other names belong to adapters.
        layers: {name in the base model: the adapter of this weight}.
        factors: {name in the base model: (name of the weight's A, name of its B, in the model)}.
    """

    names: dict[str, str]
    layers: dict[str, Layer]
    factors: dict[str, tuple[str, str]]

    @classmethod
    def of(cls, model: Any) -> Merging:
        """Find the adapters of a peft model.

        Raises:
            CheckpointError: there are none, or they do more than add B·A to weights of linear
                layers.
        """
        if not getattr(model, "peft_config", None):
            raise CheckpointError(
                f"merge_adapters=True: {type(model).__name__} has no adapters of peft. Add them"
                " with peft.get_peft_model or model.add_adapter, or leave merge_adapters out."
            )
        _, names, inside = _base_of(model)
        layers = _layers(model, names, inside)
        in_model = adapter_names(model, active_of(model))
        factors = {name: (in_model[at.a], in_model[at.b]) for name, at in layers.items()}
        return cls(names, layers, factors)


@dataclass(frozen=True)
class Layer:
    """The adapter of one weight. `a`, `b`: the factors' names in the adapters' file. `turned`: the
    weight is stored as [in, out].
    """

    a: str
    b: str
    shape: Shape
    scale: float
    turned: bool

    def factors(self, source: HuggingFaceSource) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B."""
        a, b = (source.whole(Item("parameter", key)) for key in (self.a, self.b))
        return a, b

    def added(
        self, a: torch.Tensor, b: torch.Tensor, name: str, start: int, data: torch.Tensor
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield `data`, the interval of the weight from element `start` on, with the product added
        in fp32 (for fp64 weights: in fp64).
        """
        dtype = torch.promote_types(data.dtype, torch.float32)
        for at, part in self.products(a, b, dtype, start, start + data.numel()):
            own = data[at - start : at - start + part.numel()].to("cpu", dtype)
            yield name, at, own.add(part)

    def add_to(self, whole: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product to the whole weight, in place, on its device."""
        dtype, flat = torch.promote_types(whole.dtype, torch.float32), whole.view(-1)
        for at, part in self.products(a, b, dtype, 0, whole.numel()):
            own = flat[at : at + part.numel()]
            own.copy_(own.to(dtype).add(part))

    def products(
        self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, start: int, end: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield s · B·A for elements [start, end) of the weight, in order, a few MiB at a time:
        (index of the first element, values).
        """
        a, b = a.to(dtype), b.to(dtype)
        left, right = (a.T, b.T) if self.turned else (b, a)
        width = self.shape[1]
        step = max(1, CHUNK // (width * dtype.itemsize)) * width
        at = start
        while at < end:
            stop = min(end, (at // width) * width + step)
            first, last = at // width, -(-stop // width)
            rows = (left[first:last] @ right).reshape(-1).mul_(self.scale)
            yield at, rows[at - first * width : stop - first * width]
            at = stop


def active_of(model: Any) -> str:
    """Return the name of the one adapter that is active in the LoRA layers.
    Raises: CheckpointError: several are active, or none, or adapters are merged already.
    """
    layers = [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "active_adapters")]
    if any(layer.merged_adapters for layer in layers):
        raise CheckpointError(
            "adapters are in the weights already (merge_adapter() was called): they would be added"
            " twice. Call unmerge_adapter() before onefold.shard."
        )
    names = sorted(
        {name for layer in layers for name in layer.active_adapters if name in layer.lora_A}
    )
    if len(names) != 1 or any(layer.disable_adapters for layer in layers):
        raise CheckpointError(
            f"merging adds one adapter that is switched on; active are {names or 'none'}"
            + (", and adapters are disabled" if any(x.disable_adapters for x in layers) else "")
            + ". Call set_adapter(NAME), or enable_adapter_layers()."
        )
    return str(names[0])


def _layers(model: Any, names: dict[str, str], inside: Outline) -> dict[str, Layer]:
    """Return {name in the base model: the adapter of this weight}. Raises: CheckpointError."""
    adapter = active_of(model)
    in_file = {own: key for key, own in adapter_names(model, adapter).items()}
    out: dict[str, Layer] = {}
    for path, module in model.named_modules():
        if adapter not in getattr(module, "lora_A", ()):
            continue
        weight = names.get(f"{path}.base_layer.weight", "")
        shape = inside.tensors.get(weight, ("", ()))[1]
        a, b = (f"{path}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
        plain = isinstance(module.get_base_layer(), nn.Linear) or module.fan_in_fan_out
        variant = getattr(module, "lora_variant", {})
        if not plain or len(shape) != 2 or adapter in variant or {a, b} - in_file.keys():
            raise CheckpointError(
                f"the adapter at {path!r} does more than add B·A to a linear layer's weight: merge"
                " it by peft's merge_and_unload(), inside onefold.full_params(model, write=True)."
            )
        if tied := next(
            (names for names in inside.ties if weight in names and len(names) > 1), None
        ):
            raise CheckpointError(
                f"the adapter at {path!r} is on a weight that is tied ({', '.join(tied)}): what is"
                " added to the one would be missing in the other. Leave that layer out of"
                " the adapters' target modules, or untie it."
            )
        out[weight] = Layer(
            in_file.pop(a),
            in_file.pop(b),
            shape,
            float(module.scaling[adapter]),
            bool(module.fan_in_fan_out),
        )
    # Trained biases and modules saved whole need no addition: they are written as they are
    if other := [own for own in in_file if own not in names]:
        raise CheckpointError(
            f"adapter {adapter!r} has tensors that belong to no linear layer ({other[0]!r}):"
            " merge it by peft's merge_and_unload()."
        )
    return out
