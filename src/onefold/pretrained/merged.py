"""LoRA adapters added to the weights of their base model, as these are written or streamed whole.

    lora_A [r, in], lora_B [out, r]      whole, one layer at a time
    a whole weight W [out, in]           W += s · B @ A in fp32 or better, a few MiB of rows at a time

The base weights are those of the run. Encoded weights are decoded: the adapters were trained with
the decoded values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.tensorfile import CHUNK
from onefold.checkpoint.together import Together
from onefold.pretrained.adapters import adapter_names
from onefold.pretrained.export import (
    MAX_SHARD_BYTES,
    Make,
    begin,
    check_arguments,
    first_dtype,
    masters,
    plan,
    save_configuration,
    wholes,
    write,
)
from onefold.pretrained.fitted import Outline, unwrapped
from onefold.runtime.hooks import engine_of


def export_merged(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Write a sharded peft model as a transformers model, with the active adapter added to its
    weights. Collective.

    Args:
        model: the return value of `onefold.shard` for a PeftModel with LoRA adapters, or for a
            transformers model after `add_adapter`. Biases and modules that are trained too
            (`bias="all"`, `modules_to_save`) are written with the model's values.
        folder: the folder to create.
        dtype: dtype of floating-point parameters in the files. None for each parameter's master
            dtype.
        max_shard_bytes: as for `onefold.export`.
        tokenizer: the same.
        overwrite: the same.

    Raises:
        CheckpointError: on every rank: the adapters do more than add B·A to weights of linear
            layers (DoRA, embeddings), `folder` exists, or the disk has no space.
    """
    engine = engine_of(model)
    begin([engine])
    check_arguments(dtype, max_shard_bytes)
    merging, makes = Merging.of(model), wholes(engine, model)
    outline = merging.outline
    outline.dtypes |= {
        merging.names[n]: d for n, d in masters(engine).items() if n in merging.names
    }

    def beside(there: Path) -> None:
        save_configuration(merging.base, dtype or first_dtype(outline), there)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(there))

    merged = {
        plain: partial(merging.whole, makes, own)
        for own, plain in merging.names.items()
        if own in makes
    }
    tensors = plan(outline, merged, merging.base, dtype)
    return write(Together.of(engine), Path(folder), tensors, beside, max_shard_bytes, overwrite)


@dataclass(frozen=True)
class Factors:
    """The adapter of one weight. `a`, `b`: the factors' names in the model. `turned`: the weight is
    stored as [in, out].
    """

    a: str
    b: str
    scale: float
    turned: bool

    def add_to(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product to the whole weight, in place, on its device."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = a.to(dtype), b.to(dtype)
        left, right = (a.T, b.T) if self.turned else (b, a)
        step = max(1, CHUNK // (weight.shape[1] * dtype.itemsize))
        for rows, part in zip(weight.split(step), left.split(step), strict=True):
            rows.copy_((part @ right).mul_(self.scale).add_(rows))  # in peft's order


@dataclass(frozen=True)
class Merging:
    """The active LoRA adapter of a model, to be added to weights.

    Attributes:
        base: the base model below the adapters. outline: its outline.
        names: {name in the model: name in its base model}. Other names belong to adapters. For a
            module that the adapter saves whole (peft's modules_to_save), the name in the model is
            that of the trained copy.
        factors: {name in the model: the adapter of this weight}.
    """

    base: nn.Module
    outline: Outline
    names: dict[str, str]
    factors: dict[str, Factors]

    @classmethod
    def of(cls, model: Any) -> Merging:
        """Find the adapter.

        Raises:
            CheckpointError: there is none, or it does more than add B·A to weights of linear layers.
        """
        if not getattr(model, "peft_config", None):
            raise CheckpointError(
                f"merge_adapters=True: {type(model).__name__} has no adapters of peft. Add them"
                " with peft.get_peft_model or model.add_adapter, or leave merge_adapters out."
            )
        outline, adapter = Outline.of(model), active_of(model)
        base, names = unwrapped(model, outline)
        tied = {name: group for group in outline.ties if len(group) > 1 for name in group}
        left = {*adapter_names(model, adapter).values()}
        factors = {}
        for path, module in model.named_modules():
            if hasattr(module, "original_module") and adapter in module.modules_to_save:
                original, copy = f"{path}.original_module.", f"{path}.modules_to_save.{adapter}."
                for own in [own for own in names if own.startswith(original)]:
                    _refuse_tied(f"the adapter saves {path!r} whole, and its weight", tied.get(own))
                    plain = names.pop(own)
                    if (saved := copy + own.removeprefix(original)) in outline.tensors:
                        names[saved] = plain
            if adapter in getattr(module, "lora_A", ()):
                weight = f"{path}.base_layer.weight"
                a, b = (f"{path}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
                plain_layer = (
                    isinstance(module.get_base_layer(), nn.Linear) or module.fan_in_fan_out
                )
                variant = getattr(module, "lora_variant", {})
                if not plain_layer or weight not in names or adapter in variant or {a, b} - left:
                    raise CheckpointError(
                        f"the adapter at {path!r} does more than add B·A to a linear layer's weight:"
                        " merge it by peft's merge_and_unload(), inside"
                        " onefold.full_params(model, write=True)."
                    )
                _refuse_tied(f"the adapter at {path!r} is on a weight that", tied.get(weight))
                left -= {a, b}
                scale, turned = float(module.scaling[adapter]), bool(module.fan_in_fan_out)
                factors[weight] = Factors(a, b, scale, turned)
        # Trained biases and modules saved whole need no addition: they are written as they are
        if other := sorted(left - names.keys()):
            raise CheckpointError(
                f"adapter {adapter!r} has tensors that belong to no linear layer ({other[0]!r}):"
                " merge it by peft's merge_and_unload()."
            )
        inside = Outline(
            {names[n]: what for n, what in outline.tensors.items() if n in names},
            {names[n]: what for n, what in outline.dtypes.items() if n in names},
            [[names[n] for n in group] for group in outline.ties if group[0] in names],
        )
        return cls(base, inside, names, factors)

    def whole(self, makes: dict[str, Make], name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Make the model's weight `name` whole, with its adapter added. Collective."""
        if name not in self.factors:
            return makes[name](dtype)
        wide, adapter = torch.promote_types(dtype, torch.float32), self.factors[name]
        weight, a, b = (makes[n](wide) for n in (name, adapter.a, adapter.b))
        if weight is None or a is None or b is None:
            return None
        adapter.add_to(weight, a, b)
        return weight.to(dtype)


def _refuse_tied(what: str, names: list[str] | None) -> None:
    if names:
        raise CheckpointError(
            f"{what} is tied ({', '.join(names)}): merged, all of these would change alike. Untie"
            " them (tie_word_embeddings=False) before the adapters are made, or leave that layer out"
            " of them."
        )


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
