"""The mixin by which Onefold wraps, clips, saves and loads in a Trainer of transformers.

    Trainer.__init__            checks the arguments; the model stays where it is
    train(), evaluate()         shard the model in place, before the first batch
    every step                  Trainer's own loop, loss and accumulation; Onefold computes the norm
    save_model(), checkpoints   written by all ranks:

    output_dir/checkpoint-300/
        model.safetensors, config.json, ...     as save_pretrained writes them: from_pretrained opens the folder
        adapter_model.safetensors, ...          in place of model.safetensors, for peft's adapters
        onefold/                                masters and optimizer states: load at any stage, on any number of ranks
        scheduler.pt, trainer_state.json, rng_state_0.pth, training_args.bin         Trainer's own files

No rank holds the whole model: each writes its part of it, and of the training state. Weights are
written in the dtype in which the model was loaded.

`trainer.model` is always the same object, of the same class.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

import onefold
from onefold import hosts
from onefold.checkpoint.manifest import MANIFEST
from onefold.checkpoint.together import Together
from onefold.checkpoint.values import refuse_another_state
from onefold.hf import loading
from onefold.hf.accelerator import ShardingAccelerator
from onefold.hf.arguments import in_precision, recipe_of
from onefold.hf.refusals import (
    refuse_accelerator,
    refuse_arguments,
    refuse_frozen,
    refuse_model,
    refuse_prompts,
    refuse_whole_samples,
)
from onefold.pretrained.adapters import embedding_layers
from onefold.reading import StrPath
from onefold.recipe import Recipe
from onefold.runtime.hooks import is_sharded
from onefold.tracing.blocks import compile_blocks

if TYPE_CHECKING:
    _Host: Any = transformers.Trainer
else:
    _Host = object


#: Packages with Trainer classes. The mixin must be listed before such a class.
_HOSTS = ("transformers.", "trl.")


class TrainerMixin(_Host):
    """Make a Trainer class train by a recipe of Onefold. List it before the Trainer:

    class Tuner(onefold.hf.TrainerMixin, trl.SFTTrainer): ...
    Tuner(model, args=args, train_dataset=data, recipe=onefold.Recipe.zero(stage=3)).train()

    Every rank must make the same calls, including `save_model()` and `evaluate()`.

    Args:
        recipe: a Recipe, a stage, or a dict of `Recipe.zero`'s options; None if the training
            arguments have `onefold`. All other arguments are the Trainer's own.

    Attributes:
        recipe: the recipe by which the model is sharded.

    Raises:
        ValueError, NotImplementedError: arguments contradict each other, or ask for something that
            Onefold does not do. The message says what to write.
    """

    recipe: Recipe

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        bases = cls.__mro__
        if transformers.Trainer not in bases:
            raise TypeError(
                f"{cls.__name__} has onefold.hf.TrainerMixin and no Trainer behind it: write `class"
                f" {cls.__name__}(onefold.hf.TrainerMixin, Trainer)`."
            )
        before = next(b for b in bases if b is TrainerMixin or b.__module__.startswith(_HOSTS))
        if before is not TrainerMixin:
            raise TypeError(
                f"{cls.__name__} names {before.__name__} before onefold.hf.TrainerMixin, which must"
                f" stand first: `class {cls.__name__}(onefold.hf.TrainerMixin,"
                f" {before.__name__})`."
            )

    def __init__(self, *args: Any, recipe: Any = None, **kwargs: Any) -> None:
        self._onefold_given: Any = recipe
        super().__init__(*args, **kwargs)
        if hasattr(self, "_dist"):  # TRL's, where it generates
            self._dist.summon_full_params = keep_whole
        streams = hosts.stream_to_vllm(type(getattr(self, "vllm_generation", None)))
        if getattr(self.args, "use_vllm", False) and not streams:
            raise NotImplementedError(
                f"use_vllm=True: {type(self).__name__} does not send its weights by VLLMGeneration of"
                " TRL 1.16: leave use_vllm out, and the ranks that train generate themselves."
            )

    # -- before the first batch --------------------------------------------------------------------

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """False, also of a model that transformers has parallelized while it was loaded: Trainer would
        refuse to save such a model's optimizer, which Onefold does.
        """
        return False

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, value: bool) -> None:
        """Ignore what Trainer says of its model."""

    def create_accelerator_and_postprocess(self) -> None:
        recipe = recipe_of(self._onefold_given, self.args)
        refuse_arguments(self.args, recipe)
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator)
        self.recipe = in_precision(recipe, str(self.accelerator.mixed_precision))
        self.accelerator.__class__ = ShardingAccelerator
        self.accelerator.onefold_recipe = self.recipe
        # Trainer took it from the accelerator as it was before
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Do nothing: `onefold.shard` moves the model."""

    def _shard_model(self) -> None:
        """Shard `self.model` in place, unless it is sharded already. Collective."""
        model = self.model
        if not is_sharded(model):
            refuse_model(model)
            if (args := self.args).torch_compile:
                asked = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
                how = {name: value for name, value in asked.items() if value}
                compile_blocks(model, "torch_compile=True", **how)
            loading.shard(model, self.recipe, self.args.device)
        self.accelerator.onefold_model = weakref.ref(model)
        self.model_wrapped = self.accelerator.prepare_model(model)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Make Trainer's own loader, of whichever dataset."""
        refuse_whole_samples(self.model)
        return super()._get_dataloader(*args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        refuse_frozen(self.model)
        refuse_prompts(self.model, self.args)
        self._shard_model()
        self._scale_loss()
        return super()._inner_training_loop(*args, **kwargs)

    def _scale_loss(self) -> None:
        """Give accelerate Onefold's scaler for fp16, which scales the loss and skips steps.

        If the gradients of any rank overflow, all ranks skip the step.
        """
        accelerator = self.accelerator
        own = getattr(accelerator.scaler, "_engines", None) == [onefold.engine_of(self.model)]
        if self.recipe.parameters.dtype != torch.float16:
            accelerator.scaler = None
        elif not own:  # the scaler is accelerate's own, or belongs to another model
            handler = accelerator.scaler_handler
            options = handler.to_kwargs() if handler is not None else {}
            accelerator.scaler = onefold.GradScaler(self.model, **options)

    def _torch_optimizer(self) -> Any:
        """Return Trainer's optimizer without accelerate's wrappers."""
        optimizer = self.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        return optimizer

    # -- a step ------------------------------------------------------------------------------------

    def _unscale(self) -> None:
        """Divide the gradients by fp16's loss scale, before their norm is taken."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(self._torch_optimizer())

    def _clip_grad_norm(self, model: Any) -> Tensor:
        self._unscale()
        return onefold.clip_grad_norm_(self.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None and not self.recipe.step_in_backward:
            self._unscale()
            grad_norm = onefold.clip_grad_norm_(self.model, math.inf)
        return grad_norm

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._shard_model()
        generating = getattr(self, "_gen_kwargs", None)  # Seq2SeqTrainer's
        if generating is not None and self.recipe.parameters.sharded:
            generating.setdefault("synced_gpus", True)  # all ranks must make equally many passes
        return super().evaluation_loop(*args, **kwargs)

    # -- saving and loading ------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the model. Collective if it is sharded or its weights are still to be read."""
        if loading.is_put_off(self.model):
            self._shard_model()
        if not is_sharded(self.model):
            super()._save(output_dir, state_dict)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        save_weights(self.model, folder)

        def write() -> None:
            collator = getattr(self, "data_collator", None)
            words = self.processing_class or getattr(collator, "tokenizer", None)
            if words is not None:
                words.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

        on_first(self.model, write)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write master weights, optimizer states and what else a run resumes from. Collective.

        Frozen parameters are left out if the model has peft's adapters, except for embedding layers
        that peft writes beside these.
        """
        model = self.model
        onefold.save(
            Path(output_dir) / STATE,
            model=model,
            optimizer=self._torch_optimizer(),
            step=int(self.state.global_step),
            overwrite=True,
            frozen=embedding_layers(model) if getattr(model, "peft_config", None) else True,
        )
        place = os.path.join(output_dir, SCHEDULER_NAME)
        on_first(model, lambda: torch.save(self.lr_scheduler.state_dict(), place))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights if the model is sharded. At the beginning of `train` it is not yet, and
        `_load_optimizer_and_scheduler` reads them.
        """
        if is_sharded(self.model):
            load_checkpoint(self.model, None, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not load_checkpoint(self.model, self._torch_optimizer(), checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        schedule = os.path.join(checkpoint, SCHEDULER_NAME)
        state = torch.load(schedule, weights_only=True)
        refuse_another_state(schedule, "scheduler", self.lr_scheduler, state)
        self.lr_scheduler.load_state_dict(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the loss scale, unless this run computes in another precision than fp16."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        load_checkpoint(self.model, None, self.state.best_model_checkpoint)


@contextlib.contextmanager
def keep_whole(module: nn.Module, **options: Any) -> Iterator[None]:
    """How TRL's trainers that generate (GRPO, RLOO) get whole weights: inside, each unit stays
    gathered in the compute dtype after its first use, so that ranks may generate texts of different
    lengths. Collective.
    """
    with onefold.keep_gathered(module) if is_sharded(module) else contextlib.nullcontext():
        yield


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' Trainer with a recipe of Onefold.

    `TrainerMixin` documents the argument `recipe`, transformers all others.
    """


# -- Trainer's checkpoints ---------------------------------------------------------------------------

#: The folder of training state in one of Trainer's checkpoints.
STATE = "onefold"
#: The folder in which weights are written before they are moved to their place.
_ASIDE = ".onefold-unfinished"
_WEIGHTS = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|pytorch_model.*\.bin"
)


def save_weights(model: nn.Module, folder: StrPath) -> None:
    """Write the model, or its adapters, into a folder that may have other files. Collective.

    Existing weights are replaced once the new ones are complete. As in peft, adapters other than
    "default" get a folder of their name.

    Raises:
        CheckpointError: the weights could not be written; raised on every rank.
    """
    target, adapters = Path(folder), list(getattr(model, "peft_config", None) or ())
    aside = target / _ASIDE
    for name in adapters or ["default"]:
        if adapters:
            onefold.save_adapters(model, aside, name, overwrite=True)
        else:
            onefold.export(model, aside, _dtype(model), overwrite=True)
        place = target if name == "default" else target / name
        on_first(model, functools.partial(_move_into, aside, place))


def on_first(model: nn.Module, write: Callable[[], object]) -> None:
    """Call `write` on the first rank. An error there raises on every rank. Collective."""
    Together.of(onefold.engine_of(model)).said_by_first(write)


def load_checkpoint(model: nn.Module, optimizer: Any, folder: StrPath) -> bool:
    """Load one of Trainer's checkpoints into the sharded model and its optimizer (None: the model
    alone). Collective. Returns whether it has the folder `STATE`. Without it, only the weights are
    loaded, from the files of `save_weights` or of Trainer itself.

    Raises:
        CheckpointError: the folder has no weights, or those of another model; raised on every rank.
    """
    path, adapters = Path(folder), list(getattr(model, "peft_config", None) or ())
    state = path / STATE
    if not (state / MANIFEST).is_file():  # saved without Onefold's state, or without Onefold
        for name in adapters:
            onefold.load_adapters(model, path if name == "default" else path / name, name)
        if not adapters:
            onefold.load_pretrained(model, path)
        return False
    strict: Any = "trained" if adapters else True
    onefold.load(state, model=model, optimizer=optimizer, strict=strict, rng=False)
    return True


def _dtype(model: nn.Module) -> torch.dtype | str | None:
    """Return the dtype in which to export weights: that in which the model was loaded.

    If its parameters have several dtypes, the master weights' dtype is used under a recipe with a
    compute dtype, and each parameter's own dtype otherwise.
    """
    declared = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(declared) == 1:
        return declared.pop()
    return None if onefold.engine_of(model).recipe.parameters.dtype is None else "master"


def _move_into(made: Path, target: Path) -> None:
    """Move all files of a folder into another, where they replace the weights."""
    target.mkdir(exist_ok=True)
    new = {file.name for file in made.iterdir()}
    for file in sorted(made.iterdir()):
        os.replace(file, target / file.name)
    for file in sorted(target.iterdir()):
        if file.name not in new and file.is_file() and _WEIGHTS.fullmatch(file.name):
            file.unlink()
    made.rmdir()
