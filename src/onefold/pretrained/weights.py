"""Load a Hugging Face folder as a sharded model, without the whole model on any rank. The model is
built on the meta device. `onefold.shard(..., weights=folder)` opens the weights before it divides
the model, and reads them into the shards afterwards.

    config.json ──► on_meta(folder) ──► onefold.shard(model, recipe, weights=folder)
                                          each rank reads what it will own; buffers that no file has are computed
    read_whole(folder, model)           why a folder cannot be read in this way, if it cannot
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError, NotStreamed
from onefold.checkpoint.loading import apply_source, opened_alike
from onefold.checkpoint.source import closed_on_error
from onefold.checkpoint.together import Together, meet
from onefold.pretrained.huggingface import Fitted, copies, opened, unwrapped
from onefold.reading import StrPath
from onefold.runtime.engine import Engine
from onefold.wording import few


def on_meta(
    folder: StrPath,
    kind: Any = None,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """Build the model that a folder's config.json describes, on the meta device and in training
    mode.

    As from `from_pretrained`, the model has its generation configuration and the folder's name.
    Nothing is downloaded.

    Args:
        folder: a folder with config.json.
        kind: a class of transformers, or one of its Auto classes; None for AutoModelForCausalLM.
        dtype: dtype of the parameters, and of their master weights unless the recipe says
            otherwise. None for the dtype that config.json names.
        options: replace values of config.json, such as attn_implementation="eager".

    Raises:
        CheckpointError: there is no configuration that transformers knows.
    """
    import transformers

    chosen: Any = kind or transformers.AutoModelForCausalLM
    auto = not isinstance(chosen, type) or not issubclass(chosen, transformers.PreTrainedModel)
    configuration: Any = transformers.AutoConfig if auto else chosen.config_class
    try:
        config = configuration.from_pretrained(str(folder), local_files_only=True)
        named = {"dtype": dtype} if dtype is not None else {}
        with torch.device("meta"):
            make = chosen.from_config if auto else chosen._from_config
            model: Any = make(config, **named, **options)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: transformers cannot build a model of its config.json ({error})."
        ) from error
    if model.can_generate():
        with contextlib.suppress(OSError):  # the folder may have none
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                str(folder), local_files_only=True
            )
    trained: nn.Module = model.train()
    return trained


def read_whole(folder: StrPath, module: nn.Module) -> str:
    """Return why the folder's weights cannot be read in parts into such a model, in a sentence; ""
    if they can be. Reads only the files' headers. Local.

    Raises:
        CheckpointError: the weights cannot be read at all, or are of another model.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        return f"{folder} holds adapters beside a model."
    try:
        with contextlib.closing(opened(folder, module)):
            return ""
    except NotStreamed as error:
        return str(error)


def opened_by_all(engine: Engine, folder: StrPath, module: nn.Module, makes_up: bool) -> Fitted:
    """Open the weights given to `onefold.shard(weights=...)`, the same on every rank, before the model
    is laid out. `makes_up`: the caller initializes parameters that the folder lacks. Collective.
    Raises: CheckpointError: on every rank.
    """

    def fitted() -> Fitted:
        with closed_on_error(opened(folder, module)) as found:
            names = found.names()
            absent = [n for n, p in module.named_parameters() if p.is_meta and n not in names]
            _, base = unwrapped(module, module.state_dict())
            # What peft begins its adapters with is known of LoRA alone
            known = base.keys() | copies(module).keys()
            if absent and not (makes_up and known >= {*absent}):
                left = found.unexpected
                more = f", and {len(left)} tensors that fit nowhere in it ({few(left)})"
                raise CheckpointError(
                    f"{found.describe} has nothing for {len(absent)} of the parameters that the model"
                    f" has on the meta device ({few(absent)}){more if left else ''}. Is it of another"
                    " model? Give shard(..., init=function) to initialize what is missing; build"
                    " adapters of peft other than plain LoRA in memory."
                )
            return found

    meet(engine, "shard(weights=...)")
    return opened_alike(Together.of(engine), fitted)


def load_shards(engine: Engine, module: nn.Module, weights: Fitted) -> None:
    """Read the weights into the sharded model, and close them. Collective."""
    with contextlib.closing(weights):
        loaded = apply_source([engine], [module], Together.of(engine), weights, strict=False)
    kept = "not in it, so left as the model brought them or as init made them"
    nowhere = "fitting nowhere in the model"
    for names, what in ((loaded.missing, kept), (loaded.unexpected, nowhere)):
        if names and engine.rank == 0:
            logging.getLogger("onefold").warning(
                f"{weights.describe}: {what} ({len(names)}): {few(names)}"
            )


def materialize_adapters(module: nn.Module, device: torch.device) -> None:
    """Allocate adapters that were built on the meta device and initialize them as peft does. Local.

    Raises:
        CheckpointError: their initial values depend on the base model's weights, which are not
            loaded yet.
    """
    configs: dict[str, Any] = getattr(module, "peft_config", None) or {}
    layers: list[Any] = [m for m in module.modules() if hasattr(m, "reset_lora_parameters")]
    lora = {name: config for name, config in configs.items() if config.peft_type == "LORA"}
    for layer, (name, config) in itertools.product(layers, lora.items()):
        own = {
            path: p
            for path, p in layer.named_parameters()
            if p.is_meta and path.split(".")[1:2] == [name]
        }
        if not own:
            continue
        how = config.init_lora_weights
        if how not in (True, False, "gaussian") or config.use_dora:
            raise CheckpointError(
                f"adapter {name!r} starts from the base model's weights"
                f" ({'DoRA' if config.use_dora else repr(how)}), which are not there while the"
                " model is on the meta device: build it in memory, or give"
                " init_lora_weights=True or 'gaussian'."
            )
        for path, like in own.items():
            place, _, last = path.rpartition(".")
            inner, zeros = layer.get_submodule(place), torch.zeros_like(like, device=device)
            inner._parameters[last] = nn.Parameter(zeros, requires_grad=like.requires_grad)
            if hasattr(inner, "reset_parameters"):
                inner.reset_parameters()
        layer.reset_lora_parameters(name, how)
