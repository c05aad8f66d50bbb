"""Save and load adapters without their base model, in peft's format: adapter_model.safetensors and
adapter_config.json, which `PeftModel.from_pretrained` opens.

    in the model       base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    in the folder      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

peft decides which tensors belong to an adapter and how they are called. This module asks peft with
stand-in tensors on the meta device.

[Note: embedding layers] peft also saves the base model's embeddings and head if adapters are on
them, or if the model has another number of tokens than the folder that it was loaded from. To know
the latter, peft may ask the hub. Only the first rank asks, so that all ranks write the same.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import closed_on_error
from onefold.checkpoint.together import Together, meet
from onefold.pretrained.export import begin, converted, masters, wholes, write
from onefold.pretrained.fitted import Fitted, Outline, refuse_shapes
from onefold.pretrained.hf_names import Whole, whole
from onefold.pretrained.huggingface import HuggingFaceSource, load_fitted, refuse_differences
from onefold.runtime.hooks import engine_of
from onefold.runtime.state.start import showing
from onefold.wording import few

FILES = "adapter_model"
#: The prefix that peft adds to the names of a model that it wraps.
PREFIX = "base_model.model."


def save_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a sharded peft model, without its base model. Collective.

    Embedding layers of the base model are written too where peft's `save_pretrained` writes them: if
    adapters are on them, or if their number of tokens was changed. Their values are those that the
    model computes with (decoded under `frozen="nf4"`, bf16 under bf16). Prompts, which peft computes
    from their encoder, are written as computed.

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
    engine.uninitialized.look()
    together, adapter = Together.of(engine), _adapter(model, adapter)
    prompts: dict[str, torch.Tensor] = {}
    if _is_prompt(model, adapter):
        engine.uninitialized.refuse("save_adapters() would write")
        # Every rank asks: the encoder is a part of the model
        names, prompts = _prompts(model, adapter)
        names = together.from_first(names)
    else:
        names = together.said_by_first(lambda: adapter_names(model, adapter, "auto"))
    outline, makes = Outline.of(model), wholes(engine, model)
    first = {name: group[0] for group in outline.ties for name in group}
    engine.uninitialized.refuse("save_adapters() would write", {first[n] for n in names.values()})
    stepped = outline.dtypes | masters(engine)
    tensors = {}
    for key, name in names.items():
        to = converted(stepped[name], dtype)
        tensors[key] = Whole.of(outline.tensors[name][1], to, partial(makes[first[name]], to))
    for key, value in prompts.items():
        to = converted(value.dtype, dtype)
        tensors[key] = Whole.of(tuple(value.shape), to, partial(value.to, "cpu", to))

    def beside(there: Path) -> None:
        _save_config(model, adapter, there)

    return write(together, Path(folder), tensors, beside, 1 << 62, overwrite, FILES)


def load_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
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
            if strict:
                refuse_differences(fitted)
            return fitted

    return load_fitted(model, "load_adapters", fitted)


def embedding_layers(model: nn.Module) -> list[str]:
    """Return the names of the base model's tensors that peft writes beside the model's adapters.
    See [Note: embedding layers]. Collective.
    """
    engine = engine_of(model)
    if not getattr(model, "peft_config", None):
        return []
    meet(engine, "save")
    together = Together.of(engine)
    out: set[str] = set()
    for adapter in model.peft_config:  # type: ignore[union-attr]
        if _is_prompt(model, adapter):
            out.update(together.from_first(_prompts(model, adapter)[0]).values())
        else:
            out.update(together.said_by_first(partial(_base_beside, model, adapter)))
    return sorted(out)


def _base_beside(model: Any, adapter: str) -> set[str]:
    """Return the names of embedding layers that peft writes beside an adapter that has no prompts."""
    alone, all_ = (set(_asked_of_peft(model, adapter, e)[1].values()) for e in (False, "auto"))
    return all_ - alone


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
    found, names = _asked_of_peft(model, adapter, embeddings)
    odd = [key for key, value in found.items() if id(value) not in names]
    if odd or not found:
        raise CheckpointError(
            f"the tensors of adapter {adapter!r} ({wrapped.peft_config[adapter].peft_type}) are not"
            f" the model's own{f', but made of them: {few(odd)}' if odd else ''}. Save it by peft:"
            " `with onefold.full_params(model):` on every rank, and model.save_pretrained(folder)"
            " on the first."
        )
    return {_prefix(model) + key: names[id(value)] for key, value in found.items()}


def _asked_of_peft(
    model: Any, adapter: str, embeddings: bool | Literal["auto"]
) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Return the adapter's state dict as peft makes it from stand-ins for the model's tensors, and
    {id of a stand-in in it: the tensor's name in `model`}.
    """
    from peft import get_peft_model_state_dict

    tensors = Outline.of(model).tensors
    stand_ins = {name: torch.empty(shape, device="meta") for name, (_, shape) in tensors.items()}
    # peft asks modules that are saved whole (modules_to_save) for their names by state_dict()
    with showing(engine_of(model), {}):
        found = get_peft_model_state_dict(
            model, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=embeddings
        )
    used = {id(value) for value in found.values()}
    return found, {id(s): name for name, s in stand_ins.items() if id(s) in used}


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
    outline, prefix = Outline.of(model), _prefix(model)
    base = {k: plain for k in there if (plain := k.removeprefix(prefix)) in outline.tensors}
    places = base | names
    shapes = {k: outline.tensors[n][1] for k, n in places.items()}
    what = f"{source.folder} holds adapters of another form:"
    hint = " Are rank and targets the same, and the number of tokens (resize_token_embeddings)?"
    refuse_shapes(there, shapes, what, hint)
    made = {n: whole(k, there[k]) for k, n in places.items() if k in there}
    fitted = Fitted(source, outline, made, [k for k in there if k not in places])
    fitted.missing = [n for k, n in names.items() if k not in there]
    return fitted


def _is_prompt(model: Any, adapter: str) -> bool:
    return bool(model.peft_config[adapter].is_prompt_learning)


def _prompts(model: Any, adapter: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return ({peft's name in files: name in `model`} for embedding layers that peft writes beside
    prompts, {peft's name in files: the prompts}). Collective: an encoder computes the prompts (a
    few rows).
    """
    encoder = model.prompt_encoder
    was, _ = encoder.training, encoder.eval()
    try:
        with torch.no_grad():
            found, names = _asked_of_peft(model, adapter, "auto")
    finally:
        encoder.train(was)
    layers = {key: names[id(value)] for key, value in found.items() if id(value) in names}
    return layers, {key: value for key, value in found.items() if key not in layers}


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
