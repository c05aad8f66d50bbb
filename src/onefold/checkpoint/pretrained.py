"""A Hugging Face folder as a model that no rank ever holds whole: its class on the meta device, and
its weights read by `onefold.shard(..., weights=folder)`.

    config.json ──► on_meta(folder) ──► onefold.shard(model, recipe, weights=folder)
                                          each rank reads what it will own; buffers that no file has are computed
    read_whole(folder, model)           why that cannot be, where it cannot

transformers says what the classes are and how the tensors of a file become those of a model (a
mixture's experts are joined, for instance; see hf_names.py).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError, NotStreamed
from onefold.checkpoint.huggingface import opened


def on_meta(
    folder: str | os.PathLike[str],
    kind: Any = None,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """The model that a folder's config.json describes, without memory, in training mode.

    It has what `from_pretrained` gives beside the weights: the generation configuration and the
    name of the folder. Nothing is downloaded.

    Args:
        folder: with a config.json.
        kind: a class of transformers, or one of its Auto classes; None for AutoModelForCausalLM.
        dtype: of the parameters, in which they are stepped unless the recipe says otherwise; None
            for the one that config.json names.
        options: overwrite what config.json says, such as attn_implementation="eager".

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
        with contextlib.suppress(OSError):  # it need not have one
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                str(folder), local_files_only=True
            )
    trained: nn.Module = model.train()
    return trained


def read_whole(folder: str | os.PathLike[str], module: nn.Module) -> str:
    """Why the folder's weights cannot be read in parts into such a model, in a sentence; "" if they
    can. Reads the files' heads. Local.

    Raises:
        CheckpointError: they cannot be read at all, or are of another model.
    """
    if (Path(folder) / "adapter_config.json").is_file():
        return f"{folder} holds adapters beside a model."
    try:
        with contextlib.closing(opened(folder, module)):
            return ""
    except NotStreamed as error:
        return str(error)
