"""The engine of the four-tuple: `engine(batch)`, `engine.backward(loss)`, `engine.step()`, over a
sharded module.

    micro-batch 1          micro-batch 2 (boundary)
    forward  backward step forward  backward step
    no_sync  no_sync   -   sync     sync     clip, optimizer, zero_grad, schedule

`step()` is called after every micro-batch, and steps the optimizer at the boundary only.
Backward passes before the boundary count as under `onefold.no_sync`: stages 0 and 1 send nothing
until the boundary; stages 2 and 3 follow their recipe. The engine follows the passes of its module
(passes.py), so scripts may also call the module itself, and a loss's own `backward()`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from onefold.deepspeed import checkpoints
from onefold.deepspeed.accumulation import Accumulation
from onefold.deepspeed.autocast import AutocastPasses
from onefold.deepspeed.config import DeepSpeedConfig
from onefold.deepspeed.facts import NOT_OF_THE_ENGINE
from onefold.deepspeed.misuse import EngineMisuse, NoScalarLoss
from onefold.deepspeed.optimizer_facts import show_scale
from onefold.deepspeed.passes import Passes
from onefold.deepspeed.saving import WholeSaves
from onefold.deepspeed.scaling import LossScaler, scale_gradients
from onefold.wording import few

logger = logging.getLogger("onefold")


class DeepSpeedEngine(WholeSaves, Accumulation, nn.Module):
    """A sharded module with its optimizer and schedule, driven by DeepSpeed's calls.

    Attributes:
        module: the sharded module itself. Attributes that the engine lacks are looked up in it.
        optimizer, lr_scheduler, training_dataloader: the other three of the tuple, or None.
        config: the configuration as it was given, as one nested dict.
        settings: the configuration as it was read.
        loss_scaler: the loss scaler of fp16; None in other precisions.
        micro_steps: number of `step()` calls.
        global_steps: number of optimizer steps, including skipped ones.
        skipped_steps: number of steps that were skipped because gradients were not finite.
        global_samples: number of samples so far, over all ranks.
        collate_fn: the `collate_fn` of loaders that `deepspeed_io` makes.
        keeps_gradients: if true, `step` does not clear the gradients; the next forward pass or
            `zero_grad` does. Code that reads gradients after a step (AdaLoRA) needs this.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DeepSpeedConfig,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings, self.config = config, config.given
        self.optimizer, self.lr_scheduler, self.training_dataloader = (
            optimizer,
            lr_scheduler,
            training_dataloader,
        )
        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self._accumulation = config.batch.accumulation or 1
        self.loss_scaler = LossScaler(config.loss_scaling) if config.loss_scaling else None
        self._is_gradient_accumulation_boundary: bool | None = None
        self._inside_no_sync = self._coalescing = self._stepping = self._step_applied = False
        self.keeps_gradients = False
        self._norm: Tensor | None = None
        self._seconds: dict[str, float] = {}
        self.collate_fn: Any = None
        runtime = onefold.engine_of(module)
        self.global_rank, self.world_size = runtime.rank, runtime.world_size
        if optimizer is not None:
            show_scale(optimizer, self.loss_scaler)
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._autocast = AutocastPasses(config.autocast)
        self._passes = Passes(self, self.world_size if config.sums_gradients else 1)

    # -- the three calls ---------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        with self._timed("forward"), self._autocast.context(self.device):
            return self.module(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        create_graph: bool = False,
    ) -> Tensor:
        """Run the backward pass of a scalar loss, divided by the accumulation steps and multiplied
        by the loss scale.

        Args:
            loss: the mean over this rank's micro-batch; shape [].
            retain_graph, create_graph: as in `Tensor.backward`.
            scale_wrt_gas: False omits the division by the accumulation steps.

        Returns:
            the loss divided by the accumulation steps, without the loss scale.

        Raises:
            NoScalarLoss: `loss` is no scalar with a graph.
            EngineMisuse: the engine has no optimizer, or the whole model is gathered.
        """
        self._needs_optimizer("backward")
        if onefold.engine_of(self.module).full_params_depth:
            raise EngineMisuse(
                "engine.backward() was called inside a context that gathers the whole model, where"
                " no gradient is reduced: leave GatheredParameters or full_params first."
            )
        _check_loss("backward", loss)
        loss = loss / self._accumulation if scale_wrt_gas else loss
        scaled = loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale
        with self._timed("backward"), self._passes.of_engine():
            scaled.backward(retain_graph=retain_graph, create_graph=create_graph)
        return loss

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Return the loss times fp16's loss scale, to call `engine.scale(loss).backward()` instead
        of `engine.backward(loss)`. Such a backward pass divides by the accumulation steps itself.

        Args:
            retain_graph: accepted; the call of `backward` decides.

        Raises:
            NoScalarLoss: `loss` is no scalar with a graph.
        """
        self._needs_optimizer("scale")
        _check_loss("scale", loss)
        if self.loss_scaler is None:
            return loss
        return self._passes.follow_scaled(loss.float() * self.loss_scaler.scale)

    @property
    def scales_loss(self) -> bool:
        """Whether backward passes need a scaled loss."""
        return self.loss_scaler is not None and self.loss_scaler.is_needed()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count this micro-batch. At the boundary, clip, step the optimizer, clear the gradients
        and step the schedule.

        In the 16-bit precisions, a step with gradients that are not finite is skipped on all ranks
        (in bf16 unless the configuration turns this off).

        Raises:
            EngineMisuse: there is no optimizer, or the call is inside `no_sync` or
                `coalesce_grad_reduction`.
            FloatingPointError: fp16 gradients overflow at the smallest loss scale.
        """
        self._needs_optimizer("step")
        if self._inside_no_sync or self._coalescing:
            raise EngineMisuse(
                "It is illegal to call Engine.step() inside no_sync context manager, or inside"
                " coalesce_grad_reduction: nothing is reduced there. Leave the block first."
            )
        self._step_applied, self._stepping = False, True
        try:
            if self.is_gradient_accumulation_boundary():
                with self._timed("step"):
                    self._optimizer_step(lr_kwargs or {})
                self._report()
        finally:
            self._stepping = False
        self.micro_steps += 1

    def _optimizer_step(self, lr_kwargs: dict[str, Any]) -> None:
        onefold.engine_of(self.module).reduce_pending()
        if self.settings.refuses_unused:
            self._refuse_unused()
        overflow = self.optimizer.overflow = not self._clip()
        if not overflow:
            self.optimizer.step()
            self._step_applied = True
        passes, self._passes.since_step = self._passes.since_step, 0
        self._passes.stepped = self.keeps_gradients and not overflow
        if not self._passes.stepped:
            self.module.zero_grad()
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        batch = self.settings.batch
        self.global_samples += (
            batch.train or 0
            if self.settings.managed_accumulation
            else (batch.micro or 0) * self.world_size * passes
        )

    def _refuse_unused(self) -> None:
        unused = [
            name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None
        ]
        if unused:
            raise EngineMisuse(
                f"parameters got no gradient since the last step: {few(unused, 3)}, and"
                ' the configuration says "ignore_unused_parameters": false. Freeze them'
                " (requires_grad_(False)), use them in the loss, or set ignore_unused_parameters to"
                " true."
            )

    def _clip(self) -> bool:
        """Unscale and clip the gradients. Return False if the step must be skipped because they are
        not finite; the answer is the same on all ranks.
        """
        config, limit = self.settings, self.settings.gradient_clipping or math.inf
        self._norm = None
        if not (config.gradient_clipping or config.compute_grad_norm or config.skip_nonfinite):
            return True
        if self.loss_scaler is None:
            self._norm = onefold.clip_grad_norm_(self.module, limit)
            return not config.skip_nonfinite or math.isfinite(float(self._norm))
        # The norm is taken over all ranks: it is not finite on every rank if any rank overflowed.
        scale = self.loss_scaler.scale
        norm = float(onefold.clip_grad_norm_(self.module, math.inf)) / scale
        finite = math.isfinite(norm)
        if finite:
            scale_gradients(self.module, min(1.0, limit / (norm + 1e-6)) / scale)
        self._norm = torch.tensor(norm, device="cpu")
        self.loss_scaler.update(not finite)
        if not finite and self.global_rank == 0:
            logger.info(
                "step %d overflowed at loss scale %g and is skipped; next scale %g",
                self.global_steps,
                scale,
                self.loss_scaler.scale,
            )
        return finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. `step` or the next forward pass does this; see `keeps_gradients`."""
        self._passes.stepped = False
        self.module.zero_grad(set_to_none)

    # -- saving ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint to resume from to `save_dir`/`tag`, in Onefold's format. Every rank
        must call it.

        Args:
            tag: the checkpoint's name; None takes "global_step" and the number of steps. An
                existing checkpoint of this name is replaced once the new one is complete.
            client_state: values that `load_checkpoint` returns; the first rank's are saved.
            save_latest: let `save_dir`/latest name this checkpoint.
            exclude_frozen_parameters: leave out parameters that take no gradient (the base of
                adapters). Loading such a checkpoint leaves these parameters as they are.

        Returns:
            True, on every rank, once the checkpoint is complete.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on every rank.
        """
        frozen = not exclude_frozen_parameters
        checkpoints.save(self, save_dir, tag, client_state or {}, save_latest, frozen)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of this engine, or of DeepSpeed itself at ZeRO stages 1 to 3. Every
        rank must call it.

        The stage and the number of ranks may differ from those of the run that saved it.

        Args:
            load_dir: the `save_dir` that was given to `save_checkpoint`.
            tag: the checkpoint's folder in it; None takes the one that `load_dir`/latest names.
            load_module_strict: raise if a name is only in the model or only in the checkpoint.
            load_optimizer_states: load the optimizer's states and the loss scale.
            load_lr_scheduler_states: load the schedule's state.
            load_module_only: load weights and buffers only; the counts of steps stay as they are.

        Returns:
            the checkpoint's folder, and the `client_state` it was saved with; (None, None) if there
            is no checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be read or does not fit; raised on every rank.
            NotImplementedError: `custom_load_fn` is given.
        """
        if custom_load_fn is not None:
            raise NotImplementedError(
                "custom_load_fn: no whole state dict exists here to give it; leave it out, and load"
                " by names."
            )
        wanted = {
            "optimizer": load_optimizer_states,
            "scheduler": load_lr_scheduler_states,
            "counts": True,
        }
        parts = frozenset(part for part, yes in wanted.items() if yes and not load_module_only)
        return checkpoints.load(self, load_dir, tag, load_module_strict, parts)

    def resume_at(
        self, global_steps: int = 0, skipped_steps: int = 0, global_samples: int = 0
    ) -> None:
        """Set the counts of steps and samples from which the engine continues."""
        self.global_steps, self.skipped_steps, self.global_samples = (
            global_steps,
            skipped_steps,
            global_samples,
        )
        self.micro_steps = global_steps * self._accumulation

    # -- what else may be asked of it ----------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            if (why := NOT_OF_THE_ENGINE.get(name)) is not None:
                raise AttributeError(f"engine.{name} is not served here: {why}.") from None
            raise AttributeError(
                f"neither the engine nor its {type(self.module).__name__} has an attribute"
                f" {name!r}."
            ) from None

    def compile(self, backend: Any = None, compile_kwargs: Any = None, **others: Any) -> None:
        """Compile the module's forward pass with `torch.compile`."""
        options = dict(compile_kwargs or {}) | others
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)

    def destroy(self) -> None:
        """Release the optimizer, the schedule and the data loader; the module stays usable."""
        self._passes.close()
        self.optimizer = self.lr_scheduler = self.training_dataloader = None

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group, until a schedule sets its own."""
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            group["lr"] = lr

    def _needs_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise EngineMisuse(
                f"engine.{call}() needs an optimizer: pass optimizer= to initialize, or name one in"
                ' the configuration, as in "optimizer": {"type": "AdamW", "params": {"lr":'
                " 1e-4}}."
            )


def _check_loss(call: str, loss: Any) -> None:
    """Raise NoScalarLoss unless `loss` is a scalar tensor with a graph."""
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        given = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise NoScalarLoss(
            f"engine.{call} was given {given}: expected a scalar loss with a graph (a scalar tensor,"
            " as from mean())."
        )
