"""The strategy of Lightning that shards the module.

The LightningModule itself is sharded in place, after `configure_model()` and before
`configure_optimizers()`. Its steps run as forward passes of the module, so that every parameter
that they use is gathered. Ranks are started as under DDP.

A checkpoint is a folder of `onefold.save`, with `lightning.pt`, which has what Lightning's file has
besides weights and optimizer states: loops, callbacks, schedules, hyperparameters. It resumes at any
stage and on any number of ranks. A file that Lightning wrote under DDP is loaded too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

import onefold
from onefold.checkpoint.manifest import MANIFEST
from onefold.hosts import in_precision
from onefold.recipe import Recipe
from onefold.runtime.hooks import engine_of, is_sharded

#: The file of a folder, and the key of optimizer states in it.
_FILE, _STATES = "lightning.pt", "optimizer_states"


class _InFolder(dict[str, Any]):
    """An empty state dict, in place of one that is stored in a folder's shards."""


class _Beside:
    """Writes a file beside the shards. `onefold.save` calls it as it calls a tokenizer."""

    def __init__(self, rest: dict[str, Any]) -> None:
        self._rest = rest

    def save_pretrained(self, folder: str) -> None:
        torch.save(self._rest, os.path.join(folder, _FILE))


def _step(name: str, context: str) -> Any:
    """Return the method that runs a step as a forward pass of the module, under a context of the
    precision plugin.
    """

    def run(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        with getattr(self.precision_plugin, context)():
            if name == "training_step" and not module.automatic_optimization:
                # Manual optimization runs backward passes and steps inside, so it cannot be one
                # forward pass: each call of a submodule is a pass of its own.
                return module.training_step(*args, **kwargs)
            return self._forward_redirection(module, module, name, *args, **kwargs)

    return run


class Strategy(DDPStrategy):
    """Train a LightningModule by a recipe: `L.Trainer(strategy=Strategy(stage=3), devices=8)`.

    After the fit the module stays sharded. To read it, call `onefold.full_state_dict(module)` on
    every rank.

    Args:
        recipe: how to shard, such as `onefold.Recipe.zero(stage=3)`; None if `stage` is given.
        stage: 0 to 3.
        init: initializes one module in place. It is used for modules on the meta device that have
            no `reset_parameters()`.
        process_group_backend: as in Lightning's DDPStrategy.
        timeout: as in DDPStrategy.
        start_method: as in DDPStrategy; only "popen" works.
        options: options of `onefold.Recipe.zero` besides `stage`: `precision="bf16"`,
            `offload_optimizer="cpu"`, ...

    Attributes:
        recipe: the recipe by which the module is sharded, in the Trainer's precision once it runs.

    Raises:
        ValueError: the arguments contradict each other. The message says what to write.
    """

    recipe: Recipe

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        stage: int | None = None,
        init: Callable[[nn.Module], object] | None = None,
        process_group_backend: str | None = None,
        timeout: Any = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        if recipe is None and stage is not None:
            recipe, stage, options = Recipe.zero(stage, **options), None, {}
        if not isinstance(recipe, Recipe) or stage is not None or options:
            raise ValueError(
                f"Strategy was given recipe={recipe!r} and {stage=}: expected Strategy(stage=3), with"
                " options of the recipe besides, or Strategy(onefold.Recipe.zero(stage=3, ...))"
                " alone; put all of it into the recipe."
            )
        if start_method != "popen":
            raise ValueError(
                f"start_method={start_method!r}: Lightning brings back one rank's weights from"
                ' processes that it forks or spawns, and each rank has a part. Use "popen" (the'
                " default), torchrun or Slurm."
            )
        waits = {} if timeout is None else {"timeout": timeout}
        super().__init__(process_group_backend=process_group_backend, **waits)
        self.recipe = self._given = recipe
        self._init = init
        # DDPStrategy's redirection sets flags of a DDP wrapper. Here there is no wrapper.
        self._forward_redirection = _ForwardRedirection()

    # -- before the first batch --------------------------------------------------------------------

    def setup_environment(self) -> None:
        for callback in self._module().trainer.callbacks:
            if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
                raise ValueError(
                    f"{type(callback).__name__} copies the whole module on every rank and mixes it"
                    " with this rank's parts. Average with onefold.ema.EMA in a callback of yours,"
                    " as docs/lightning.md shows: it is sharded as the model is."
                )
        if isinstance(self._checkpoint_io, AsyncCheckpointIO):
            raise ValueError(
                "AsyncCheckpointIO writes what one rank holds, and each rank writes its part of a"
                " checkpoint: leave the plugin out."
            )
        self.recipe = self._in_precision()
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._shard(fitting)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def _shard(self, fitting: bool) -> None:
        """Shard the module, unless it is sharded already. Collective."""
        module = self._module()
        if is_sharded(module):
            if engine_of(module).asked != self.recipe:
                raise ValueError(
                    "this module is sharded by another recipe already. Give Trainer the strategy"
                    " that it was sharded by, or a fresh module and ckpt_path= of a checkpoint,"
                    " which loads at any stage."
                )
            return
        if fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        if not isinstance(self.precision_plugin, HalfPrecision):
            # Under "bf16-true" the recipe makes the copies that compute; masters stay as they are
            self.precision_plugin.convert_module(module)
        _update_properties(module, device=self.root_device)
        for part in module.modules():
            if not (*part.parameters(), *part.buffers()):
                part.to(self.root_device)  # a metric has tensors that `shard` does not see
        onefold.shard(module, self.recipe, init=self._init, device=self.root_device)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build modules on the meta device under `trainer.init_module(empty_init=True)`."""
        where = torch.device("meta") if empty_init else contextlib.nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    # -- a step ------------------------------------------------------------------------------------

    training_step = _step("training_step", "train_step_context")
    validation_step = _step("validation_step", "val_step_context")
    test_step = _step("test_step", "test_step_context")
    predict_step = _step("predict_step", "predict_step_context")

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure (the step's last micro-batch), and then step the optimizer.

        A sharded optimizer needs the gradients before it begins, so it cannot call the closure.
        """
        plugin = self.precision_plugin
        scales = getattr(plugin, "scaler", None) is not None  # a scaler uses this order as well
        if scales or isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self._module(), optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients local in micro-batches before the boundary, if the recipe allows it.

        With several optimizers each micro-batch is reduced at once: `toggle_model` freezes the
        other optimizers' parameters, whose gradients could otherwise still be waiting.
        """
        waits = onefold.no_sync(self._module()) if len(self.optimizers) == 1 else None
        with waits or contextlib.nullcontext():
            yield

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm, over all ranks, of `optimizer`'s gradients. Collective."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        module = self._module()
        if all(id(p) in stepped for p in module.parameters() if p.requires_grad):
            onefold.clip_grad_norm_(module, clip_val)  # one collective for all parameters
        else:
            parameters = self.precision_plugin.main_params(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    # -- saving and loading ------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # the checkpoint is loaded into the shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return _InFolder()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return _InFolder()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the shards, and the rest of the checkpoint beside them. Collective.

        Raises:
            ValueError: `on_save_checkpoint` has changed the state dict, or the path is not in a file
                system.
        """
        path = str(self.broadcast(filepath))
        if storage_options is not None or "://" in path:
            raise ValueError(
                f"{path!r}, {storage_options=}: every rank writes its part of a checkpoint folder into"
                " a file system that all of them see: give a path alone."
            )
        rest = dict(checkpoint)
        weights, states = rest.pop("state_dict", None), rest.get(_STATES)
        if not isinstance(weights, _InFolder) or weights or any(states or ()):
            raise ValueError(
                "checkpoint['state_dict'] or checkpoint['optimizer_states'] was changed by"
                " on_save_checkpoint(). Each rank writes its part and nobody has them whole: leave"
                " them as they are; onefold.full_state_dict(module) makes one dict."
            )
        if states is not None:
            rest[_STATES] = []  # says that the shards include optimizer states
        onefold.save(
            path,
            model=self._module(),
            optimizer=self._bare() if states is not None else None,
            step=int(checkpoint["global_step"]),
            tokenizer=_Beside(rest),
            overwrite=True,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load the shards into the module, and into the optimizers if the folder has their states
        and the Trainer fits. Return the rest as Lightning expects it. Collective.

        Raises:
            ValueError: the folder was not saved by a Trainer.
        """
        path = str(self.broadcast(checkpoint_path))
        if not os.path.isfile(os.path.join(path, MANIFEST)):
            return super().load_checkpoint(path, weights_only)
        file = os.path.join(path, _FILE)
        if not os.path.isfile(file):
            raise ValueError(
                f"{path} has no {_FILE}: it was saved by onefold.save, not by a Trainer. Start the"
                " fit without ckpt_path=, and call onefold.load(path, model=self) in on_fit_start()."
            )
        module = self._module()
        rest = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        wanted = self._bare() if fitting and _STATES in rest else None
        onefold.load(
            path, model=module, optimizer=wanted, strict=module.strict_loading, rng=bool(wanted)
        )
        return {**rest, "state_dict": _InFolder()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if isinstance(checkpoint["state_dict"], _InFolder):
            return  # load_checkpoint has read it
        onefold.load_full_state_dict(self._module(), checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if isinstance(checkpoint["state_dict"], _InFolder):
            return
        for optimizer, state in zip(self._bare(), checkpoint[_STATES], strict=True):
            optimizer.load_state_dict(state)

    # -- the end -----------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Tear down the environment. The module and its optimizers stay sharded and in place."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _in_precision(self) -> Recipe:
        """Return the recipe with the precision that the Trainer asks for.

        | precision                | parameters compute in              | under          | the optimizer steps |
        |--------------------------|------------------------------------|----------------|---------------------|
        | "32-true" (default)      | the recipe's precision             |                | fp32                |
        | "bf16-mixed", "16-mixed" | their own dtype, as under DDP      | torch.autocast | fp32                |
        | "bf16-true"              | bf16: the recipe's precision       |                | fp32 masters        |
        | "64-true"                | fp64                               |                | fp64                |

        Raises:
            ValueError: the recipe names another precision, or this one is not supported here.
        """
        plugin, recipe, own = self.precision_plugin, self._given, self._given.parameters.dtype
        asked, kind = f"Trainer(precision={plugin.precision!r})", type(plugin)
        if kind is Precision:
            return recipe
        if kind is HalfPrecision and plugin.precision == "bf16-true":
            return in_precision(recipe, torch.bfloat16, asked)
        if kind is DoublePrecision or kind is MixedPrecision:
            if own is None or (kind is MixedPrecision and own == torch.float32):
                return recipe
            how = (
                "runs torch.autocast over fp32 parameters"
                if kind is MixedPrecision
                else "computes in fp64"
            )
            raise ValueError(
                f"{asked} {how}, and the recipe computes in {str(own).removeprefix('torch.')}: leave"
                " one of them out."
            )
        if kind is HalfPrecision:
            raise ValueError(
                f"{asked} has no loss scaling, so that small gradients vanish: use"
                ' precision="16-mixed", or "bf16-true".'
            )
        raise ValueError(
            f"onefold.lightning.Strategy does not know the precision plugin {kind.__name__}: use"
            ' precision="32-true", "bf16-mixed", "16-mixed", "bf16-true" or "64-true". Weights in 8'
            ' and 4 bits are the recipe\'s: Strategy(stage=3, frozen="nf4").'
        )

    def _bare(self) -> list[Any]:
        """Return torch's optimizers without Lightning's wrappers."""
        every = self.optimizers
        return [o.optimizer if isinstance(o, LightningOptimizer) else o for o in every]

    def _module(self) -> Any:
        module = self.lightning_module
        assert module is not None
        return module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names that `Trainer(strategy=...)` accepts."""
        add = partial(strategy_registry.register, strategy=cls, override=True)
        what = "Onefold: training state held once, stage {} of ZeRO"
        add("onefold", description=what.format(3), stage=3)
        for stage in (1, 2, 3):
            add(f"onefold_stage_{stage}", description=what.format(stage), stage=stage)


def register() -> None:
    """Register the names of `Strategy` with Lightning, for `L.Trainer(strategy=...)`."""
    Strategy.register_strategies(StrategyRegistry)
