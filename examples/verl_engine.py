"""verl on Onefold: an engine under the name `onefold`, for language models. verl loads it itself:

PYTHONPATH=examples VERL_USE_EXTERNAL_MODULES=verl_engine torchrun ... -m verl.trainer.sft_trainer
    engine._target_=verl_engine.EngineConfig engine.strategy=onefold
    +engine.recipe={stage: 3}        # or a stage; the options are those of Recipe.zero

Batches, losses, schedules and the model are built as in verl's FSDP engine. Onefold shards,
reduces, clips, saves, and gives whole tensors to the inference engine. Written for verl 0.9.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import convert_weight_keys
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params

import onefold
from onefold import Recipe

logger = logging.getLogger("onefold")
NAME = "onefold"
_FOLDER, _MODEL = "onefold", "huggingface"
#: Keys of verl's FSDP engine that Onefold does not read: {key: (its only value, what to write)}.
_LEFT = {
    "param_offload": (False, "+engine.recipe={stage: 3, offload_param: cpu}"),
    "optimizer_offload": (False, "+engine.recipe={stage: 3, offload_optimizer: cpu}"),
    "offload_policy": (False, "+engine.recipe={stage: 3, offload_optimizer: cpu}"),
    "reshard_after_forward": (True, "+engine.recipe={stage: 3, reshard_after_forward: false}"),
    "forward_prefetch": (False, "+engine.recipe={stage: 3, prefetch: 1}"),
    "fsdp_size": (-1, "+engine.recipe={stage: 3, shard_group: node}"),
    "use_orig_params": (False, "nothing: parameters keep their objects"),
    "ulysses_sequence_parallel_size": (1, "nothing: it is not there"),
}


@dataclass
class EngineConfig(FSDPEngineConfig):
    """The configuration of verl's FSDP engine, and the recipe.

    Attributes:
        recipe: a stage, or a dict of `Recipe.zero`'s options such as {"stage": 3}.

    Raises:
        ValueError: there is no recipe, or a key asks for something that the recipe decides or that
            Onefold does not do.
    """

    recipe: Any = None
    strategy: str = NAME

    def __post_init__(self) -> None:
        for key, (plain, instead) in _LEFT.items():
            if self.get(key) != plain:
                raise ValueError(
                    f"verl's engine has {key}={self.get(key)!r}, which the engine of Onefold does"
                    f" not read: leave it at {plain!r} and write {instead}."
                )
        if self.wrap_policy.get("min_num_params") or set(self.wrap_policy) - {"min_num_params"}:
            raise ValueError(
                f"verl's engine has wrap_policy={dict(self.wrap_policy)!r}, which the engine of"
                " Onefold does not read: name the units in the recipe, as units: [LlamaDecoderLayer]."
            )
        if self.qat.enable:
            raise ValueError("the engine of Onefold has no qat: leave qat.enable at false.")
        self.read()

    def read(self) -> Recipe:
        """Return the recipe in verl's precision.

        This is bf16 with gradients sent in fp32, unless `mixed_precision` or the recipe says else.
        """
        given = convert_to_regular_types(self.recipe)
        options = dict(given) if isinstance(given, dict) else {"stage": given}
        if options.get("stage") is None:
            raise ValueError(
                f"verl's engine has strategy={NAME} and recipe={given!r}, which names no stage: write"
                " +engine.recipe={stage: 3}."
            )
        said = convert_to_regular_types(self.mixed_precision) or {}
        if said and "precision" in options:
            raise ValueError(
                f"the precision is given twice: mixed_precision={said!r}, and precision in the"
                " recipe. Keep one of them."
            )
        if "precision" not in options:
            dtype = PrecisionType.to_dtype(said.get("param_dtype", "bf16"))
            wire = PrecisionType.to_dtype(said.get("reduce_dtype", "fp32"))
            options["precision"] = None if dtype == torch.float32 else PrecisionType.to_str(dtype)
            options.setdefault("wire", PrecisionType.to_str(wire))
        recipe = Recipe.zero(**options)
        if recipe.parameters.dtype == torch.float16:
            raise ValueError("the engine of Onefold does not compute in fp16: use bf16 or fp32.")
        return recipe


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cpu", "cuda"])
class Engine(FSDPEngineWithLMHead):  # type: ignore[misc, unused-ignore]
    """verl's FSDP engine with Onefold in place of FSDP. Every rank must make the same calls."""

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard the model. Collective.

        Only rank 0 has read the weights, unless some are tied.
        """
        if self.model_config.enable_activation_offload:
            raise ValueError(
                "the engine of Onefold does not read enable_activation_offload: leave it out and"
                " write +engine.recipe={stage: 3, offload_activations: cpu}."
            )
        if self.checkpoint_config.get("async_save", False):
            raise ValueError(
                "the engine of Onefold saves before training goes on: leave checkpoint.async_save"
                " at false."
            )
        recipe = self.engine_config.read()
        self._autocast_dtype = recipe.parameters.dtype or torch.float32
        name = get_device_name()
        device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
        return onefold.shard(module, recipe, device=device)

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        deferred = self.engine_config.use_no_sync_for_gradient_accumulation
        if is_last_micro_batch or not deferred:
            return nullcontext()
        return onefold.no_sync(self.module)

    def optimizer_step(self) -> float:
        """Clip the gradients, and step unless their norm is not finite. Collective."""
        norm = onefold.clip_grad_norm_(self.module, self.optimizer_config.clip_grad).item()
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning("the norm of the gradients is %s: this update is left out.", norm)
            self.optimizer.zero_grad()
        return norm

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Do nothing: the engine's state stays where it is.

        Raises:
            ValueError: the call asks for a move to another device.
        """
        if (model or optimizer or grad) and device != get_device_name():
            raise ValueError(
                f"the engine of Onefold cannot move to {device!r} between phases: let the optimizer"
                " are stored there, by +engine.recipe={stage: 3, offload_optimizer: cpu}."
            )

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return an iterator of (name, whole tensor) in the compute dtype, with LoRA adapters
        merged. Collective.

        Raises:
            ValueError: the configuration asks for adapters that are not merged.
        """
        if self._is_lora and not self.model_config.lora.get("merge", False):
            raise ValueError(
                "the engine of Onefold sends adapters merged into their weights only: set"
                " model.lora.merge=true."
            )
        inner = self.module.get_base_model() if self._is_lora else self.module
        whole = onefold.stream_params(self.module, merge_adapters=self._is_lora)
        named = (
            item
            for name, tensor in whole
            for item in convert_weight_keys({name: tensor}, inner).items()
        )
        return unfuse_moe_params(named, self.model_config.hf_config.model_type), None

    def get_per_tensor_param_shard(self, **_: Any) -> Any:
        raise NotImplementedError(
            "the engine of Onefold gives whole tensors, not shards: use another checkpoint engine"
            " than delta_sharded."
        )

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save training state. Collective.

        If the configured contents include `hf_model`, also write a folder that `from_pretrained`
        opens.

        Raises:
            ValueError: the call asks for a copy to HDFS, or the configured contents leave out the
                model.
        """
        if local_path is None:
            return
        manager, into = self.checkpoint_manager, Path(local_path)
        _refuse_hdfs(hdfs_path)
        if not manager.should_save_model:
            raise ValueError(
                f"checkpoint.save_contents={manager.checkpoint_save_contents!r} leaves out 'model',"
                " without which the engine of Onefold saves nothing: add it."
            )
        if self.rank == 0:
            manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        onefold.save(
            into / _FOLDER,
            model=self.module,
            optimizer=self.optimizer if manager.should_save_optimizer else None,
            scheduler=self.lr_scheduler if manager.should_save_extra else None,
            step=global_step,
            overwrite=True,
            frozen=not (self._is_lora and manager.should_save_lora_only),
        )
        if manager.should_save_hf_model:
            words = self.model_config.get_processor()
            if self._is_lora:
                onefold.save_adapters(self.module, into / "lora_adapter", overwrite=True)
            else:
                onefold.export(self.module, into / _MODEL, tokenizer=words, overwrite=True)
        if self.rank == 0:
            manager.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Load a checkpoint, on any number of ranks and at any stage. Collective.

        As in verl, a local folder is not deleted.
        """
        if local_path is None:
            return
        manager = self.checkpoint_manager
        _refuse_hdfs(hdfs_path)
        onefold.load(
            Path(local_path) / _FOLDER,
            model=self.module,
            optimizer=self.optimizer if manager.should_load_optimizer else None,
            scheduler=self.lr_scheduler if manager.should_load_extra else None,
            rng=manager.should_load_extra,
            strict=not (self._is_lora and manager.should_save_lora_only),
        )


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise ValueError(
            f"the engine of Onefold does not copy checkpoints to HDFS ({path!r}): leave out"
            " trainer.default_hdfs_dir."
        )
