"""Load models that no rank ever holds whole.

The model is built on the meta device. Each rank reads its shards when a Trainer shards the model.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import transformers
from torch import nn

import onefold
from onefold.pretrained.huggingface import unwrapped
from onefold.pretrained.weights import on_meta, read_whole
from onefold.reading import StrPath
from onefold.recipe import Recipe
from onefold.runtime.hooks import is_sharded

logger = logging.getLogger("onefold")
#: Attributes of such a model: the folder of its weights, and how many ranks divide a replica.
_WEIGHTS, _REPLICA = "_onefold_weights", "_onefold_replica"


def from_pretrained(
    name: StrPath,
    kind: Any = None,
    dtype: Any = None,
    *,
    distributed_config: Any = None,
    **options: Any,
) -> nn.Module:
    """Build a model of transformers on the meta device, and put off reading its weights.

    Each rank reads its part of the weights when a Trainer of `onefold.hf` shards the model. peft's
    adapters may be added before. Weights that cannot be read in parts (pickles, quantized weights)
    are loaded whole at once, with a warning.

    Args:
        name: a folder, or a model of the hub, which is taken from the cache or downloaded.
        kind: a class of transformers; None for AutoModelForCausalLM.
        dtype: of the parameters; None for the one in config.json, as in transformers.
        distributed_config: transformers' DistributedConfig, for tensor and expert parallelism, and
            dp_replicate_size for hybrid sharding. With tensor parallelism each rank reads its part
            of the weights at once. transformers' own FSDP is left out.
        options: values that override config.json, such as attn_implementation="eager".

    Raises:
        CheckpointError: there is no configuration that transformers knows, or the weights are of
            another model.
        FileNotFoundError: there is no such folder, and no such model in the hub or its cache.
        ValueError: `distributed_config` has a pipeline, or a name that transformers does not know.
    """
    folder = Path(name) if Path(name).is_dir() else _of_hub(str(name))
    replica = None
    if distributed_config is not None:
        config = _known(distributed_config)
        if config.tp_size > 1:
            return _parallelized(folder, kind, dtype, config, options)
        replica = config.fsdp_size if config.dp_replicate_size > 1 else None
    model = on_meta(folder, kind, dtype, **options)
    reason = read_whole(folder, model)
    if reason:
        logger.warning("the whole model is read on every rank: %s", reason)
        chosen = kind or transformers.AutoModelForCausalLM
        whole: nn.Module = chosen.from_pretrained(folder, dtype=dtype or "auto", **options)
        return whole.train()
    setattr(model, _WEIGHTS, str(folder))
    setattr(model, _REPLICA, replica)
    return model


def _known(config: Any) -> Any:
    """Return a DistributedConfig that can be trained. Raises: ValueError: it cannot be."""
    from transformers.distributed import DistributedConfig

    if isinstance(config, dict):
        try:
            config = DistributedConfig(**config)
        except TypeError as error:  # transformers' from_dict leaves a name out without a word
            raise ValueError(
                f"distributed_config: {error}. For context parallelism, call onefold.shard(model,"
                " recipe, mesh=..., data=...) before the Trainer is made."
            ) from None
    if config.pp_size > 1:
        raise ValueError(
            f"pp_size={config.pp_size}: transformers' pipelines do not train. Leave pp_size out, or"
            " shard the stages of your own pipeline with onefold.shard()."
        )
    if config.ep_size > 1 and config.tp_size == 1:
        raise ValueError(
            f"ep_size={config.ep_size} without tp_size: give both, or load the model by transformers,"
            " divide its experts, and call onefold.shard(model, recipe, mesh=..., data=...) before"
            " the Trainer is made."
        )
    return config


def _parallelized(
    folder: Path, kind: Any, dtype: Any, config: Any, options: dict[str, Any]
) -> nn.Module:
    """Return a model that transformers has parallelized, without its FSDP."""
    from transformers.distributed import DistributedConfig

    class WithoutFSDP(DistributedConfig):
        """transformers calls its FSDP where the data axes have more than one rank."""

        dp_size = 1

    chosen = kind or transformers.AutoModelForCausalLM
    without = WithoutFSDP(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    model: Any = chosen.from_pretrained(
        folder, dtype=dtype or "auto", distributed_config=without, **options
    )
    model.config.distributed_config = config
    trained: nn.Module = model.train()
    return trained


#: The files of a hub's model that are downloaded.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def _of_hub(name: str) -> Path:
    """Return the folder of a model in the hub's cache.

    Every rank calls this. On each machine, one rank downloads missing files and the others wait.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # an invalid name, no network, or not in the cache
        reason = " ".join(str(error).split())[:200]
        raise FileNotFoundError(
            f"there is no folder {name!r}, and no such model could be had from the hub or its cache"
            f" ({type(error).__name__}: {reason})."
        ) from error


def is_put_off(model: Any) -> bool:
    """Whether a model's weights are still to be read: `from_pretrained` made it, and it has not
    been sharded yet.
    """
    return getattr(model, _WEIGHTS, None) is not None and not is_sharded(model)


def shard(model: Any, recipe: Recipe, device: Any) -> None:
    """Shard a model, and read the weights that `from_pretrained` has put off. Collective.

    Adapters that take no gradient (a reference beside the trained adapter) are not quantized with
    the frozen base: they are small, and are switched on and off.
    """
    folder, replica = getattr(model, _WEIGHTS, None), getattr(model, _REPLICA, None)
    if replica is not None and recipe.stage > 0:
        recipe = recipe.replace(shard_group=replica)
    # Parameters that the folder lacks (a new head) are initialized as transformers does
    init = model._init_weights if folder is not None else None
    idle = []
    if recipe.frozen is not None and getattr(model, "peft_config", None):
        _, base = unwrapped(model, model.state_dict())
        idle = [n for n, p in model.named_parameters() if not p.requires_grad and n not in base]
    for name in idle:
        model.get_parameter(name).requires_grad_(True)
    axes: dict[str, Any] = {}
    if (meshes := getattr(model, "_mesh_manager", None)) is not None:  # transformers' plans
        data = ("dp_replicate", "fsdp")
        axes = {"mesh": meshes.get_mesh((*data, "tp")), "data": data}
    onefold.shard(model, recipe, device=device, weights=folder, init=init, **axes)
    for name in idle:
        model.get_parameter(name).requires_grad_(False)
