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


class Weights:
    """The weights given to `onefold.shard(weights=...)`. An error is kept until `settle`, which
    raises it on all ranks.

    Attributes:
        names: every name of the model for which the folder has values.
        error: why the weights cannot be loaded.
    """

    def __init__(
        self,
        folder: StrPath,
        module: nn.Module,
        device: torch.device,
        makes_up: bool,
    ) -> None:
        """Open the folder. `makes_up`: the caller initializes parameters that the folder lacks.
        `device`: the device of peft's adapters.
        """
        self.names: set[str] = set()
        self.error: Exception | None = None
        self._fitted: Fitted | None = None
        try:
            if getattr(module, "peft_config", None):
                materialize_adapters(module, device)
            self._fitted = opened(folder, module)
            self.names = self._fitted.names()
            absent = [n for n, p in module.named_parameters() if p.is_meta and n not in self.names]
            _, base = unwrapped(module, module.state_dict())
            # What peft begins its adapters with is known of LoRA alone
            known = base.keys() | copies(module).keys()
            if absent and not (makes_up and known >= {*absent}):
                left = self._fitted.unexpected
                more = f", and {len(left)} tensors that fit nowhere in it ({few(left)})"
                more = more if left else ""
                raise CheckpointError(
                    f"{self._fitted.describe} has nothing for {len(absent)} of the parameters that"
                    f" the model has on the meta device ({few(absent)}){more}. Is it of another"
                    " model? Give shard(..., init=function) to initialize what is missing; build"
                    " adapters of peft other than plain LoRA in memory."
                )
        except Exception as error:
            self.error = error

    def settle(self, engine: Engine) -> None:
        """Check that all ranks have opened the same weights. Collective.
        Raises: CheckpointError: on every rank, if they have not or if a rank has an error.
        """

        def fitted() -> Fitted:
            if self.error is not None:
                raise self.error
            assert self._fitted is not None
            return self._fitted

        meet(engine, "shard(weights=...)")
        opened_alike(Together.of(engine), fitted)

    def load_shards(self, engine: Engine, module: nn.Module) -> None:
        """Read the weights into the sharded model. Collective."""
        assert self._fitted is not None
        together = Together.of(engine)
        loaded = apply_source([engine], [module], together, self._fitted, strict=False)
        kept = "not in it, so left as the model brought them or as init made them"
        nowhere = "fitting nowhere in the model"
        for names, what in ((loaded.missing, kept), (loaded.unexpected, nowhere)):
            if names and engine.rank == 0:
                logging.getLogger("onefold").warning(
                    f"{self._fitted.describe}: {what} ({len(names)}): {few(names)}"
                )

    def close(self) -> None:
        if self._fitted is not None:
            self._fitted.close()


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
        own = (p for path, p in layer.named_parameters() if path.split(".")[1:2] == [name])
        if not any(p.is_meta for p in own):
            continue
        parts = [
            part for kind in layer.adapter_layer_names if name in (part := getattr(layer, kind, {}))
        ]
        how = config.init_lora_weights
        if how not in (True, False, "gaussian") or config.use_dora:
            raise CheckpointError(
                f"adapter {name!r} starts from the base model's weights"
                f" ({'DoRA' if config.use_dora else repr(how)}), which are not there while the"
                " model is on the meta device: build it in memory, or give"
                " init_lora_weights=True or 'gaussian'."
            )
        for part in parts:
            if isinstance(part[name], torch.Tensor):
                zeros = torch.zeros_like(part[name], device=device)
                part[name] = nn.Parameter(zeros, requires_grad=part[name].requires_grad)
            else:
                part[name].to_empty(device=device)
                if hasattr(part[name], "reset_parameters"):
                    part[name].reset_parameters()
        layer.reset_lora_parameters(name, how)
