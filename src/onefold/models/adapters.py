"""`--lora`: low-rank adapters of peft around a frozen base model.

--lora 16                   adapters for every linear layer but the head; the base model is not trained
--lora 16 --frozen nf4      QLoRA: the base model is stored and gathered in 4 bits
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from onefold.models.build import Loaded, seeded
from onefold.models.names import is_hub_name
from onefold.plan.modules import adapted
from onefold.wording import TrainError, did_you_mean

if TYPE_CHECKING:
    from onefold.train.config import TrainConfig

#: peft's word for every linear layer but the head.
ALL_LINEAR = "all-linear"


def with_adapters(config: TrainConfig, loaded: Loaded) -> nn.Module:
    """Wrap the loaded model with peft's adapters and freeze everything else. If the model is on the
    meta device, so are the adapters.
    Raises TrainError if the model has no layers for them.
    """
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
    # The seed gives the same adapters on any number of ranks. Adapters on the meta device are
    # initialized in `onefold.shard`.
    try:
        with seeded(config.seed):
            wrapped = adapted(model, config.lora, config.lora_alpha, targets)
    except ValueError as error:  # the architecture computes with these layers in its own way
        raise TrainError(
            f"--lora {config.lora}: peft puts no adapters around these layers ({error})"
            " Name others by --lora-targets."
        ) from error
    # The place from which peft loads the base model
    adapter = wrapped.peft_config["default"]
    if os.path.isdir(config.model):
        adapter.base_model_name_or_path = os.path.abspath(config.model)
    elif is_hub_name(config.model):
        base, _, revision = config.model.partition("@")
        adapter.base_model_name_or_path, adapter.revision = base, revision or None
    module: nn.Module = wrapped
    return module


def targets_of(config: TrainConfig, model: nn.Module) -> str | list[str]:
    """Return the layers of `--lora-targets`: ALL_LINEAR, or names of linear layers.
    Raises TrainError for a name that the model does not have.
    """
    wanted = list(filter(None, (part.strip() for part in config.lora_targets.split(","))))
    if wanted == [ALL_LINEAR]:
        return ALL_LINEAR
    there = {name for name, module in model.named_modules() if is_linear(module)}
    short = {name.rpartition(".")[2] for name in there}
    for name in wanted or [""]:
        if not any(full == name or full.endswith("." + name) for full in there):
            raise TrainError(
                f"--lora-targets {name!r}: {config.model} has no linear layer of that name."
                f" {did_you_mean(name, {*short, ALL_LINEAR})}"
            )
    return wanted


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is linear, with a weight of [out, in] or, as in GPT-2, [in, out]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
