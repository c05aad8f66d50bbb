"""Save and load adapters without their base model, in peft's format: adapter_model.safetensors and
adapter_config.json, which `PeftModel.from_pretrained` opens. And add LoRA adapters to the weights of
their base model, as these are written or streamed whole.

    in the model       base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    in the folder      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

peft decides which tensors belong to an adapter and how they are called. This module asks peft with
stand-in tensors on the meta device.

    lora_A [r, in], lora_B [out, r]      whole, one layer at a time
    a whole weight W [out, in]           W += s · B @ A in fp32 or better, a few MiB of rows at a time

The base weights are those of the run. Encoded weights are decoded: the adapters were trained with
the decoded values.

[Note: embedding layers] peft also saves the base model's embeddings and head if adapters are on
them, or if the model has another number of tokens than the folder that it was loaded from. To know
the latter, peft may ask the hub. Only the first rank asks, so that all ranks write the same.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import closed_on_error
from onefold.checkpoint.tensorfile import CHUNK
from onefold.checkpoint.together import Together, meet
from onefold.pretrained.export import (
    MAX_SHARD_BYTES,
    Origin,
    begin,
    check_arguments,
    first_dtype,
    origins_of,
    plan,
    save_beside,
    whole,
    write,
)
from onefold.pretrained.hf_names import Outline, outline_of, same, ties
from onefold.pretrained.huggingface import (
    Fitted,
    HuggingFaceSource,
    load_fitted,
    refuse_shapes,
    unwrapped,
)
from onefold.reading import StrPath
from onefold.runtime.hooks import engine_of
from onefold.runtime.parts import MasterParts
from onefold.runtime.state.start import showing
from onefold.wording import few

FILES = "adapter_model"
#: The prefix that peft adds to the names of a model that it wraps.
PREFIX = "base_model.model."


def save_adapters(
    model: nn.Module,
    folder: StrPath,
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a sharded peft model, without its base model. Collective.

    Embedding layers of the base model are written too where peft's `save_pretrained` writes them: if
    adapters are on them, or if their number of tokens was changed. Their values are those that the
    model computes with (decoded under `frozen="nf4"`, bf16 under bf16).

    Args:
        model: the return value of `onefold.shard` for a PeftModel, or for a transformers model
            after `add_adapter`.
        folder: the folder to create.
        adapter: the adapter's name; None for the active one.
        dtype: dtype in the file. None keeps the dtype of the master weights, without loss.
        overwrite: as for `onefold.export`.

    Raises:
        CheckpointError: on every rank: there is no such adapter, `folder` exists, or the disk has
            no space or gives no permission.
    """
    engine = engine_of(model)
    begin([engine])
    together, adapter = Together.of(engine), _adapter(model, adapter)
    names = together.said_by_first(lambda: adapter_names(model, adapter, "auto"))
    outline, of = outline_of(model, masters=True), origins_of(engine, model)
    first = {name: group[0] for group in ties(outline) for name in group}
    engine.uninitialized.refuse("save_adapters() would write", {first[n] for n in names.values()})
    # Each under its own name, and in `dtype` if it is a buffer, too
    stored: Outline = {key: nn.Parameter(outline[n], False) for key, n in names.items()}
    own = {key: of[first[n]] for key, n in names.items() if first[n] in of}
    tensors, beside = plan(stored, own, None, dtype), partial(_save_config, model, adapter)
    return write(together, Path(folder), tensors, beside, 1 << 62, overwrite, FILES)


def load_adapters(
    model: nn.Module,
    folder: StrPath,
    adapter: str | None = None,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Load a folder written by peft into the existing adapters of a sharded model. Collective.

    Each rank reads what it owns. The base model does not change, except for embedding layers that
    are in the folder.

    Args:
        model: the return value of `onefold.shard` for a PeftModel, or for a transformers model
            after `add_adapter`.
        folder: a folder with adapter_model.safetensors.
        adapter: the adapter to load into; None for the active one.

    Returns:
        (names of the adapter's tensors that are missing in the folder, names of the folder's
        tensors that have no place in the adapter).

    Raises:
        CheckpointError: on every rank: there is no such adapter, the folder cannot be read, shapes
            differ, or, with `strict`, names differ.
    """

    def fitted() -> Fitted:
        names = adapter_names(model, adapter)
        with closed_on_error(HuggingFaceSource(folder, FILES)) as source:
            fitted = _fit(source, model, names)
            # peft writes embedding layers that it saves whole (modules_to_save) twice
            again = adapter_names(model, adapter, hasattr(model, "get_input_embeddings"))
            fitted.unexpected = [key for key in fitted.unexpected if key not in again]
            return fitted

    return load_fitted(model, "load_adapters", fitted, strict)


def embedding_layers(model: nn.Module) -> list[str]:
    """Return the names of the base model's tensors that peft writes beside the model's adapters.
    See [Note: embedding layers]. Collective.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return []

    def ask() -> list[str]:
        out: set[Any] = set()
        for adapter, config in configs.items():
            if not config.is_prompt_learning:
                kinds: Any = (False, "auto")
                alone, all_ = (set(_asked_of_peft(model, adapter, e).values()) for e in kinds)
                out |= all_ - alone
        return sorted(out)

    engine = engine_of(model)
    meet(engine, "save")
    return Together.of(engine).said_by_first(ask)


def adapter_names(
    model: nn.Module, adapter: str | None, embeddings: bool | Literal["auto"] = False
) -> dict[str, str]:
    """Return {peft's name in files: name in `model`} for an adapter's tensors.

    Args:
        embeddings: whether to include the embedding layers of the base model; "auto": if peft's
            `save_pretrained` writes them. See [Note: embedding layers].

    Raises:
        CheckpointError: the model has no such adapter, or peft computes the adapter's tensors from
            other tensors.
    """
    adapter = _adapter(model, adapter)
    wrapped: Any = model
    prompts = wrapped.peft_config[adapter].is_prompt_learning  # peft would compute with the model
    found = {} if prompts else _asked_of_peft(model, adapter, embeddings)
    names = {_prefix(model) + key: name for key, name in found.items() if name is not None}
    if len(names) < len(found) or not found:
        odd = [key for key, name in found.items() if name is None]
        raise CheckpointError(
            f"the tensors of adapter {adapter!r} ({wrapped.peft_config[adapter].peft_type}) are not"
            f" the model's own{f', but made of them: {few(odd)}' if odd else ''}. Save it by peft:"
            " `with onefold.full_params(model):` on every rank, and model.save_pretrained(folder)"
            " on the first."
        )
    return names


def _asked_of_peft(
    model: Any, adapter: str, embeddings: bool | Literal["auto"]
) -> dict[str, str | None]:
    """Return {peft's name: name in `model`} of the adapter's state dict, as peft makes it from
    stand-ins for the model's tensors; None for what peft computes.
    """
    from peft import get_peft_model_state_dict

    stand_ins = {name: like.detach() for name, like in outline_of(model).items()}
    # peft asks modules that are saved whole (modules_to_save) for their names by state_dict()
    with showing(engine_of(model), {}):
        found = get_peft_model_state_dict(
            model, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=embeddings
        )
    names = {id(value): name for name, value in stand_ins.items()}
    return {key: names.get(id(value)) for key, value in found.items()}


def _prefix(model: nn.Module) -> str:
    """Return what precedes the names of `model` in files of peft."""
    from peft import PeftModel

    return "" if isinstance(model, PeftModel) else PREFIX


def _adapter(model: Any, adapter: str | None) -> str:
    known = list(getattr(model, "peft_config", None) or ())
    if not known:
        raise CheckpointError(
            f"this {type(model).__name__} has no adapters of peft: wrap it with"
            " peft.get_peft_model(model, config) before onefold.shard."
        )
    if adapter is None:
        active = getattr(model, "active_adapter", None)
        if callable(active):  # transformers has a method where peft has an attribute
            active = active()
        adapter = active if isinstance(active, str) else known[0]
    if adapter not in known:
        raise CheckpointError(f"this model has no adapter {adapter!r}; it has {few(known)}.")
    return adapter


def _fit(source: HuggingFaceSource, model: nn.Module, names: dict[str, str]) -> Fitted:
    """Fit a folder to the adapter's tensors `names`, and to the tensors of the base model of which
    it has some. As in peft, the folder alone decides about the latter.
    """
    there = {item.name: stored.shape for item, stored in source.items().items()}
    outline, prefix = outline_of(model), _prefix(model)
    base = {k: plain for k in there if (plain := k.removeprefix(prefix)) in outline}
    places = base | names
    expected = {k: outline[n] for k, n in places.items()}
    what = f"{source.folder} holds adapters of another form:"
    hint = " Are rank and targets the same, and the number of tokens (resize_token_embeddings)?"
    refuse_shapes(there, expected, what, hint)
    made = {n: same(k, there[k]) for k, n in places.items() if k in there}
    return Fitted(source, outline, made, {*names.values()}, there.keys() - places.keys())


def _save_config(model: Any, adapter: str, folder: Path) -> None:
    """Write adapter_config.json and the model card README.md, as peft's `save_pretrained` does."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(inner, "name_or_path", None) or None
    config.inference_mode = True
    more: dict[str, Any] = {}
    if config.task_type is None:
        more["auto_mapping_dict"] = {
            "base_model_class": type(inner).__name__,
            "parent_library": type(inner).__module__,
        }
    config.save_pretrained(str(folder), **more)
    if callable(card := getattr(model, "create_or_update_model_card", None)):
        card(str(folder))


# -- merging -------------------------------------------------------------------------------------


def export_merged(
    model: nn.Module,
    folder: StrPath,
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
    merging, of = Merging.of(model), origins_of(engine, model)
    outline = merging.outline
    beside = partial(save_beside, merging.base, dtype or first_dtype(outline), tokenizer)
    engine.uninitialized.refuse("export_merged() would write")
    engine.buffers.refuse_own(model, "export_merged()")
    parts = MasterParts()
    merged: dict[str, Origin] = {
        plain: partial(merging.merge, parts, of, own) if own in merging.factors else of[own]
        for own, plain in merging.names.items()
        if own in of
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

    def add_to(self, weight: Tensor, a: Tensor, b: Tensor) -> None:
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
        base: the base model below the adapters. outline: its outline, in the dtypes of the masters.
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
        outline, adapter = outline_of(model, masters=True), active_of(model)
        base, names = unwrapped(model, outline)
        tied = {name: group for group in ties(outline) if len(group) > 1 for name in group}
        left = {*adapter_names(model, adapter).values()}
        factors = {}
        for path, module in model.named_modules():
            if hasattr(module, "original_module") and adapter in module.modules_to_save:
                original, copy = f"{path}.original_module.", f"{path}.modules_to_save.{adapter}."
                for own in [own for own in names if own.startswith(original)]:
                    _refuse_tied(f"the adapter saves {path!r} whole, and its weight", tied.get(own))
                    plain = names.pop(own)
                    if (saved := copy + own.removeprefix(original)) in outline:
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
        inside = {names[n]: like for n, like in outline.items() if n in names}
        return cls(base, inside, names, factors)

    def merge(
        self, parts: MasterParts, of: dict[str, Origin], name: str, dtype: torch.dtype
    ) -> Tensor | None:
        """Make the model's weight `name` whole, with its adapter added. Collective."""
        wide, adapter = torch.promote_types(dtype, torch.float32), self.factors[name]
        weight, a, b = (whole(parts, of[n], wide) for n in (name, adapter.a, adapter.b))
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
    adapter = _adapter(model, None)
    for layer in (m for m in model.modules() if hasattr(m, "lora_A")):
        active = [] if layer.disable_adapters else list(layer.active_adapters)
        if active != [adapter] or layer.merged_adapters:
            raise CheckpointError(
                f"merging adds one adapter that is switched on: active are {active}, and in the weights"
                f" already {layer.merged_adapters}. Call set_adapter(NAME), enable_adapter_layers() or"
                " unmerge_adapter() before onefold.shard."
            )
    return adapter
