"""Save and load adapters without their base model, in peft's format: adapter_model.safetensors and
adapter_config.json, which `PeftModel.from_pretrained` opens.

    in the model       base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight
    in the folder      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight

peft decides which tensors belong to an adapter and how they are called. This module asks peft with
stand-in tensors on the meta device.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.checkpoint.source import closed_on_error
from onefold.checkpoint.together import Together
from onefold.pretrained.export import converted, masters, stream
from onefold.pretrained.fitted import Fitted, Outline, refuse_shapes, some
from onefold.pretrained.hf_names import Layout, whole
from onefold.pretrained.huggingface import HuggingFaceSource, load_fitted, refuse_differences
from onefold.pretrained.streams import Progress, Sheet
from onefold.runtime.registry import engine_of
from onefold.runtime.state.contents import unguarded

FILES = "adapter_model"
#: The prefix that peft adds to the names of a model that it wraps.
PREFIX = "base_model.model."


def save_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write the adapters of a sharded peft model, without its base model. Collective.

    Each rank writes its own intervals, as in `onefold.export`. Embeddings of the base model are not
    written. Prompts, which peft computes from their encoder, are written by the first rank.

    Args:
        model: the return value of `onefold.shard` for a PeftModel, or for a transformers model
            after `add_adapter`.
        folder: the folder to create.
        adapter: the adapter's name; None for the active one.
        dtype: dtype in the file. None keeps the dtype of the master weights, without loss.
        progress: as for `onefold.export`.
        overwrite: the same.

    Raises:
        CheckpointError: on every rank: there is no such adapter, `folder` exists, or the disk has
            no space or gives no permission.
    """
    engine = engine_of(model)
    if _is_prompt(model, adapter):
        return _save_prompt(model, Path(folder), adapter, dtype, overwrite)

    def sheet() -> Sheet:
        names = adapter_names(model, adapter)
        outline = Outline.of(model)
        first = {name: names_[0] for names_ in outline.ties for name in names_}
        stepped = outline.dtypes | masters(engine)
        dtypes = {name: converted(stepped[name], dtype) for name in names.values()}
        copies: dict[str, list[str]] = {}
        made = {}
        for key, name in names.items():
            copies.setdefault(first[name], []).append(name)
            _, shape = outline.tensors[name]
            made[key] = shape, whole(name, shape)
        return Sheet.of(Layout(made, []), dtypes, copies, FILES, 1 << 62)

    def beside(there: Path) -> None:
        _save_config(model, adapter, there)

    return stream(engine, model, Path(folder), sheet, beside, progress, overwrite)


def load_adapters(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Load a folder written by peft into the existing adapters of a sharded model. Collective.

    Each rank reads what it owns. The base model does not change.

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
            return _fit(source, model, names, strict)

    return load_fitted(model, "load_adapters", fitted)


def adapter_names(model: nn.Module, adapter: str | None) -> dict[str, str]:
    """Return {peft's name in files: name in `model`} for an adapter's tensors.
    Raises: CheckpointError: the model has no such adapter, or peft computes the adapter's tensors
    from other tensors.
    """
    adapter = _adapter(model, adapter)
    from peft import PeftModel, get_peft_model_state_dict

    wrapped: Any = model
    stand_ins = {
        name: torch.empty(shape, device="meta")
        for name, (_, shape) in Outline.of(model).tensors.items()
    }
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    # peft asks modules that are saved whole (modules_to_save) for their names by state_dict()
    with unguarded(engine_of(model)):
        found = get_peft_model_state_dict(
            wrapped, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=False
        )
    odd = [key for key, value in found.items() if id(value) not in names]
    if odd or not found:
        raise CheckpointError(
            f"the tensors of adapter {adapter!r} ({wrapped.peft_config[adapter].peft_type}) are not"
            f" the model's own{f', but made of them: {some(odd)}' if odd else ''}. Save it by peft:"
            " `with onefold.full_params(model):` on every rank, and model.save_pretrained(folder)"
            " on the first."
        )
    prefix = "" if isinstance(model, PeftModel) else PREFIX
    return {prefix + key: names[id(value)] for key, value in found.items()}


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
        raise CheckpointError(f"this model has no adapter {adapter!r}; it has {some(known)}.")
    return adapter


def _fit(
    source: HuggingFaceSource, model: nn.Module, names: dict[str, str], strict: bool
) -> Fitted:
    there = {item.name: stored.shape for item, stored in source.items().items()}
    outline = Outline.of(model)
    shapes = {k: outline.tensors[n][1] for k, n in names.items()}
    what = f"{source.folder} holds adapters of another form:"
    refuse_shapes(there, shapes, what, " Are rank and targets the same?")
    made = {n: whole(k, there[k]) for k, n in names.items() if k in there}
    fitted = Fitted(source, outline, made, [k for k in there if k not in names])
    fitted.missing = [n for k, n in names.items() if k not in there]
    if strict:
        refuse_differences(fitted)
    return fitted


def _is_prompt(model: Any, adapter: str | None) -> bool:
    known = getattr(model, "peft_config", None) or {}
    return bool(known) and bool(known[_adapter(model, adapter)].is_prompt_learning)


def _save_prompt(
    model: Any, folder: Path, adapter: str | None, dtype: torch.dtype | None, overwrite: bool
) -> Path:
    """Compute the prompts from their encoder on every rank (a few rows) and write them on the first
    rank. Collective.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    engine = engine_of(model)
    engine.unset.look()
    engine.unset.refuse("save_adapters() would write")
    name = _adapter(model, adapter)
    encoder, together = model.prompt_encoder, Together.of(engine)
    was, _ = encoder.training, encoder.eval()
    with torch.no_grad():
        made = get_peft_model_state_dict(
            model, state_dict={}, adapter_name=name, save_embedding_layers=False
        )
    encoder.train(was)
    with together.each_rank():
        if together.rank == 0:
            if folder.exists() and not overwrite:
                raise CheckpointError(f"{folder} exists: give overwrite=True, or another folder.")
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {key: t.to(dtype or t.dtype).contiguous() for key, t in made.items()}
            save_file(tensors, folder / f"{FILES}.safetensors", {"format": "pt"})
            _save_config(model, name, folder)
    return folder


def _save_config(model: Any, adapter: str | None, folder: Path) -> None:
    """Write adapter_config.json and the model card README.md, as peft's `save_pretrained` does."""
    config = copy.deepcopy(model.peft_config[_adapter(model, adapter)])
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
