"""Models that no rank ever holds whole: built without memory, read shard by shard as a Trainer
shards them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import transformers
from torch import nn

import onefold
from onefold.pretrained.weights import on_meta, read_whole
from onefold.recipe import Recipe
from onefold.runtime.registry import is_sharded

logger = logging.getLogger("onefold")
#: The attribute of such a model that names its folder.
_WEIGHTS = "_onefold_weights"


def from_pretrained(
    name: str | os.PathLike[str], kind: Any = None, dtype: Any = None, **options: Any
) -> nn.Module:
    """A model of transformers on the meta device, whose weights each rank reads for itself when a
    Trainer of `onefold.hf` shards it. Adapters of peft may be put around it before.

    What cannot be read in parts (pickles, quantized weights) is loaded whole, with a warning.

    Args:
        name: a folder, or a model of the hub, which is taken from the cache or downloaded.
        kind: a class of transformers; None for AutoModelForCausalLM.
        dtype: of the parameters; None for the one that config.json names, as transformers has it.
        options: overwrite what config.json says, such as attn_implementation="eager".

    Raises:
        CheckpointError: there is no configuration that transformers knows, or the weights are of
            another model.
        FileNotFoundError: there is no such folder, and no such model in the hub or its cache.
    """
    folder = Path(name) if Path(name).is_dir() else _of_hub(str(name))
    model = on_meta(folder, kind, dtype, **options)
    reason = read_whole(folder, model)
    if reason:
        logger.warning("the whole model is read on every rank: %s", reason)
        chosen = kind or transformers.AutoModelForCausalLM
        whole: nn.Module = chosen.from_pretrained(folder, dtype=dtype or "auto", **options)
        return whole.train()
    setattr(model, _WEIGHTS, str(folder))
    return model


#: What of a model of the hub is read.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def _of_hub(name: str) -> Path:
    """The folder of a model in the hub's cache. Each rank asks; on each machine one of them
    downloads what is missing, and the others wait.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # no name, no network, not in the cache
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"there is no folder {name!r}, and no such model could be had from the hub or its cache"
            f" ({type(error).__name__}: {reason})."
        ) from error


def is_put_off(model: Any) -> bool:
    """Whether its weights are still to be read: `from_pretrained` above made it, and nobody has
    sharded it.
    """
    return getattr(model, _WEIGHTS, None) is not None and not is_sharded(model)


def shard(model: Any, recipe: Recipe, device: Any) -> None:
    """`onefold.shard`, with the weights that `from_pretrained` has put off reading. Collective.

    Adapters that take no gradient (a reference beside the one that is trained) are small, and
    switched on and off: they are not quantized with the base.
    """
    folder = getattr(model, _WEIGHTS, None)
    # What the folder has not (a new head) is drawn as transformers draws it
    init = model._init_weights if folder is not None else None
    idle = _idle_adapters(model) if recipe.frozen is not None else []
    for name in idle:
        model.get_parameter(name).requires_grad_(True)
    onefold.shard(model, recipe, device=device, weights=folder, init=init)
    for name in idle:
        model.get_parameter(name).requires_grad_(False)


def _idle_adapters(model: Any) -> list[str]:
    """Names of parameters of peft's adapters that take no gradient."""
    if not getattr(model, "peft_config", None):
        return []
    said = (getattr(module, "prefix", None) for module in model.modules())  # "lora_"
    kinds = {kind for kind in said if isinstance(kind, str) and kind}
    return [
        name
        for name, p in model.named_parameters()
        if not p.requires_grad and any(kind in name for kind in kinds)
    ]
