"""`--lora`: low-rank adapters of peft around a frozen base model.

--lora 16                   adapters around every linear layer but the head; the base is not trained
--lora 16 --frozen nf4      QLoRA: the base rests, and travels, in 4 bits
--merge                     beside the adapters, the whole model with the adapters added to its weights
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.checkpoint.errors import CheckpointError
from onefold.models.names import is_hub_name
from onefold.pretrained.merged import Merging
from onefold.wording import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.models.build import Loaded
    from onefold.train.config import TrainConfig

#: peft's word for every linear layer but the head.
ALL_LINEAR = "all-linear"


def with_adapters(config: TrainConfig, loaded: Loaded) -> nn.Module:
    """The loaded model inside peft's, with adapters to train: on the meta device where the model
    is, and without values there. Everything else is frozen.
    Raises TrainError if the model has no such layers.
    """
    import peft

    assert config.lora is not None
    model: Any = loaded.module
    if not loaded.is_transformers:
        raise TrainError(
            f"--lora {config.lora}: {config.model} makes a {type(model).__name__}, which is no model"
            " of transformers; return a model of peft from your factory instead."
        )
    if getattr(model, "peft_config", None):
        raise TrainError(f"--lora {config.lora}: {config.model} comes with adapters of its own.")
    targets = targets_of(config, model)
    settings = peft.LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha if config.lora_alpha is not None else 2 * config.lora,
        target_modules=targets if targets == ALL_LINEAR else list(targets),
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    empty = any(p.is_meta for p in model.parameters())
    # The same adapters on any number of ranks; those on meta get theirs in `onefold.shard`
    where = torch.device("meta" if empty else "cpu")
    with torch.random.fork_rng(devices=[]), where, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names that transformers will give up
        torch.manual_seed(config.seed)
        try:
            wrapped: Any = peft.get_peft_model(model, settings)
        except ValueError as error:  # layers that an architecture computes with in its own way
            raise TrainError(
                f"--lora {config.lora}: peft puts no adapters around these layers ({error})"
                " Name others by --lora-targets."
            ) from error
    # Where others find the base
    if os.path.isdir(config.model):
        wrapped.peft_config["default"].base_model_name_or_path = os.path.abspath(config.model)
    elif is_hub_name(config.model):
        wrapped.peft_config["default"].base_model_name_or_path = config.model.partition("@")[0]
    adapted: nn.Module = wrapped.train()
    return adapted


def refuse_unmergeable(model: nn.Module) -> None:
    """Raise TrainError before the first step if --merge could not be done after the last."""
    try:
        Merging.of(model)
    except CheckpointError as error:
        raise TrainError(f"--merge: {error} Leave --merge out to train the adapters.") from error


def targets_of(config: TrainConfig, model: nn.Module) -> str | tuple[str, ...]:
    """What `--lora-targets` names in this model: ALL_LINEAR, or names of linear layers.
    Raises TrainError for one that is not there.
    """
    wanted = tuple(filter(None, (part.strip() for part in config.lora_targets.split(","))))
    if wanted == (ALL_LINEAR,):
        return ALL_LINEAR
    there = {name for name, module in model.named_modules() if is_linear(module)}
    short = {name.rpartition(".")[2] for name in there}
    for name in wanted or ("",):
        if not any(full == name or full.endswith("." + name) for full in there):
            raise TrainError(
                f"--lora-targets {name!r}: {config.model} has no linear layer of that name."
                f" {did_you_mean(name, {*short, ALL_LINEAR})}"
            )
    return wanted


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight of [out, in], or as GPT-2's does, of [in, out]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
